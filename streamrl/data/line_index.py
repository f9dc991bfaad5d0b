"""Where each row of a JSON Lines file begins: eight bytes a row, found in one pass, kept in a file beside the run and mapped from there."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import hashlib
import io
import json
import logging
import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from streamrl.errors import DataError

logger = logging.getLogger(__name__)

_MAGIC = b"streamrl line index 1\n"
_HEAD_BYTES = 4096
READ_BYTES = 4 << 20
_LONGEST_BLANK = 1 << 16
"""A line of white space beyond this counts as a row, which is a broken one."""
LONGEST_ROW = 64 << 20
"""Bytes of a line that is read as a row."""
_BLOCK_BYTES = 64 << 10
_BLOCKS = 64
_WHITE = np.frombuffer(b" \t\n\r\x0b\x0c", np.uint8)
_Offsets = npt.NDArray[np.int64]


class LineIndex:
    """The rows of one file: `starts` [n] byte offsets, rising; `blanks` [m] rows before each blank line, which is no row.

    Both are int64 and mapped from the index's file: what is not looked at takes no memory.
    """

    def __init__(self, starts: _Offsets, blanks: _Offsets, digest: str) -> None:
        self.starts = starts
        self.blanks = blanks
        self.digest = digest
        """SHA-256 (hex) of both."""

    def __len__(self) -> int:
        return len(self.starts)

    def line(self, row: int) -> int:
        """1-based line of a row."""
        return row + 1 + int(np.searchsorted(self.blanks, row, side="right"))


def line_index(path: Path, kept: Path) -> LineIndex:
    """The index of `path`: the one in the file `kept` where it is whole and of this file, else a new one, which is kept there.

    It is of this file when size, time of change and sampled blocks are the same. A new one takes one read of the file; it appears under its
    name when it is complete.

    Raises:
        DataError: the file cannot be read, or changes while it is read; the index cannot be written.
    """
    with open_data(path) as file:
        told = _identity(file, path)
        if (found := _load(kept, told)) is not None:
            return found
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            scratch = kept.with_name(f".{kept.name}.building")
            with _building(scratch) as target:
                if (found := _load(kept, told)) is not None:  # somebody else has built it meanwhile
                    return found
                head = _build(file, told, target)
                if _identity(file, path) != told:
                    raise DataError(
                        f"expected {path} to stay as it is, got another size or other bytes while it was read",
                        hint="wait until it is written completely, and start again",
                        path=str(path),
                    )
                scratch.replace(kept)
        except OSError as error:
            raise DataError(
                f"expected to write an index of {path} into {kept.parent}, got: {error.strerror}",
                hint="it takes 8 bytes a row: make room, or set run.dir to a folder that has it",
                path=str(kept),
            ) from error
    found = _map(kept, head)
    logger.info("event=rows_indexed path=%s rows=%d", path, len(found))
    return found


@contextlib.contextmanager
def _building(scratch: Path) -> Generator[BinaryIO]:
    """The file that an index grows in, empty; one process has it at a time. What one that was killed has left is written over."""
    while True:
        with open(os.open(scratch, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                mine = os.stat(scratch).st_ino == os.fstat(file.fileno()).st_ino
            except FileNotFoundError:
                mine = False
            if not mine:  # who had it before has given it its name
                continue
            file.truncate(0)
            try:
                yield file
            except BaseException:
                scratch.unlink(missing_ok=True)
                raise
            scratch.unlink(missing_ok=True)
            return


def _build(file: BinaryIO, told: dict[str, Any], target: BinaryIO) -> dict[str, Any]:
    """Write the whole index of `file` to `target`; its head. It need not be on disk: what a lost machine leaves of it is found out."""
    target.write(bytes(_HEAD_BYTES))
    total = hashlib.sha256()

    def write(offsets: _Offsets) -> None:
        part = offsets.astype(np.int64).tobytes()
        total.update(part)
        target.write(part)

    counts = scan(file, told["size"], write)
    head = {**told, **counts, "digest": total.hexdigest()}
    target.seek(0)
    target.write((_MAGIC + json.dumps(head).encode()).ljust(_HEAD_BYTES, b"\n"))
    target.flush()
    return head


def first_lines(path: Path, most: int) -> LineIndex:
    """Where the first `most` rows and the one after them begin, without reading on; fewer where a line has more than 64 MiB."""
    starts: list[int] = []
    blanks: list[int] = []
    with open_data(path) as raw, io.BufferedReader(raw) as file:  # type: ignore[type-var]
        place = len(codecs.BOM_UTF8) if file.peek(3).startswith(codecs.BOM_UTF8) else 0
        file.seek(place)
        while len(starts) <= most and (line := file.readline(LONGEST_ROW)):
            if line.strip():
                starts.append(place)
            else:
                blanks.append(len(starts))
            place += len(line)
            if len(line) == LONGEST_ROW:
                break
    return LineIndex(np.array(starts, np.int64), np.array(blanks, np.int64), "")


def sampled_digest(file: BinaryIO) -> str:
    """SHA-256 (hex) of a file's size and of blocks of it at even distances, first and last bytes among them; all of it up to 4 MiB."""
    size = os.fstat(file.fileno()).st_size
    total = hashlib.sha256(size.to_bytes(8, "little"))
    if size <= _BLOCKS * _BLOCK_BYTES:
        places = range(0, size, _BLOCK_BYTES)
    else:
        places = [(size - _BLOCK_BYTES) * block // (_BLOCKS - 1) for block in range(_BLOCKS)]
    for place in places:
        total.update(os.pread(file.fileno(), _BLOCK_BYTES, place))
    return total.hexdigest()


def open_data(path: Path) -> BinaryIO:
    """The file, unbuffered; raises DataError when there is none or it cannot be read."""
    try:
        return open(path, "rb", buffering=0)  # type: ignore[return-value]
    except FileNotFoundError as error:
        raise DataError(
            f"expected a dataset file, got no such file: {path}",
            hint="check the path; in a TOML file it is relative to its folder",
            path=str(path),
        ) from error
    except OSError as error:
        raise DataError(
            f"expected a dataset file that can be read, got {path}: {error.strerror}", hint="check its rights", path=str(path)
        ) from error


def _identity(file: BinaryIO, path: Path) -> dict[str, Any]:
    status = os.fstat(file.fileno())
    return {"path": str(path), "size": status.st_size, "mtime_ns": status.st_mtime_ns, "sampled": sampled_digest(file)}


def _load(kept: Path, told: dict[str, Any]) -> LineIndex | None:
    """The index that is kept, None where there is none of this file or it is damaged."""
    try:
        with kept.open("rb") as file:
            head = file.read(_HEAD_BYTES)
            described: dict[str, Any] = json.loads(head[len(_MAGIC) :]) if head.startswith(_MAGIC) else {}
            if any(described.get(key) != value for key, value in told.items()):
                return None
            total = hashlib.sha256()
            while block := file.read(READ_BYTES):
                total.update(block)
        if total.hexdigest() == described["digest"]:
            return _map(kept, described)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError) as error:
        logger.warning("event=index_unreadable path=%s error=%s", kept, error)
        return None
    logger.warning("event=index_damaged path=%s action=built_again", kept)
    return None


def _map(kept: Path, head: dict[str, Any]) -> LineIndex:
    rows, blanks = head["rows"], head["blanks"]
    if rows + blanks == 0:  # an empty file cannot be mapped
        nothing = np.zeros(0, np.int64)
        return LineIndex(nothing, nothing, head["digest"])
    whole = np.memmap(kept, np.int64, "r", offset=_HEAD_BYTES, shape=(rows + blanks,))
    return LineIndex(whole[:rows], whole[rows:], head["digest"])


def scan(file: BinaryIO, size: int, write: Callable[[_Offsets], None]) -> dict[str, int]:
    """Write the starts of rows, then the places of blank lines; memory depends on the blank lines alone."""
    buffer, base, rows = bytearray(READ_BYTES), 0, 0
    start = len(codecs.BOM_UTF8) if os.pread(file.fileno(), 3, 0) == codecs.BOM_UTF8 else 0
    blanks: list[_Offsets] = []
    file.seek(0)
    while base < size and (count := file.readinto(buffer)):  # type: ignore[attr-defined]
        block = np.frombuffer(buffer, np.uint8, count)
        stops = np.flatnonzero(block == ord("\n")) + base
        if base + count >= size and (not len(stops) or stops[-1] != size - 1):
            stops = np.append(stops, size)  # a last line without a newline
        if len(stops):
            starts = np.concatenate(([start], stops[:-1] + 1))
            filled = _filled(file, block, base, starts, stops)
            write(starts[filled])
            before = rows + np.cumsum(filled)
            blanks.append(before[~filled])
            rows, start = int(before[-1]), int(stops[-1]) + 1
        base += count
    for part in blanks:
        write(part)
    return {"rows": rows, "blanks": sum(map(len, blanks))}


def _filled(file: BinaryIO, block: npt.NDArray[np.uint8], base: int, starts: _Offsets, stops: _Offsets) -> npt.NDArray[np.bool_]:
    """Which lines hold more than white space: nearly all are told by their first byte."""
    inside = (starts >= base) & (starts < base + len(block))
    first = np.full(len(starts), ord(" "), np.uint8)  # of a line that began in the block before: it is looked at
    first[inside] = block[starts[inside] - base]
    filled = ~np.isin(first, _WHITE)
    for place in np.flatnonzero(~filled & (stops > starts)):
        length = int(stops[place] - starts[place])
        filled[place] = length > _LONGEST_BLANK or bool(os.pread(file.fileno(), length, int(starts[place])).strip())
    return filled
