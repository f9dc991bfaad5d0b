"""A version's bytes in files of this host: put together for readers in other processes, and mapped by them."""

from __future__ import annotations

import asyncio
import bisect
import mmap
import os
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from streamrl.errors import WeightSyncError
from streamrl.schemas.weights import Manifest
from streamrl.weights.protocol import FilePiece, FileSource, Part

_SHARED_MEMORY = Path("/dev/shm")


def memory_folder() -> str | None:
    """Where files lie in memory; None where the system has no such place, which means its ordinary temporary folder."""
    return str(_SHARED_MEMORY) if os.access(_SHARED_MEMORY, os.W_OK) else None


@asynccontextmanager
async def collected(manifest: Manifest, parts: AsyncIterator[Part], *, engine: str) -> AsyncGenerator[FileSource]:
    """The concatenation of the parts as a file, which is gone afterwards.

    Raises:
        WeightSyncError: the parts are not all bytes of the version's tensors once.
    """
    descriptor, path = tempfile.mkstemp(prefix="streamrl-version-", dir=memory_folder())
    try:
        os.truncate(descriptor, manifest.nbytes)
        written = 0
        async for part in parts:
            await asyncio.to_thread(_write, descriptor, part)
            written += len(part.data)
        least = sum(spec.nbytes for spec in manifest.tensors)
        if not least <= written <= manifest.nbytes:
            raise WeightSyncError(
                f"expected {least} bytes of version {manifest.version}, got {written} at engine {engine}",
                hint="the transport lost or repeated a part; the next version is taken afresh",
            )
        yield FileSource(path)
    finally:
        os.close(descriptor)
        os.unlink(path)


class MappedVersion:
    """A version in files, mapped for reading; unmapped when nothing refers to its bytes any more.

    Args:
        source: the files.
        nbytes: bytes of the version.

    Raises:
        WeightSyncError: one cannot be read or is too short, or the pieces are not apart from each other within the version.
    """

    def __init__(self, source: FileSource, nbytes: int) -> None:
        pieces = source.pieces or (FilePiece(0, 0, 0, nbytes),)
        files = [_mapped(path) for path in (source.path, *source.more)]
        reached = 0
        for piece in pieces:
            size = len(files[piece.file]) if 0 <= piece.file < len(files) else 0
            if piece.start < reached or piece.offset < 0 or piece.nbytes < 0 or piece.offset + piece.nbytes > size:
                raise WeightSyncError(f"expected a version of {nbytes} bytes in {source.path}, got {size} bytes for {piece}")
            reached = piece.start + piece.nbytes
        if reached > nbytes:
            raise WeightSyncError(f"expected a version of {nbytes} bytes in {source.path}, got pieces up to {reached}")
        self._starts = [piece.start for piece in pieces]
        self._data = [files[piece.file][piece.offset : piece.offset + piece.nbytes] for piece in pieces]

    def segments(self, first: int, end: int) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
        """What there is of bytes `first .. end` of the version, in order: where each run begins, and its bytes."""
        for index in range(max(0, bisect.bisect_right(self._starts, first) - 1), bisect.bisect_left(self._starts, end)):
            start, data = self._starts[index], self._data[index]
            low, high = max(first, start), min(end, start + len(data))
            if low < high:
                yield low, data[low - start : high - start]

    def bytes(self, first: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Bytes `first .. first + nbytes` ([nbytes] uint8): a view where they lie in one piece."""
        found = list(self.segments(first, first + nbytes))
        if len(found) == 1 and len(found[0][1]) == nbytes:
            return found[0][1]
        out = np.zeros(nbytes, np.uint8)
        for start, data in found:
            out[start - first : start - first + len(data)] = data
        return out


def _mapped(path: str) -> npt.NDArray[np.uint8]:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise WeightSyncError(f"cannot read the version in {path}: {error.strerror}", hint="a newer version brings its own") from error
    try:
        size = os.fstat(descriptor).st_size
        return np.frombuffer(mmap.mmap(descriptor, size, access=mmap.ACCESS_READ), np.uint8) if size else np.empty(0, np.uint8)
    finally:
        os.close(descriptor)


def _write(descriptor: int, part: Part) -> None:
    data, at = part.data, part.start
    while data:
        count = os.pwrite(descriptor, data, at)
        data, at = data[count:], at + count
