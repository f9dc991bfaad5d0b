"""The metrics of a run on disk: `metrics/metrics.jsonl`, one flat JSON object a row, and the files that were put aside before it.

    {"time_s":1700000000.5,"kind":"batch","of":"","version":"0.17","step":17,"rollout/raw_reward":0.5,...}

Files put aside are `metrics-000001.jsonl` and so on, the oldest first. Other files in the folder are left alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from streamrl.config.metrics import MetricsConfig
from streamrl.errors import SchemaError
from streamrl.monitor.series import BATCH, WINDOW, Row
from streamrl.schemas.versions import Version

logger = logging.getLogger(__name__)

CURRENT = "metrics.jsonl"
_ASIDE = re.compile(r"^metrics-(\d{6,})\.jsonl$")
LONGEST_BYTES = 1 << 20
"""No row is longer."""
_OWN_KEYS = ("time_s", "kind", "of", "version", "step")


class MetricsFile:
    """Appends rows. After an error the file holds whole rows only, and the next `write` tries to open it again.

    Only one may write: the file is locked while it is open.

    Args:
        folder: made if it is not there.
        config: sizes.
    """

    def __init__(self, folder: Path, config: MetricsConfig) -> None:
        self._folder = folder
        self._config = config
        self._descriptor: int | None = None
        self._size = 0
        self._last = 0
        """Number of the file put aside last: it is no other's, also where that has gone."""

    def write(self, rows: Sequence[Row]) -> None:
        """Append rows; all of them or, with OSError, none."""
        body = b"".join(encoded(row) for row in rows)
        if self._descriptor is not None and self._size and self._size + len(body) > self._config.file_bytes:
            self._put_aside()
        descriptor = self._open() if self._descriptor is None else self._descriptor
        written = 0
        try:
            while written < len(body):
                written += os.write(descriptor, body[written:])
        except OSError:
            try:
                if written:
                    os.ftruncate(descriptor, self._size)
            finally:
                self.close()  # where that failed too, the next opening cuts what is torn
            raise
        self._size += written

    def close(self) -> None:
        """Let go of the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None

    def _open(self) -> int:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(self._folder / CURRENT, flags, 0o600)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "not a regular file", str(self._folder / CURRENT))
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._size = _cut_torn_end(descriptor, self._folder / CURRENT)
        except OSError:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        return descriptor

    def _put_aside(self) -> None:
        self.close()
        aside = numbered(self._folder)
        self._last = number = max(self._last, *aside, 0) + 1
        aside[number] = (self._folder / CURRENT).rename(self._folder / f"metrics-{number:06d}.jsonl")
        total = sum(path.stat().st_size for path in aside.values())
        for _, path in sorted(aside.items()):
            if total <= self._config.keep_bytes:
                break
            total -= path.stat().st_size
            path.unlink()


def encoded(row: Row) -> bytes:
    """A row as its line."""
    head = {"time_s": row.time_s, "kind": row.kind, "of": row.of, "version": row.version, "step": row.step}
    return msgspec.json.encode(head | row.values) + b"\n"


def decoded(line: bytes) -> Row | None:
    """The row of a line; None if it is none."""
    try:
        found = msgspec.json.decode(line, type=dict[str, int | float | str])
        head = {key: found.pop(key) for key in _OWN_KEYS}
        return msgspec.convert({**head, "values": found}, Row)
    except (msgspec.MsgspecError, KeyError, UnicodeDecodeError):
        return None


def numbered(folder: Path) -> dict[int, Path]:
    """The files that were put aside, by number; none if there is no folder. The oldest may have gone since."""
    try:
        found = {int(match[1]): path for path in folder.iterdir() if (match := _ASIDE.match(path.name)) and not _is_other(path)}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return dict(sorted(found.items()))


def _is_other(path: Path) -> bool:
    """Whether it is there and no file."""
    return not path.is_file() and os.path.lexists(path)


def files(folder: Path) -> list[Path]:
    """All files with rows, the oldest first; none if there is no folder. For who writes them: see `files_before`."""
    current = folder / CURRENT
    return [*numbered(folder).values(), *([current] if current.is_file() else [])]


def newest_file(folder: Path) -> BinaryIO | None:
    """The file that is being written, or where that has just been put aside, the one put aside last; None: there are none.

    Raises OSError for a file that is there and cannot be read.
    """
    path = folder / CURRENT
    while True:
        with contextlib.suppress(FileNotFoundError):
            if path.is_file():
                return path.open("rb")
        aside = list(numbered(folder).values())
        if not aside:
            return None
        with contextlib.suppress(FileNotFoundError):  # it has gone since, so there are newer ones
            return aside[-1].open("rb")


def files_before(folder: Path, file: BinaryIO) -> list[Path]:
    """The files that were put aside before an open one, the oldest first.

    A listing may lack a file that gets its name meanwhile, and have those that get theirs after it. So it counts up to `file` only, or
    as a whole while `file` is the one being written. Where it is neither, a second listing has it, unless it has gone, as have all
    before it then.
    """
    inode = os.fstat(file.fileno()).st_ino
    for _ in range(2):
        aside = list(numbered(folder).values())
        inodes = [inode_of(path) for path in aside]
        if inode in inodes:
            return aside[: inodes.index(inode)]
        if inode_of(folder / CURRENT) == inode:
            return aside
    return []


def inode_of(path: Path) -> int | None:
    """None: it has gone."""
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def written_version(folder: Path) -> Version | None:
    """Up to which version the batches have their rows; None for none, or where that cannot be read."""
    try:
        for path in reversed(files(folder)):
            for line in _last_lines(path):
                row = decoded(line)
                if row is not None and row.kind in (BATCH, WINDOW):
                    return Version.parse(row.version) if row.version else None
    except (OSError, SchemaError) as error:
        logger.warning("event=metrics_not_read path=%s error=%s", folder, error)
    return None


def _last_lines(path: Path) -> Iterator[bytes]:
    """Whole lines of the end of a file, the last first."""
    with path.open("rb") as file:
        start = max(0, os.fstat(file.fileno()).st_size - LONGEST_BYTES)
        file.seek(start)
        lines = file.read(LONGEST_BYTES).split(b"\n")[1 if start else 0 : -1]
    return reversed(lines)


def _cut_torn_end(descriptor: int, path: Path) -> int:
    """Cut what stands behind the last whole line, as a crash leaves it; returns the size."""
    size = os.fstat(descriptor).st_size
    start = max(0, size - LONGEST_BYTES)
    end = os.pread(descriptor, size - start, start)
    kept = start + end.rfind(b"\n") + 1
    if start and kept == start:
        raise OSError(errno.EINVAL, "no lines of metrics", str(path))
    if kept < size:
        logger.warning("event=metrics_torn path=%s bytes=%d", path, size - kept)
        os.ftruncate(descriptor, kept)
    return kept
