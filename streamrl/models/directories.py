"""Directories that are complete or absent: written under a hidden name, synced, read back, then renamed.

Several ranks may fill one directory (`Others`): each writes, syncs and reads back files of its own, and rank 0, when it has heard of
all, seals the whole and gives it its name.

Beside a directory `name` there may be `.name.writing-*` (a write that never finished) and `.name.replaced` (the former
content while it is being exchanged). `list_checkpoints` sees neither; the next write or `recover` of that name and `prune`
tidy them up. `name.damaged` is a checkpoint that could not be read; `prune` removes it once there are newer ones.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Collection, Mapping, Set
from concurrent.futures import Future
from pathlib import Path

import msgspec

from streamrl.errors import CheckpointDamaged, TrainingError
from streamrl.schemas.digests import file_digest
from streamrl.schemas.versions import Version

logger = logging.getLogger(__name__)

SEAL_FILE = "files.json"
"""In a checkpoint: size and digest of each of its files. Those of earlier builds have none."""
DAMAGED = ".damaged"


class SealedFile(msgspec.Struct, frozen=True):
    """Size and digest of a file when it was written."""

    nbytes: int
    digest: str
    """`streamrl.schemas.digests.file_digest`."""


Sealed = dict[str, SealedFile]
"""Files by path within the directory."""
Others = Callable[[Path], tuple[Sealed, Set[str]]]
"""Waits for what other ranks write into a directory that is being filled: their files, and those that none has read back yet."""


def list_checkpoints(root: Path, prefix: str = "", *, suffix: str = "") -> list[tuple[Version, Path]]:
    """Complete checkpoints `<prefix>v<number>-e<epoch><suffix>` under `root`, oldest version first; none when `root` does not exist."""
    pattern = re.compile(re.escape(prefix) + r"v(\d+)-e(\d+)" + re.escape(suffix))
    matches = [(pattern.fullmatch(path.name), path) for path in (root.iterdir() if root.is_dir() else ())]
    return sorted((Version(int(match[2]), int(match[1])), path) for match, path in matches if match and path.is_dir())


def prune(root: Path, *, keep: Collection[Path], prefix: str) -> list[Path]:
    """Remove the checkpoints with that prefix that are older than the newest in `keep` and not in it, and what unfinished writes left.

    Call it from the only writer under `prefix`, while it is not writing. Nothing in `keep` keeps all.

    Returns:
        The checkpoints removed.
    """
    newest = max((version.number for version, path in list_checkpoints(root, prefix) if path in keep), default=0)
    removed = [path for version, path in list_checkpoints(root, prefix) if version.number < newest and path not in keep]
    removed += [path for version, path in list_checkpoints(root, prefix, suffix=DAMAGED) if version.number <= newest]
    for path in removed:
        # Renamed first, so that a half-removed directory is never taken for a checkpoint.
        os.rename(path, path.with_name(f".{path.name}.writing-removed"))
    for leftover in root.glob(f".{prefix}*.writing-*"):
        shutil.rmtree(leftover)
    return removed


def set_aside(path: Path) -> None:
    """Take a damaged checkpoint out of the way, to be looked at; one that is gone stays so."""
    aside = path.with_name(path.name + DAMAGED)
    if path.exists():
        if aside.exists():
            shutil.rmtree(aside)
        os.rename(path, aside)


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


def check_files(path: Path, *, known: Set[str] = frozenset()) -> None:
    """Read every file of a checkpoint and hold it against its seal; one without a seal passes.

    Args:
        path: of the checkpoint.
        known: files that have been read back, of which the size alone is looked at.

    Raises:
        CheckpointDamaged: a file is gone, or not what was written.
        TrainingError: it cannot be looked at.
    """
    try:
        if not path.is_dir():
            raise damaged(path, "there is no such directory")
        if not (path / SEAL_FILE).exists():
            return
        for name, sealed in msgspec.json.decode((path / SEAL_FILE).read_bytes(), type=Sealed).items():
            if not (path / name).is_file():
                raise damaged(path, f"{name} is gone")
            if (nbytes := (path / name).stat().st_size) != sealed.nbytes:
                raise damaged(path, f"{name} has {nbytes} bytes, {sealed.nbytes} were written")
            if name not in known and file_digest(path / name) != sealed.digest:
                raise damaged(path, f"the bytes of {name} are not those that were written")
    except msgspec.MsgspecError as error:
        raise damaged(path, f"{SEAL_FILE} cannot be read: {error}") from error
    except OSError as error:
        raise unreadable(path, error) from error


def damaged(path: Path, problem: str, **values: str) -> CheckpointDamaged:
    """The error for a checkpoint that is not what was written."""
    return CheckpointDamaged(
        f"expected a whole checkpoint in {path}: {problem}",
        hint="`streamrl up` goes on from an older one by itself",
        path=str(path),
        problem=problem,
        **values,
    )


def unreadable(path: Path, error: OSError) -> TrainingError:
    """The error for a checkpoint whose files cannot be read: damaged where one is gone, else for a reason that may pass."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return damaged(path, str(error))
    return TrainingError(f"cannot read the checkpoint {path}: {error}", hint="mend that and start again; nothing is lost")


def begin_directory(path: Path) -> Path:
    """An empty hidden directory beside `path`, for `write_directory` to fill; what an earlier write of `path` left is tidied up.

    Raises:
        TrainingError: there can be none.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        recover(path)
        return Path(tempfile.mkdtemp(prefix=f".{path.name}.writing-", dir=path.parent))
    except OSError as error:
        raise _unwritable(path, error) from error


def write_directory(
    path: Path,
    write: Callable[[Path], None],
    *,
    seal: bool = False,
    replace: bool = True,
    begun: Path | None = None,
    others: Others | None = None,
) -> None:
    """Make the directory `path` with what `write` puts into the empty directory it is given.

    All files and directories are synced before the rename, so `path` has its whole content or does not exist, across a
    kill and (as far as the disk keeps its word) across a power loss.

    Args:
        path: the directory.
        write: fills it.
        seal: note the digest of every file beside them, and read all of it back before the rename, from the disk where the system
            forgets pages on request.
        replace: an existing `path` is replaced; False: it is left as it is, and nothing is written.
        begun: of `begin_directory`, where other ranks fill it too.
        others: waits for them; asked whatever becomes of `write`.

    Raises:
        TrainingError: it could not be written; nothing is left behind.
    """
    temporary = begun or begin_directory(path)
    try:
        try:
            write(temporary)
        finally:
            theirs, unread = others(temporary) if others is not None else ({}, frozenset())
        if seal:
            own = _seal_files(temporary, temporary, without=theirs)
            (temporary / SEAL_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(own | theirs)))
        _sync_tree(temporary)
        if seal:
            check_files(temporary, known=theirs.keys() - unread)
        os.chmod(temporary, 0o755)
        (_exchange if replace else os.rename)(temporary, path)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise _unwritable(path, error) from error
        raise


def write_part(root: Path, folder: str, write: Callable[[Path], None]) -> Sealed:
    """Fill a folder of a directory that several ranks write; synced and read back, it is what rank 0 is told of.

    Raises:
        TrainingError: it could not be written, or is not what was written.
    """
    try:
        (root / folder).mkdir(parents=True)
        write(root / folder)
        sealed = _seal_files(root, root / folder)
        _sync_tree(root / folder)
        for name, one in sealed.items():
            if file_digest(root / name) != one.digest:
                raise damaged(root, f"the bytes of {name} are not those that were written")
        return sealed
    except OSError as error:
        raise _unwritable(root / folder, error) from error


class BackgroundWriter:
    """Writes directories on its own thread, one at a time: a second `start` waits for the first to finish.

    The thread is no daemon: a process that ends in the ordinary way ends after its last write.
    """

    def __init__(self) -> None:
        self._last: threading.Thread | None = None

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._last is not None:
            self._last.join()

    def submit(
        self,
        path: Path,
        write: Callable[[Path], None],
        beside: Mapping[str, bytes] | None = None,
        *,
        begun: Path | None = None,
        others: Others | None = None,
    ) -> Future[None]:
        """Start `write_directory` of a sealed checkpoint, with the files `beside` what `write` puts there; the future holds its outcome."""

        def fill(directory: Path) -> None:
            write(directory)
            for name, data in (beside or {}).items():
                (directory / name).write_bytes(data)

        return self.start(path, lambda: write_directory(path, fill, seal=True, begun=begun, others=others))

    def start(self, path: Path, write: Callable[[], object]) -> Future[None]:
        """Call `write`, which writes `path` or a part of it; the future holds its outcome."""
        self.wait()
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()

        def work() -> None:
            try:
                write()
            except BaseException as error:
                logger.error("event=checkpoint_failed path=%s error=%s", path, error)
                future.set_exception(error)
            else:
                future.set_result(None)

        self._last = threading.Thread(target=work, name=f"write {path.name}")
        self._last.start()
        return future


def written(error: Exception | None = None) -> Future[None]:
    """The outcome of a write that is over already."""
    future: Future[None] = Future()
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
    return future


def _exchange(temporary: Path, path: Path) -> None:
    replaced = path.with_name(f".{path.name}.replaced")
    if path.exists():
        os.rename(path, replaced)
    os.rename(temporary, path)
    _sync(path.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def _seal_files(directory: Path, within: Path, *, without: Collection[str] = ()) -> Sealed:
    """Size and digest of the files of a part of a directory, or of all, but for some."""
    names = sorted(str(file.relative_to(directory)) for file in within.rglob("*") if file.is_file())
    return {name: SealedFile((directory / name).stat().st_size, file_digest(directory / name)) for name in names if name not in without}


def _sync_tree(directory: Path) -> None:
    """Have the disk hold all of a directory."""
    for folder, _, files in os.walk(directory):
        for name in files:
            _sync(Path(folder) / name)
        _sync(Path(folder))


def _unwritable(path: Path, error: OSError) -> TrainingError:
    return TrainingError(f"cannot write {path}: {error}", hint="is the disk full, or the directory not writable?", path=str(path))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
        if hasattr(os, "posix_fadvise"):  # who reads it next reads the disk
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)
