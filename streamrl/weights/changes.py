"""The publisher's memory of the version before: what the next one is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from streamrl.schemas.versions import Version
from streamrl.weights.delta import BLOCK_ELEMENTS, encode_block, encode_changed
from streamrl.weights.protocol import COMPARED_ELEMENTS, Changed, DeviceBytes


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

    def devices(self) -> Mapping[int, DeviceBytes] | None:
        """What lies at each first byte; None unless all of it lies on a device."""
        ...


class Before:
    """The version published last, which the next one is compared with.

    On the host it is a copy, which takes the next one over meanwhile. On a device it is its snapshot, which is compared there: only what
    has changed goes to the host.

    Args:
        pool: threads that compare and compress.
    """

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._ranges: tuple[Range, ...] = ()
        self.bytes: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        """[nbytes] uint8, with zeros between the tensors."""
        self._devices: Mapping[int, DeviceBytes] | None = None
        self.version: Version | None = None
        """Whose bytes these are; None: nobody's."""

    def forget(self) -> None:
        """Hold no version any more: the next one is compared with none."""
        self.version = self._devices = None

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
        devices, before, self._devices = content.devices(), self._devices, None
        if devices is not None:
            self.bytes = np.empty(0, np.uint8)
            blocks = None if before is None or not comparable else self._compared(ranges, before, devices)
            self._ranges, self._devices, self.version = tuple(ranges), devices, version
            return blocks
        comparable = comparable and before is None
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

        blocks = list(self._pool.map(take, _cut(ranges, BLOCK_ELEMENTS)))
        self.version = version
        return [block for block in blocks if block] if comparable else None

    def _compared(self, ranges: Sequence[Range], before: Mapping[int, DeviceBytes], after: Mapping[int, DeviceBytes]) -> list[bytes]:
        starts = {(one.name, one.first): one.start for one in ranges}

        def changes(part: Range, start: int) -> list[bytes]:
            old, new, skipped = before[start], after[start], (part.start - start) // part.item
            found = new.changes(old, part.item, skipped, part.count)
            blocks: list[bytes] = []
            for one in _cut([part], BLOCK_ELEMENTS):
                block = None
                if found is not None:
                    low, high = np.searchsorted(found.positions, (one.first - part.first, one.first - part.first + one.count))
                    positions = found.positions[low:high] - (one.first - part.first)
                    changed = Changed(positions, found.old[low:high], found.new[low:high])
                    block = encode_changed(one.name, one.item, one.first, one.count, changed)
                if block is None:
                    held, fresh = (_host(data, one.start - start, one.count * one.item) for data in (old, new))
                    block = encode_block(one.name, one.item, one.first, held, fresh)
                blocks.append(block)
            return blocks

        parts = [(part, starts[one.name, one.first]) for one in ranges for part in _cut([one], COMPARED_ELEMENTS)]
        return [block for blocks in self._pool.map(lambda one: changes(*one), parts) for block in blocks if block]


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


def _cut(ranges: Sequence[Range], limit: int) -> list[Range]:
    return [
        msgspec.structs.replace(one, first=one.first + begin, count=min(limit, one.count - begin), start=one.start + begin * one.item)
        for one in ranges
        for begin in range(0, one.count, limit)
    ]


def _host(data: DeviceBytes, first: int, nbytes: int) -> npt.NDArray[np.uint8]:
    out = np.empty(nbytes, np.uint8)
    data.copy_to(first, out)
    return out
