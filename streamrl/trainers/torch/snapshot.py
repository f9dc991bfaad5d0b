"""Snapshots of a model on a device: one copy into a ring of buffers, beside the training thread's work, read by others at leisure.

```text
training stream   step v ──┬──────── forward, backward of v + 1 ────────────┬─ optimizer writes the parameters
                           │                                                │ (waits for `copied`, long past by then)
snapshot stream            └─ bucket 0, mark ─ bucket 1, mark ─ ... ─ copied ┘
reader threads                               │                         └─ digest, copy to the host
                                             └─ hand out a handle to the memory: who opens it reads what is marked, and waits for the rest
```
A buffer is free when no snapshot of it is referenced any more and its guard, where its memory was handed out, is revoked.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from streamrl.errors import TrainingError
from streamrl.schemas.weights import Copying
from streamrl.tensors import cuda_ipc
from streamrl.tensors.buckets import MARK_BYTES
from streamrl.tensors.concatenation import aligned, lay_out
from streamrl.tensors.digest import WORD_BYTES, as_words
from streamrl.tensors.digest_torch import NamedDigester, NamedDigests, Region
from streamrl.weights.protocol import Changed, DeviceBytes, Guard, HostBytes, Shard

LARGE_BYTES = 4 << 20
"""Tensors from this size on are copied by calls of their own, which move a GPU's memory faster than one kernel over all of them does; for
smaller ones the calls would take longer than the copies."""
BUCKET_BYTES = 1 << 30
"""Bytes that are copied, in 0.6 ms of an H200, before their readers may begin; a larger tensor is a bucket by itself."""


class Published(NamedTuple):
    """What a snapshot has of one parameter."""

    name: str
    held: Tensor
    """What is copied."""
    dtype: torch.dtype
    """That it is published in."""
    shape: tuple[int, ...]
    """Of the whole parameter."""
    offset: tuple[int, ...] = ()
    """Index in it of the first element that is held, in each dimension; empty: 0 everywhere."""

    @property
    def nbytes(self) -> int:
        """Of what is published."""
        return self.held.numel() * self.dtype.itemsize


class Place(NamedTuple):
    """What does not change from one version to the next of what a snapshot has of a parameter."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of the whole parameter."""
    offset: tuple[int, ...]
    own: tuple[int, ...]
    """Shape of what is held."""
    start: int
    """First byte in the buffer."""
    nbytes: int
    item: int
    asked: Mapping[int, tuple[tuple[int, ...], ...]]
    """Shape of the whole, offset and shape of what is held, by the bytes of what they count: elements, and words if there are any."""


class Bucket(NamedTuple):
    """Parameters that are copied one after the other, by their index: large ones each, small ones together."""

    large: list[int]
    small: list[int]
    end: int
    """In the buffer."""


class Layout:
    """Where the parameters lie in a buffer, and the buckets they are copied in, which follow each other as they lie there."""

    def __init__(self, published: Sequence[Published]) -> None:
        self.published = published
        starts, self.nbytes = lay_out({one.name: one.nbytes for one in published})
        self.places = [_place(one, starts[one.name]) for one in published]
        self.marks = aligned(self.nbytes)
        """First byte of the buckets' marks."""
        self.buckets: list[Bucket] = []
        first = 0
        for index in sorted(range(len(published)), key=lambda index: self.places[index].start):
            start, nbytes = self.places[index].start, self.places[index].nbytes
            if not self.buckets or (nbytes and start + nbytes - first > BUCKET_BYTES):
                if self.buckets:
                    self.buckets[-1] = self.buckets[-1]._replace(end=start)
                self.buckets.append(Bucket([], [], self.nbytes))
                first = start
            large = nbytes >= LARGE_BYTES and published[index].held.is_contiguous()
            (self.buckets[-1].large if large else self.buckets[-1].small).append(index)


def _place(one: Published, start: int) -> Place:
    item, own = one.dtype.itemsize, tuple(one.held.shape)
    words = as_words(item, one.shape, one.offset, own)
    asked = ({} if words is None else {WORD_BYTES: words}) | {item: (one.shape, one.offset or (0,) * len(own), own)}
    return Place(one.name, str(one.dtype).removeprefix("torch."), one.shape, one.offset, own, start, one.nbytes, item, asked)


STAGING_BYTES = 64 << 20
"""Pinned host memory that a buffer's bytes pass through on their way to the host; half of it is filled while the other is emptied."""
READER_PATIENCE_S = 5.0
"""How long engines may go on reading a buffer that is needed."""
MUCH = 4
"""Where more than a fourth of a tensor's elements has changed all of them are compared on the host: positions take more bytes."""
HOLDER_PATIENCE_S = 300.0
"""How long a publisher may hold the last free buffer: a bus takes minutes for a large model."""

WARN_AFTER_S = 10.0
"""A trainer that stands because no buffer is free says so this often."""

logger = logging.getLogger(__name__)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Buffer:
    """One of the ring's buffers: a version's bytes as they are published, the buckets' marks, and the parameters' views of it."""

    def __init__(self, layout: Layout, device: torch.device, share: Callable[[Tensor], bytes]) -> None:
        published, self.layout = layout.published, layout
        # Zeros once: the gaps between tensors are never written.
        self.memory = torch.zeros(layout.marks + MARK_BYTES * len(layout.buckets), dtype=torch.uint8, device=device)
        self.marks = self.memory[layout.marks :].view(torch.int64)
        self.views = [
            self.memory[place.start : place.start + place.nbytes].view(one.dtype).view(one.held.shape)
            for one, place in zip(published, layout.places, strict=True)
        ]
        tensors = [one.held for one in published]
        self.copies = [
            ([(self.views[i], tensors[i]) for i in large], [self.views[i] for i in small], [tensors[i] for i in small])
            for large, small, _ in layout.buckets
        ]
        """Of each bucket: large ones, and targets and sources of the small ones."""
        self.held = False
        """By a snapshot that is referenced."""
        self.guard: Guard | None = None
        self.used = 0
        """When it was last written, as a count of snapshots."""
        self._share = share
        self._handle = b""
        regions = [Region(view, one.shape, one.offset) for one, view in zip(published, self.views, strict=True)]
        self.digester = NamedDigester({one.name: region for one, region in zip(published, regions, strict=True)})

    def handle(self) -> bytes:
        """See `Snapshot.handle`; made once, and the same for all versions that pass through this buffer."""
        self._handle = self._handle or self._share(self.memory)
        return self._handle


class DeviceSnapshot:
    """Implements `streamrl.weights.protocol.Snapshot`: the bytes of one version, for as long as somebody refers to it."""

    def __init__(self, buffer: Buffer, copying: Copying, events: tuple[Any, Any], reader: HostReader, known: NamedDigests | None) -> None:
        self.layout = buffer.layout
        self.nbytes = buffer.layout.nbytes
        self.copying = copying
        self._buffer = buffer
        self._begun, self._copied = events
        self._reader = reader
        self._known = known
        self._lock = threading.Lock()

    def handle(self) -> bytes:
        if self._begun is not None:
            self._begun.synchronize()
        return self._buffer.handle()

    def guard(self, guard: Guard) -> None:
        self._buffer.guard = guard

    def copy_to(self, start: int, out: HostBytes) -> None:
        """Write bytes `start .. start + len(out)` of the snapshot to the host."""
        self._wait()
        self._reader.read(self._buffer.memory[start : start + len(out)], out)

    def memory(self) -> Tensor:
        """All bytes, complete."""
        self._wait()
        return self._buffer.memory

    def comparing(self) -> AbstractContextManager[Any]:
        """A context in which work goes to the readers' stream, of one thread at a time: it takes room on the device."""
        return self._reader.comparing()

    def digests(self) -> NamedDigests:
        """Of all its tensors; computed once, unless they were known when it was taken."""
        with self._lock:
            if self._known is None:
                self._wait()
                with self._reader.stream():
                    self._known = self._buffer.digester.digests()
            return self._known

    def _wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()


class SnapshotBytes(msgspec.Struct, eq=False, gc=False):
    """Implements `streamrl.weights.protocol.DeviceBytes`: what a snapshot has of one tensor. Nothing that it refers to refers to it."""

    snapshot: DeviceSnapshot
    place: Place
    start: int
    nbytes: int

    def copy_to(self, first: int, out: HostBytes) -> None:
        self.snapshot.copy_to(self.start + first, out)

    def changes(self, before: DeviceBytes, itemsize: int, first: int, count: int) -> Changed | None:
        if not isinstance(before, SnapshotBytes) or (before.place, before.snapshot.layout) != (self.place, self.snapshot.layout):
            return None
        with self.snapshot.comparing():
            # What that takes of the device is free before another thread is let in.
            found = _changed(*(_bits(one, itemsize, first, count) for one in (before, self)))
        if found is None:
            return None
        index, *values = found
        old_bits, new_bits = (one.view(f"<u{itemsize}") for one in values)
        return Changed(index.astype(np.int64), old_bits, new_bits)

    def digest(self, itemsize: int, global_shape: Sequence[int], offset: Sequence[int], shape: Sequence[int]) -> int:
        asked = (tuple(global_shape), tuple(offset) or (0,) * len(shape), tuple(shape))
        if (whole := self.place.asked[itemsize]) != asked:
            raise TrainingError(
                f"expected to digest all that is held, {whole[2]} at {whole[1]} of {whole[0]}, got {asked[2]} at {asked[1]} of {asked[0]}",
                shape=whole[2],
                got=asked[2],
            )
        digests = self.snapshot.digests()
        return digests.elements[self.place.name] if itemsize == self.place.item else digests.words[self.place.name]


def _bits(one: SnapshotBytes, itemsize: int, first: int, count: int) -> Tensor:
    start = one.start + first * itemsize
    return one.snapshot.memory()[start : start + count * itemsize].view(_BITS[itemsize])


def _changed(old: Tensor, new: Tensor) -> list[npt.NDArray[Any]] | None:
    """Positions, old and new bits of what differs, on the host; None where that is more than one in `MUCH`."""
    differ = old != new
    # Counted before they are listed: the positions of all would take eight times the room of the flags.
    if _count(differ) * MUCH > len(old):
        return None
    positions = differ.nonzero().view(-1)
    return [one.cpu().numpy() for one in (positions.to(torch.int32), old[positions], new[positions])]


def _count(flags: Tensor) -> int:
    """How many of `flags` ([n] bool) are set, without the copy of 8 bytes for each that torch's sums of them make on a GPU.

    Words of 8 flags are added in rows of 128: each byte of a sum counts 128 flags at most, so that none carries into the next one.
    Example: of 2,050 flags [2, 128] words have a sum of 8 counts each, and the last two flags are added by themselves.
    """
    whole = len(flags) // 1024 * 1024
    counts = flags[:whole].view(torch.int64).view(-1, 128).sum(1)
    return int(counts.view(torch.uint8).sum() + flags[whole:].sum())


class HostReader:
    """Copies device memory to ordinary host memory through pinned buffers; one read at a time, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._staging: Tensor | None = None
        self._lock = threading.Lock()
        self._comparing = threading.Lock()

    def stream(self) -> AbstractContextManager[Any]:
        """A context in which work goes to the reader's stream."""
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()

    @contextmanager
    def comparing(self) -> Generator[None]:
        """The same for one thread at a time."""
        with self._comparing, self.stream():
            yield

    def read(self, source: Tensor, out: HostBytes) -> None:
        """Copy `source` ([n] uint8 on the device) to `out` ([n] uint8); returns when it is there."""
        target = torch.from_numpy(out)
        if self._stream is None:
            target.copy_(source)
            return
        with self._lock, torch.cuda.stream(self._stream):
            if self._staging is None:
                self._staging = torch.empty((2, STAGING_BYTES // 2), dtype=torch.uint8, pin_memory=True)
            size = self._staging.shape[1]
            filled: list[tuple[Tensor, Tensor, Any]] = []
            for index, first in enumerate(range(0, len(source), size)):
                piece = source[first : first + size]
                half = self._staging[index % 2, : len(piece)]
                half.copy_(piece, non_blocking=True)
                done: Any = torch.cuda.Event()
                done.record(self._stream)
                filled.append((target[first : first + size], half, done))
                if len(filled) == 2:
                    _empty(*filled.pop(0))
            for last in filled:
                _empty(*last)


class SnapshotRing:
    """Takes snapshots of named parameters; see the module. One thread calls `take`, `shards` and `settle`.

    Args:
        parameters: name and tensor, which is published whole and as it is, or what is held of a larger one; all on `device`, at addresses
            that stay.
        slots: buffers. With one a snapshot waits for the readers of the one before; every buffer costs the model's bytes.
        share: gives a buffer's handle.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, Tensor] | Published],
        device: torch.device,
        *,
        slots: int,
        share: Callable[[Tensor], bytes] = cuda_ipc.share,
        reader_patience_s: float = READER_PATIENCE_S,
        holder_patience_s: float = HOLDER_PATIENCE_S,
    ) -> None:
        self._published = [
            one if isinstance(one, Published) else Published(one[0], one[1].detach(), one[1].dtype, tuple(one[1].shape))
            for one in parameters
        ]
        self._layout = Layout(self._published)
        self._of_words = {place.name for place in self._layout.places if WORD_BYTES in place.asked}
        self._device = device
        self._slots = slots
        self._share = share
        self._reader_patience_s = reader_patience_s
        self._holder_patience_s = holder_patience_s
        self.buffers: list[Buffer] = []
        self._freed = threading.Condition()
        self._taken = 0
        self._reader = HostReader(device)
        cuda = device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if cuda else None
        self._begun: Any = None
        self._copied: Any = None

    def take(self, known: NamedDigests | None = None) -> list[Shard]:
        """A snapshot of the parameters as they are at this point of the current stream.

        Returns as soon as the copy is under way; it waits only where every buffer is still in use: `reader_patience_s` for
        engines, then they lose it.

        Args:
            known: of the parameters as they are, so that engines compare what they get with what was trained, and nobody waits for
                digests; None: they are computed from the snapshot when somebody asks.

        Raises:
            TrainingError: publishers held all buffers for `holder_patience_s`.
        """
        buffer = self._free_buffer()
        self._taken += 1
        buffer.used = self._taken
        self._copy(buffer)
        # A parameter that does not lie in C order has no words, but its copy has.
        complete = known is not None and set(known.words) == self._of_words
        copying = Copying(self._taken, self._layout.marks, tuple(bucket.end for bucket in self._layout.buckets))
        snapshot = DeviceSnapshot(buffer, copying, (self._begun, self._copied), self._reader, known if complete else None)
        weakref.finalize(snapshot, self._release, buffer).atexit = False
        return [
            Shard(
                name=place.name,
                dtype=place.dtype,
                global_shape=place.shape,
                offset=place.offset,
                shape=place.own,
                data=SnapshotBytes(snapshot, place, place.start, place.nbytes),
            )
            for place in self._layout.places
        ]

    def shards(self, known: NamedDigests | None = None) -> Iterator[Shard]:
        """A snapshot that is taken when the first shard is drawn; `known` as in `take`."""
        yield from self.take(known)

    def settle(self) -> None:
        """Let what the current stream does from now on come after the last copy; call it before the parameters are written."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)

    def _copy(self, buffer: Buffer) -> None:
        if self._stream is None:
            for number in range(len(self._layout.buckets)):
                self.copy_bucket(buffer, number)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._begun = None
            for number in range(len(self._layout.buckets)):
                self.copy_bucket(buffer, number)
                self._begun = self._begun or self._recorded()
            self._copied = self._recorded()

    def copy_bucket(self, buffer: Buffer, number: int) -> None:
        large, targets, sources = buffer.copies[number]
        for target, source in large:
            target.copy_(source, non_blocking=True)
        if targets:
            torch.ops.aten._foreach_copy_(targets, sources)
        # On the same stream: who can read it can read the bucket.
        buffer.marks[number].fill_(self._taken)

    def _recorded(self) -> Any:
        event: Any = torch.cuda.Event()
        event.record(self._stream)
        return event

    def _free_buffer(self) -> Buffer:
        until = time.monotonic() + self._holder_patience_s
        with self._freed:
            while True:
                free = [buffer for buffer in self.buffers if not buffer.held]
                if buffer := next((one for one in free if one.guard is None), None):
                    break
                if len(self.buffers) < self._slots:
                    self.buffers.append(buffer := Buffer(self._layout, self._device, self._share))
                    break
                if free:
                    buffer = min(free, key=lambda one: one.used)
                    break
                if self._freed.wait(min(WARN_AFTER_S, max(0.0, until - time.monotonic()))):
                    continue
                if (left := until - time.monotonic()) > 0:
                    logger.warning("event=waiting_for_snapshot_buffer buffers=%d left_s=%.0f", self._slots, left)
                else:
                    raise TrainingError(
                        f"expected one of {self._slots} snapshot buffers to become free within {self._holder_patience_s:g} s, none did",
                        hint="the transport is slower than the trainer: raise weights.ring, or publish less often",
                        slots=self._slots,
                    )
            buffer.held = True
        if buffer.guard is not None:
            buffer.guard.revoke(self._reader_patience_s)
            buffer.guard = None
        return buffer

    def _release(self, buffer: Buffer) -> None:
        with self._freed:
            buffer.held = False
            self._freed.notify_all()


def _empty(target: Tensor, half: Tensor, done: Any) -> None:
    done.synchronize()
    target.copy_(half)
