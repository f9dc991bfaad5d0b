"""The digest's kernel: all regions in one launch, one pass over their bytes, integers that wrap; see `streamrl.tensors.digest_torch`.

The sums are integers, so the order in which blocks add theirs does not matter: the result is exact and reproducible.
"""

# The CPU builds of torch come without Triton.
# pyright: reportMissingImports=false, reportUntypedFunctionDecorator=false, reportMissingParameterType=false

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.errors import TritonError

from streamrl.tensors.digest import MASK

if TYPE_CHECKING:
    from streamrl.tensors.digest_torch import Axis, Walk

FAILURES: tuple[type[Exception], ...] = (TritonError, RuntimeError, OSError, subprocess.SubprocessError)
"""What can keep the kernel from running: it is compiled at first use, with a C compiler for its launcher."""
WIDE, NARROW = 2048, 512
"""Elements that a row of a block takes; narrow ones for regions of short rows."""
REPEAT = 16
"""Rows of a block."""


@triton.jit
def _mixed(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit(do_not_specialize=["blocks"])
def _add_digests(
    table, owner, sums, blocks, BYTES: tl.constexpr, UNIT: tl.constexpr, ALIGNED: tl.constexpr, COLUMNS: tl.constexpr, REPEAT: tl.constexpr
):
    lane = tl.arange(0, COLUMNS)
    for index in range(tl.program_id(0), blocks, tl.num_programs(0)):
        region = tl.load(owner + index).to(tl.int64)
        words = table + region * 11
        if BYTES == 1:
            data = tl.load(words).to(tl.pointer_type(tl.uint8))
        elif BYTES == 2:
            data = tl.load(words).to(tl.pointer_type(tl.uint16))
        elif BYTES == 4:
            data = tl.load(words).to(tl.pointer_type(tl.uint32))
        else:
            data = tl.load(words).to(tl.pointer_type(tl.uint64))
        first = tl.load(words + 1)
        rows = tl.load(words + 2)
        columns = tl.load(words + 3)
        count = tl.load(words + 4)
        row_stride = tl.load(words + 5)
        column_stride = tl.load(words + 6)
        row_step = tl.load(words + 7)
        column_step = tl.load(words + 8)
        block = index - tl.load(words + 9)
        across = tl.load(words + 10)
        column = (block % across) * COLUMNS
        row = (block // across) * REPEAT
        place = row * row_stride + column * column_stride
        if ALIGNED:
            place = tl.multiple_of(place, 16 // BYTES)
            row_stride = tl.multiple_of(row_stride, 16 // BYTES)
            data = tl.multiple_of(data, 16)
        offset = lane if UNIT else lane.to(tl.int64) * column_stride
        # The element's index times gamma, which every row moves on by as much; 64-bit integers wrap.
        term = (lane.to(tl.int64) * column_step).to(tl.uint64) * 0x9E3779B97F4A7C15
        term += (first + 1 + row * row_step + column * column_step).to(tl.uint64) * 0x9E3779B97F4A7C15
        row_term = row_step.to(tl.uint64) * 0x9E3779B97F4A7C15
        total = tl.zeros((COLUMNS,), dtype=tl.uint64)
        last = row + REPEAT
        if (last <= rows) & (column + COLUMNS <= columns) & ((last - 1) * columns + column + COLUMNS <= count):
            for _ in range(REPEAT):
                bits = tl.load(data + place + offset).to(tl.uint64)
                total += _mixed(bits + term)
                place += row_stride
                term += row_term
        else:
            for turn in range(REPEAT):
                # Columns of this row that are left; none below the last row.
                left = tl.where(row + turn < rows, tl.minimum(columns, count - (row + turn) * columns) - column, 0)
                inside = lane < left
                bits = tl.load(data + place + offset, mask=inside, other=0).to(tl.uint64)
                total += tl.where(inside, _mixed(bits + term), 0)
                place += row_stride
                term += row_term
        tl.atomic_add(sums + region, tl.sum(total.to(tl.int64, bitcast=True), axis=0), sem="relaxed")


class Launch:
    """The kernel over regions of one element size, with its tables on the device: each run is one launch, and allocates nothing.

    Args:
        item: bytes of an element.
        unit: the elements of a region's columns are neighbours in memory.
        columns: `WIDE` or `NARROW`.
        regions: rows of `_split`.
        device: that holds them.
    """

    def __init__(self, item: int, unit: bool, columns: int, regions: list[list[int]], device: torch.device) -> None:
        table = np.array(regions, np.int64)
        across = -(-table[:, 3] // columns)
        blocks = -(-table[:, 2] // REPEAT) * across
        table[:, 9] = np.cumsum(blocks) - blocks
        table[:, 10] = across
        self._item = item
        self._unit = unit
        self._columns = columns
        self._aligned = unit and not (table[:, 0] % 16).any() and not (table[:, 5] * item % 16).any()
        self._owner = torch.from_numpy(np.repeat(np.arange(len(regions), dtype=np.int32), blocks)).to(device)
        self._table = torch.from_numpy(table).to(device)
        self.sums = torch.zeros(len(regions), dtype=torch.int64, device=device)
        """Of each region after `run`, once the stream has got there."""

    def run(self, width: int = 0) -> None:
        """Compute `sums` anew on the current stream.

        Args:
            width: blocks of threads that work at once; 0: as many as fit, which leaves other kernels to wait for all of them.
        """
        self.sums.zero_()
        kernel: Any = _add_digests
        blocks = len(self._owner)
        kernel[(min(blocks, width) if width else blocks,)](
            self._table,
            self._owner,
            self.sums,
            blocks,
            BYTES=self._item,
            UNIT=self._unit,
            ALIGNED=self._aligned,
            COLUMNS=self._columns,
            REPEAT=REPEAT,
            num_warps=self._columns // 256,
        )


def launches(walks: Sequence[Walk]) -> list[tuple[list[int], Launch]]:
    """What to run to digest walks over one CUDA device, none of them empty: for each launch, the walks that its sums belong to."""
    groups: dict[tuple[int, bool, int], list[tuple[int, list[int]]]] = {}
    for slot, walk in enumerate(walks):
        item = walk.bits.element_size()
        for words, unit, columns in _split(walk.bits.data_ptr(), item, walk.first, walk.axes):
            groups.setdefault((item, unit, columns), []).append((slot, words))
    device = walks[0].bits.device
    return [
        ([slot for slot, _ in regions], Launch(item, unit, columns, [words for _, words in regions], device))
        for (item, unit, columns), regions in groups.items()
    ]


def triton_sums(walks: Sequence[Walk]) -> list[int]:
    """Partial digests mod 2^64 of walks over one CUDA device, none of them empty; `streamrl.tensors.digest_torch.torch_sums`' equal."""
    with torch.cuda.device_of(walks[0].bits):
        return run_launches(launches(walks), len(walks))


def run_launches(prepared: Sequence[tuple[list[int], Launch]], count: int) -> list[int]:
    """Partial digests mod 2^64 of the `count` walks that the launches were made for, on the current stream; waits for them."""
    totals = [0] * count
    for _, launch in prepared:
        launch.run()
    for slots, launch in prepared:
        for slot, value in zip(slots, launch.sums.tolist(), strict=True):
            totals[slot] += value
    return [total & MASK for total in totals]


def _split(address: int, item: int, first: int, axes: Sequence[Axis]) -> list[tuple[list[int], bool, int]]:
    """Table rows for one walk, each of at most two axes; whether their columns are neighbours in memory; the width of their blocks."""
    if len(axes) > 2:
        head, rest = axes[0], axes[1:]
        return [
            words
            for index in range(head.size)
            for words in _split(address + index * head.stride * item, item, first + index * head.step, rest)
        ]
    if len(axes) == 2:
        outer, inner = axes
        words = [address, first, outer.size, inner.size, outer.size * inner.size, outer.stride, inner.stride, outer.step, inner.step, 0, 0]
        padded = -(-inner.size // WIDE) * WIDE
        return [(words, inner.stride == 1, WIDE if 4 * padded <= 5 * inner.size else NARROW)]
    size, stride, step = (axes[0].size, axes[0].stride, axes[0].step) if axes else (1, 1, 1)
    words = [address, first, -(-size // WIDE), WIDE, size, WIDE * stride, stride, WIDE * step, step, 0, 0]
    return [(words, stride == 1, WIDE)]
