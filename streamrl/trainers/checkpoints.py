"""Directories that are complete or absent: written under a hidden name, synced, then renamed.

Beside a directory `name` there may be `.name.writing-*` (a write that never finished) and `.name.replaced` (the former
content while it is being exchanged). `list_checkpoints` sees neither; the next write or `recover` of that name and `prune`
tidy them up.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from streamrl.errors import TrainingError
from streamrl.schemas.versions import Version

logger = logging.getLogger(__name__)


def list_checkpoints(root: Path, prefix: str = "") -> list[tuple[Version, Path]]:
    """Complete checkpoints `<prefix>v<number>-e<epoch>` under `root`, oldest version first; none when `root` does not exist."""
    pattern = re.compile(re.escape(prefix) + r"v(\d+)-e(\d+)")
    matches = [(pattern.fullmatch(path.name), path) for path in (root.iterdir() if root.is_dir() else ())]
    return sorted((Version(int(match[2]), int(match[1])), path) for match, path in matches if match and path.is_dir())


def prune(root: Path, *, keep: int, prefix: str = "") -> list[Path]:
    """Remove all but the newest `keep` checkpoints with that prefix, and what unfinished writes of them left.

    Call it from the only writer under `prefix`, while it is not writing. `keep` <= 0 keeps all.

    Returns:
        The checkpoints removed.
    """
    found = list_checkpoints(root, prefix)
    removed = [path for _, path in found[: max(len(found) - keep, 0)]] if keep > 0 else []
    for path in removed:
        # Renamed first, so that a half-removed directory is never taken for a checkpoint.
        os.rename(path, path.with_name(f".{path.name}.writing-removed"))
    for leftover in root.glob(f".{prefix}*.writing-*"):
        shutil.rmtree(leftover)
    return removed


def recover(path: Path) -> None:
    """Put `path` back if a crash struck while it was being replaced, and remove what an unfinished write of it left."""
    replaced = path.with_name(f".{path.name}.replaced")
    if replaced.exists() and path.exists():
        shutil.rmtree(replaced)
    elif replaced.exists():
        os.rename(replaced, path)
        logger.warning("event=checkpoint_restored path=%s", path)
    for leftover in path.parent.glob(f".{path.name}.writing-*"):
        shutil.rmtree(leftover)
        logger.info("event=unfinished_checkpoint_removed path=%s", leftover)


def write_directory(path: Path, write: Callable[[Path], None]) -> None:
    """Make the directory `path` with what `write` puts into the empty directory it is given.

    All files and directories are synced before the rename, so `path` has its whole content or does not exist, across a
    kill and (as far as the disk keeps its word) across a power loss. An existing `path` is replaced.

    Raises:
        TrainingError: it could not be written; nothing is left behind.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        recover(path)
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.writing-", dir=path.parent))
        try:
            write(temporary)
            _sync_tree(temporary)
            os.chmod(temporary, 0o755)
            _exchange(temporary, path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    except OSError as error:
        raise TrainingError(
            f"cannot write {path}: {error}", hint="is the disk full, or the directory not writable?", path=str(path)
        ) from error


class BackgroundWriter:
    """Writes directories on its own thread, one at a time: a second `submit` waits for the first to finish.

    The thread is no daemon: a process that ends in the ordinary way ends after its last write.
    """

    def __init__(self) -> None:
        self._last: threading.Thread | None = None

    def submit(self, path: Path, write: Callable[[Path], None]) -> Future[None]:
        """Start `write_directory(path, write)`; the future holds its outcome."""
        if self._last is not None:
            self._last.join()
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()

        def work() -> None:
            try:
                write_directory(path, write)
            except BaseException as error:
                logger.error("event=checkpoint_failed path=%s error=%s", path, error)
                future.set_exception(error)
            else:
                future.set_result(None)

        self._last = threading.Thread(target=work, name=f"write {path.name}")
        self._last.start()
        return future


def _exchange(temporary: Path, path: Path) -> None:
    replaced = path.with_name(f".{path.name}.replaced")
    if path.exists():
        os.rename(path, replaced)
    os.rename(temporary, path)
    _sync(path.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def _sync_tree(directory: Path) -> None:
    for folder, _, files in os.walk(directory):
        for name in files:
            _sync(Path(folder) / name)
        _sync(Path(folder))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
