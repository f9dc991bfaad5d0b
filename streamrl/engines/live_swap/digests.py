"""Digests of a buffer, region by region: on a GPU by prepared kernel launches on the side stream, on a CPU by numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from streamrl.engines.live_swap.layout import Layout, target_view
from streamrl.engines.live_swap.pace import Pacer
from streamrl.engines.live_swap.plan import Copy, cut
from streamrl.engines.live_swap.side import Side
from streamrl.tensors.digest import MASK, slice_digest
from streamrl.tensors.digest_torch import Axis, Walk, as_word_tensor, kernel_works, torch_sums

if TYPE_CHECKING:
    from streamrl.tensors.digest_triton import Launch

GROUP = 128 << 20
"""Elements, or words, digested by one launch: about 0.25 ms of an H200, which forward passes wait for."""
TRIALS = 4
"""Runs in a row that a launch's time is taken from."""
ALL = 1 << 62
"""Beyond the end of every source."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Digests(Protocol):
    """Digests of one buffer, all of whose methods are called inside `side.entered()`."""

    def begin(self) -> None:
        """The buffer gets new bytes from here on."""
        ...

    def advance(self, side: Side, before: int, pacer: Pacer) -> None:
        """All source bytes before `before` have been asked to be copied: digest what came from them while others follow."""
        ...

    def result(self, side: Side, pacer: Pacer) -> tuple[int, ...]:
        """Partial digest of each region, 0 <= value < 2^64; waits for it."""
        ...


def make_digests(parameters: Sequence[Tensor], layout: Layout) -> Digests:
    """Of the regions of a layout, as they lie in a buffer."""
    return _make(parameters, layout.copies, layout.end_byte)


def make_word_digests(parameters: Sequence[Tensor], layout: Layout) -> Digests | None:
    """The same by words of 8 bytes; None where a copy, or a parameter that it writes to, is not made of whole words."""
    if layout.word_copies is None:
        return None
    words = list(parameters)
    for index in {copy.parameter for copy in layout.word_copies}:
        if (view := as_word_tensor(parameters[index])) is None:
            return None
        words[index] = view
    return _make(words, layout.word_copies, partial(layout.end_byte, words=True))


def _make(parameters: Sequence[Tensor], copies: Sequence[Copy], end_byte: Callable[[Copy], int]) -> Digests:
    if not parameters[0].is_cuda:
        return HostDigests(parameters, copies)
    if not kernel_works(parameters[0].device):
        return TorchDigests(parameters, copies)
    return DeviceDigests(parameters, copies, end_byte)


def sums(digests: Digests, side: Side, pacer: Pacer) -> tuple[int, ...]:
    """Of the buffer as it is."""
    digests.begin()
    return digests.result(side, pacer)


class HostDigests:
    """Reads the buffer with numpy; about 1 GB/s a core."""

    def __init__(self, parameters: Sequence[Tensor], copies: Sequence[Copy]) -> None:
        self._regions = [(copy, target_view(parameters, copy)) for copy in copies]

    def begin(self) -> None:
        pass

    def advance(self, side: Side, before: int, pacer: Pacer) -> None:
        pass

    def result(self, side: Side, pacer: Pacer) -> tuple[int, ...]:
        # What a stream is still writing must be there before the host reads it.
        side.finish()
        return tuple(region_digest(copy, view) for copy, view in self._regions)


def region_digest(copy: Copy, elements: Tensor) -> int:
    """Partial digest of a copy's elements, [rows, cols] on the host."""
    data = elements.contiguous().view(-1).view(torch.uint8).numpy()
    whole = (copy.start // copy.stride + copy.rows + 1, copy.stride)
    offset = (copy.start // copy.stride, copy.start % copy.stride)
    if offset[1] + copy.cols > copy.stride:
        # One row that crosses a multiple of its own length: it has no second dimension.
        whole, offset = (1, copy.start + copy.cols), (0, copy.start)
    return slice_digest(data, elements.element_size(), whole, offset, (copy.rows, copy.cols))


class TorchDigests:
    """Where the kernel cannot be had: torch operations, which allocate and take several times as long."""

    def __init__(self, parameters: Sequence[Tensor], copies: Sequence[Copy]) -> None:
        self._walks = [_walk(parameters, copy) for copy in copies]

    def begin(self) -> None:
        pass

    def advance(self, side: Side, before: int, pacer: Pacer) -> None:
        pass

    def result(self, side: Side, pacer: Pacer) -> tuple[int, ...]:
        side.finish()
        return tuple(value & MASK for value in torch_sums(self._walks))


class DeviceDigests:
    """Reads the buffer with a kernel, in groups of a bounded size; tables, sums and the host's copy of them are made once."""

    def __init__(self, parameters: Sequence[Tensor], copies: Sequence[Copy], end_byte: Callable[[Copy], int]) -> None:
        # Not at the top: a CPU's environment has no Triton.
        from streamrl.tensors.digest_triton import launches

        device = parameters[0].device
        self._launches: list[tuple[int, float, Tensor, Launch]] = []
        """End in the source, seconds it takes, the regions that the sums belong to, and the launch."""
        end = 0
        for group in _groups(copies):
            end = max(end, *(end_byte(copy) for _, copy in group))
            for slots, launch in launches([_walk(parameters, copy) for _, copy in group]):
                regions = torch.tensor([group[slot][0] for slot in slots], device=device)
                self._launches.append((end, _seconds(launch), regions, launch))
        self._next = 0
        self._totals = torch.zeros(len(copies), dtype=torch.int64, device=device)
        self._host = torch.zeros(len(copies), dtype=torch.int64, pin_memory=True)

    def begin(self) -> None:
        self._next = 0
        self._totals.zero_()

    def advance(self, side: Side, before: int, pacer: Pacer) -> None:
        while self._next < len(self._launches) and self._launches[self._next][0] <= before:
            _, seconds, regions, launch = self._launches[self._next]
            pacer.spend(seconds)
            with side.checking():
                launch.run()
                self._totals.index_add_(0, regions, launch.sums)
            self._next += 1

    def result(self, side: Side, pacer: Pacer) -> tuple[int, ...]:
        self.advance(side, ALL, pacer)
        with side.checking():
            self._host.copy_(self._totals, non_blocking=True)
        side.finish()
        return tuple(self._host.numpy().view(np.uint64).tolist())


def _seconds(launch: Launch) -> float:
    """How long a launch takes when nothing runs beside it. It is compiled here, so that no update waits for that."""
    launch.run()
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    for _ in range(TRIALS):
        launch.run()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3 / TRIALS


def _walk(parameters: Sequence[Tensor], copy: Copy) -> Walk:
    parameter = parameters[copy.parameter]
    bits = parameter.view(_BITS[parameter.element_size()])
    bits = bits.as_strided((1,), (1,), bits.storage_offset() + copy.target)
    inner = Axis(copy.cols, copy.target_step, 1)
    axes = (inner,) if copy.rows == 1 else (Axis(copy.rows, copy.target_stride, copy.stride), inner)
    return Walk(bits, copy.start, axes)


def _groups(copies: Sequence[Copy]) -> list[list[tuple[int, Copy]]]:
    """Regions, cut where they are larger than a group, in groups; each with the index of its copy."""
    groups: list[list[tuple[int, Copy]]] = [[]]
    used = 0
    for index, copy in enumerate(copies):
        span = (copy.rows - 1) * copy.stride + copy.cols
        step = GROUP * max(1, copy.stride // copy.cols)
        for first in range(copy.start, copy.start + span, step):
            for part in cut(copy, first, min(first + step, copy.start + span)):
                if used and used + part.count > GROUP:
                    groups.append([])
                    used = 0
                groups[-1].append((index, part))
                used += part.count
    return [group for group in groups if group]
