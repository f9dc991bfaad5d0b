"""Staging: a version's bytes go into the idle buffer while the other one is served.

It runs in the channel's thread, on a stream of its own on a GPU. In the steady state it allocates nothing: views, pinned memory and the
digests' tables are made once. Calls into torch release the interpreter's lock while they copy, and what is done in Python between two of
them is kept short, because the scheduler's thread wants the lock back for the next forward pass.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from streamrl.engines.live_swap.digests import Digests, make_digests, make_word_digests, sums
from streamrl.engines.live_swap.fallback import DerivedLoad
from streamrl.engines.live_swap.images import MappedVersion
from streamrl.engines.live_swap.layout import Layout, recurring, source_view, target_view
from streamrl.engines.live_swap.messages import Prepare, Prepared, Served, Stage, Staged, TensorEntry
from streamrl.engines.live_swap.moves import moves
from streamrl.engines.live_swap.pace import Pacer, Passes
from streamrl.engines.live_swap.plan import DEVICE_WINDOW_BYTES, Window
from streamrl.engines.live_swap.recorder import record
from streamrl.engines.live_swap.side import Side
from streamrl.engines.live_swap.sources import DeviceImages, DeviceSpan
from streamrl.engines.live_swap.swap import Swap
from streamrl.errors import WeightSyncError
from streamrl.tensors.concatenation import ALIGNMENT
from streamrl.weights.protocol import CudaSource, FileSource

Pairs = tuple[list[Tensor], list[Tensor]]
"""Targets and sources of one window."""


class Bound(NamedTuple):
    """What to copy of one window."""

    first_byte: int
    """Of the source."""
    moved: int
    """Bytes that it reads and writes in the device's memory."""
    pairs: Pairs
    reads: tuple[tuple[int, int], ...] = ()
    """Index of each device source, and the end of what is read of it, in the concatenation."""


KEPT_BINDINGS = 16
RUN_GAP_BYTES = 64 << 10
"""Bytes of a file that are brought along where a call more would take longer."""
BREATH = 16
"""Views made in a row before the interpreter's lock is offered to others: about 0.1 ms."""


class Stager:
    """Prepares layouts and stages versions of one rank.

    Args:
        swap: the rank's two buffers and which of them is idle.
        passes: forward passes.
        streams: that SGLang uses.
    """

    def __init__(self, swap: Swap, passes: Passes, streams: Sequence[Any]) -> None:
        self._swap = swap
        self._passes = passes
        self._side = Side(swap.device, streams, host_only=swap.buffers.pinned)
        self._layouts: dict[str, Layout] = {}
        self._of_scratch: dict[tuple[str, int], list[Bound]] = {}
        self._of_devices: dict[tuple[object, ...], list[Bound]] = {}
        self._scratch_windows: dict[str, list[Window]] = {}
        self._digests: dict[tuple[str, int], Digests] = {}
        self._word_digests: dict[tuple[str, int], Digests] = {}
        self._devices = DeviceImages(swap.device, self._side)
        self._derived: DerivedLoad | None = None

    def prepare(self, request: Prepare) -> Prepared:
        """Record how the layout reaches the parameters, and make all that staging will use.

        Raises:
            WeightSyncError: the tensors do not fit the model.
        """
        started = time.perf_counter()
        layout = self._layouts.get(request.layout)
        if layout is None:
            _check_offsets(request.tensors)
            layout = Layout(request.tensors, record(self._swap.model, request.tensors))
            if layout.recorded:
                self._make(request.layout, layout)
            self._layouts[request.layout] = layout
        return Prepared(
            recorded=layout.recorded,
            why=layout.why,
            regions=layout.regions(),
            ignored=layout.ignored,
            took_s=time.perf_counter() - started,
            words=all((request.layout, index) in self._word_digests for index in (0, 1)),
        )

    def stage(self, request: Stage) -> Staged:
        """Write the version into the idle buffer; from then on it can be committed.

        Raises:
            WeightSyncError: the layout is not prepared, or the source cannot be read. The idle buffer may then hold anything; it is
                not committed.
        """
        started = time.perf_counter()
        layout = self._layout(request.layout)
        idle = self._swap.begin_staging()
        with self._side.entered():
            self._side.wait(self._swap.released)
            try:
                digests = self._replay(layout, idle, request) if layout.recorded else self._derive(layout, idle, request)
            finally:
                # Nobody may read the source any more when this returns, whatever happened.
                self._side.finish()
        self._swap.end_staging(request.version)
        nbytes = sum(piece.numel() * piece.element_size() for piece in self._swap.buffers.sets[idle])
        return Staged(version=request.version, took_ms=(time.perf_counter() - started) * 1e3, nbytes=nbytes, digests=digests)

    def served(self, layout_key: str) -> Served:
        """Digest what is served, on the side stream; tried again when a commit comes in between.

        Raises:
            WeightSyncError: the layout is not prepared, or its weights are derived and cannot be read back.
        """
        layout = self._layout(layout_key)
        if not layout.recorded:
            raise WeightSyncError(f"expected weights that can be read back, got derived ones: {layout.why}")
        while True:
            version, active = self._swap.serving, self._swap.buffers.active
            with self._side.entered():
                found = sums(self._digests[layout_key, active], self._side, Pacer(0.0, self._passes))
            if (version, active) == (self._swap.serving, self._swap.buffers.active):
                return Served(version=version, digests=found)

    def _replay(self, layout: Layout, idle: int, request: Stage) -> tuple[int, ...]:
        """Copy by the plan, and digest what has been copied while the rest follows."""
        pacer = Pacer(request.pace.max_gap_ms, self._passes)
        digests = (self._word_digests if request.words else self._digests)[request.layout, idle]
        digests.begin()
        for bound in self._windows(request.layout, layout, idle, request.source):
            if request.verify:
                digests.advance(self._side, bound.first_byte, pacer)
            pacer.spend(bound.moved / self._side.bytes_s)
            self._side.copy(bound.pairs)
        return digests.result(self._side, pacer) if request.verify else ()

    def _layout(self, key: str) -> Layout:
        layout = self._layouts.get(key)
        if layout is None:
            raise WeightSyncError(f"expected a prepared layout, got {key}", hint="prepare it first")
        return layout

    def _make(self, key: str, layout: Layout) -> None:
        cut = layout.cut([(0, layout.nbytes)])
        self._scratch_windows[key] = cut
        with self._side.entered():
            if self._side.reserve(max(window.end_byte - _base(window) for window in cut)):
                self._of_scratch.clear()
                self._of_devices.clear()
            for index in (0, 1):
                # The weights loaded first have this padding already, unless they were dummies.
                for fill in layout.fills:
                    target_view(self._swap.buffers.sets[index], fill.place).fill_(fill.value)
                self._digests[key, index] = make_digests(self._swap.buffers.sets[index], layout)
                if (words := make_word_digests(self._swap.buffers.sets[index], layout)) is not None:
                    self._word_digests[key, index] = words

    def _windows(self, key: str, layout: Layout, idle: int, source: FileSource | CudaSource) -> Iterator[Bound]:
        """Windows to copy, one after the other, each when its bytes are there."""
        if isinstance(source, CudaSource):
            spans = self._spans(source)
            for bound in self._bound_to_device(key, layout, idle, spans):
                for index, end in bound.reads:
                    spans[index].wait(end)
                yield bound
            return
        version = MappedVersion(source, layout.nbytes)
        cut = self._scratch_windows[key]
        for index, (window, bound) in enumerate(zip(cut, self._bound_to_scratch(key, layout, idle), strict=True)):
            self._side.load(index % 2, _runs(version, window))
            yield bound

    def _spans(self, source: CudaSource) -> Sequence[DeviceSpan]:
        if self._devices.close_others(source):
            # A view would keep a dead trainer's buffer from being freed, and its successor may need the room.
            self._of_devices.clear()
        return self._devices.spans(source)

    def _bound_to_scratch(self, key: str, layout: Layout, idle: int) -> list[Bound]:
        known = self._of_scratch.get((key, idle))
        if known is None:
            slots = self._side.scratch
            # Written to the scratch, read there, and written to their parameters.
            known = [
                Bound(window.first_byte, 3 * window.nbytes, self._pairs(layout, window, idle, [(slots[index % 2], _base(window))]))
                for index, window in enumerate(self._scratch_windows[key])
            ]
            self._of_scratch[key, idle] = known
        return known

    def _bound_to_device(self, key: str, layout: Layout, idle: int, spans: Sequence[DeviceSpan]) -> list[Bound]:
        identity = (key, idle, *((span.first, span.end, span.data.data_ptr()) for span in spans))
        known = self._of_devices.get(identity)
        if known is None:
            cut = layout.cut([(span.first, span.end) for span in spans], DEVICE_WINDOW_BYTES)
            known, read = [], [(span.data, span.first) for span in spans]
            for window in cut:
                targets, sources = self._pairs(layout, window, idle, read)
                pairs = [*targets, *self._side.unlike[:1]], [*sources, *self._side.unlike[1:]]
                # As if it were read from this device's memory too: opened memory does not tell on which GPU it lies. From another one a
                # paced copy is slower than it need be, and forward passes feel less of it than they may.
                known.append(Bound(window.first_byte, 2 * window.nbytes, pairs, window.reads))
            self._of_devices[identity] = known
            if len(self._of_devices) > KEPT_BINDINGS:
                del self._of_devices[next(iter(self._of_devices))]
        return known

    def _pairs(self, layout: Layout, window: Window, idle: int, read: Sequence[tuple[Tensor, int]]) -> Pairs:
        """Targets and sources of a window; `read` has the bytes of each source and its first byte in the concatenation."""
        parameters = self._swap.buffers.sets[idle]
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for index, move in enumerate(moves(window.pieces)):
            copy = move.first.copy
            counts = [one.times for one in move.recurs]
            targets.append(recurring(target_view(parameters, copy), counts, [one.target_step for one in move.recurs]))
            data, first_byte = read[move.first.source]
            source = source_view(data, move.first.first_byte - first_byte, copy, layout.dtypes[copy.tensor])
            sources.append(recurring(source, counts, [one.step for one in move.recurs]))
            if index % BREATH == BREATH - 1:
                time.sleep(0)
        return targets, sources

    def _derive(self, layout: Layout, idle: int, request: Stage) -> tuple[int, ...]:
        if self._derived is None:
            self._derived = DerivedLoad(self._swap.model)
        if isinstance(request.source, CudaSource):
            spans = self._spans(request.source)
            for span in spans:
                span.wait(span.end)
        else:
            spans = [DeviceSpan(0, _tensor(MappedVersion(request.source, layout.nbytes).bytes(0, layout.nbytes)))]
        return self._derived.load(self._swap.buffers.sets[idle], layout, spans, verify=request.verify)


def _base(window: Window) -> int:
    """Where its source is viewed from: at a multiple of `ALIGNMENT` it may be viewed as any dtype."""
    return window.first_byte // ALIGNMENT * ALIGNMENT


def _runs(version: MappedVersion, window: Window) -> Iterator[tuple[int, Tensor]]:
    """The bytes that a window reads, and where each run of them begins in its scratch; what other ranks need in between is left out."""
    base, first, end = _base(window), window.first_byte, window.first_byte
    for piece in sorted(window.pieces, key=lambda piece: piece.first_byte):
        if piece.first_byte > end + RUN_GAP_BYTES:
            yield from ((at - base, _tensor(data)) for at, data in version.segments(first, end))
            first = piece.first_byte
        end = max(end, piece.end_byte)
    yield from ((at - base, _tensor(data)) for at, data in version.segments(first, end))


def _tensor(data: npt.NDArray[np.uint8]) -> Tensor:
    with warnings.catch_warnings():
        # It is only ever read.
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(data)


def _check_offsets(entries: Sequence[TensorEntry]) -> None:
    for entry in entries:
        if entry.offset % ALIGNMENT:
            raise WeightSyncError(f"tensor {entry.name!r}: expected an offset that is a multiple of {ALIGNMENT}, got {entry.offset}")
