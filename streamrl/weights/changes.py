"""The publisher's memory of the version before: what the next one is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from streamrl.schemas.versions import Version
from streamrl.weights.delta import BLOCK_ELEMENTS, encode_block


class Range(msgspec.Struct, frozen=True):
    """Elements of a tensor that lie together: `count` from element `first` on, at byte `start` of what is stored."""

    name: str
    dtype: str
    item: int
    first: int
    count: int
    start: int


class Source(Protocol):
    """The bytes of a version, or of a rank's slices of it."""

    nbytes: int

    def fill(self, start: int, out: npt.NDArray[np.uint8]) -> None:
        """Write bytes `start .. start + len(out)` into `out`; several threads call it at once."""
        ...


class Before:
    """One copy of the version published last. It takes the next one over while that is compared with it.

    Args:
        pool: threads that compare and compress.
    """

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._ranges: tuple[Range, ...] = ()
        self.bytes: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        """[nbytes] uint8, with zeros between the tensors."""
        self.version: Version | None = None
        """Whose bytes these are; None: nobody's."""

    def replace(self, version: Version, content: Source, ranges: Sequence[Range]) -> list[bytes] | None:
        """Hold `version` instead of the one before.

        Args:
            version: the next one.
            content: its bytes.
            ranges: what is where in them.

        Returns:
            Blocks of changes (`streamrl.weights.delta`), in order, none for what has not changed; None when there is nothing to compare
            with: no version before, other tensors, or a version that is not newer.
        """
        comparable = self.version is not None and self.version < version and self._ranges == tuple(ranges)
        # A failure half way leaves bytes of both versions, and `version` says so.
        self.version = None
        if not comparable:
            self._ranges = tuple(ranges)
            if len(self.bytes) != content.nbytes:
                self.bytes = np.empty(content.nbytes, np.uint8)
            self.bytes[:] = 0

        def take(one: Range) -> bytes:
            held = self.bytes[one.start : one.start + one.count * one.item]
            if not comparable:
                content.fill(one.start, held)
                return b""
            fresh = np.empty(len(held), np.uint8)
            content.fill(one.start, fresh)
            block = encode_block(one.name, one.item, one.first, held, fresh)
            held[:] = fresh
            return block

        blocks = list(self._pool.map(take, _blocks(ranges)))
        self.version = version
        return [block for block in blocks if block] if comparable else None


def join(blocks: Sequence[bytes], limit: int) -> list[bytes]:
    """Blocks as parts of about `limit` bytes."""
    parts: list[bytes] = []
    waiting: list[bytes] = []
    size = 0
    for block in blocks:
        if waiting and size + len(block) > limit:
            parts.append(b"".join(waiting))
            waiting, size = [], 0
        waiting.append(block)
        size += len(block)
    return [*parts, b"".join(waiting)] if waiting else parts


def _blocks(ranges: Sequence[Range]) -> list[Range]:
    return [
        msgspec.structs.replace(
            one, first=one.first + begin, count=min(BLOCK_ELEMENTS, one.count - begin), start=one.start + begin * one.item
        )
        for one in ranges
        for begin in range(0, one.count, BLOCK_ELEMENTS)
    ]
