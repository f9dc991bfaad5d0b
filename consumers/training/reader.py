"""Reads the sample stream ahead of the training thread: fetches, decodes and judges; decides nothing."""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import Iterable, Sequence

import msgspec

from streamrl.bus.protocol import Log, Message
from streamrl.core.records import Poison, Record, judge
from streamrl.schemas.decoding import decode_together
from streamrl.schemas.sample_batch import SampleBatch
from streamrl.schemas.subjects import HEADER_DIGEST, HEADER_SCHEMA, HEADER_TASK, SAMPLES, kind_of
from streamrl.telemetry.clock import StateClock

WAKE_S = 0.05
"""Longest time between two looks for room in a full queue."""
TOGETHER = 16
"""Waiting messages are decoded at this many."""
GATHER_S = 0.02
"""The first of them waits so long at most, and not at all once the training thread does."""
SMALL_BYTES = 1 << 16
"""A message above this costs what its tokens do: decoding it with others saves nothing, and would copy them."""


class Incoming(msgspec.Struct, frozen=True):
    """One record with what it was made of. `message` is kept for poison only, `samples` for rollouts only."""

    record: Record
    samples: SampleBatch | None
    message: Message | None
    stored_s: float = 0.0
    """See `streamrl.bus.protocol.Message.time_s`."""


def open_messages(messages: Sequence[Message]) -> list[Incoming]:
    """Judge stored messages; what `open_message` gives for each of them."""
    small = [m for m in messages if len(m.body) <= SMALL_BYTES and kind_of(m.subject) == "samples"]
    decoded = decode_together([m.body for m in small]) if len(small) > 1 else None
    found = {m.sequence: samples for m, samples in zip(small, decoded or (), strict=False)}
    return [open_message(m, found.get(m.sequence)) for m in messages]


def open_message(message: Message, decoded: SampleBatch | None = None) -> Incoming:
    """Judge one stored message, whose samples may have been decoded already."""
    headers = message.headers
    record, samples = judge(
        message.subject,
        message.sequence,
        message.body,
        headers.get(HEADER_TASK),
        digest=headers.get(HEADER_DIGEST),
        schema=headers.get(HEADER_SCHEMA),
        decoded=decoded,
    )
    return Incoming(record, samples, message if isinstance(record, Poison) else None, message.time_s)


class RecordReader:
    """A bounded queue between the bus's event loop and the training thread.

    Messages that come while the training thread is busy are decoded several at a time. When it falls behind by `capacity` records the
    reader stops fetching; `get` unblocks it. While the training thread waits for a record, `clock` is in the state `wait_samples`.
    """

    def __init__(self, bus: Log, loop: asyncio.AbstractEventLoop, *, after: int, capacity: int, clock: StateClock | None = None) -> None:
        self._bus = bus
        self._after = after
        self._capacity = capacity
        self._clock = clock or StateClock("compute")
        self._fetched: list[Message] = []
        """Not decoded yet."""
        self._queue: queue.SimpleQueue[Incoming | BaseException] = queue.SimpleQueue()
        self._loop = loop
        self._due = asyncio.Event()
        self._room = asyncio.Event()
        self._full = False
        self._wanted = False
        """The training thread waits."""
        self._task = asyncio.run_coroutine_threadsafe(self._pump(), loop)

    def get(self, timeout_s: float) -> Incoming | None:
        """The next record in stream order, or None after `timeout_s` without one.

        Raises:
            LogTruncated: the stream no longer holds what comes next.
            BusUnavailable: the bus stayed away.
        """
        try:
            item = self._queue.get_nowait()
        except queue.Empty:
            self._wanted = True
            try:
                if self._fetched:
                    self._loop.call_soon_threadsafe(self._due.set)
                with self._clock.within("wait_samples"):
                    item = self._queue.get(timeout=timeout_s)
            except queue.Empty:
                return None
            finally:
                self._wanted = False
        if self._full and self._queue.qsize() <= self._capacity // 2:
            self._full = False
            self._loop.call_soon_threadsafe(self._room.set)
        if isinstance(item, BaseException):
            raise item
        return item

    @property
    def waiting(self) -> int:
        """Messages that are here right now, decoded or not, and not taken."""
        return len(self._fetched) + self._queue.qsize()

    @property
    def empty(self) -> bool:
        """Whether nothing is waiting right now."""
        return self.waiting == 0

    def close(self) -> None:
        """Stop reading."""
        self._task.cancel()

    async def _pump(self) -> None:
        opener = asyncio.create_task(self._open())
        try:
            async for message in self._bus.read(SAMPLES, after=self._after):
                await self._take(message)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # after what came before it
            self._hand_on(error)
        finally:
            opener.cancel()

    async def _take(self, message: Message) -> None:
        # Only this coroutine adds messages, so the room that it has seen stays.
        while self.waiting >= self._capacity:
            self._hand_on()
            self._room.clear()
            self._full = True
            with contextlib.suppress(TimeoutError):  # the other thread may have made room just before it was told to say so
                await asyncio.wait_for(self._room.wait(), WAKE_S)
        self._fetched.append(message)
        if self._wanted or len(self._fetched) >= TOGETHER:
            self._due.set()
        elif len(self._fetched) == 1:
            self._loop.call_later(GATHER_S, self._due.set)

    async def _open(self) -> None:
        while True:
            await self._due.wait()
            self._due.clear()
            self._hand_on()

    def _hand_on(self, end: Exception | None = None) -> None:
        """Decode what has been fetched, for the training thread; it raises `end`, and what goes wrong here."""
        try:
            for incoming in open_messages(self._fetched):
                self._queue.put(incoming)
        except Exception as error:
            end = error
        if end is not None:
            self._queue.put(end)
        self._fetched = []


def open_samples(messages: Iterable[Message]) -> dict[int, SampleBatch]:
    """Decoded messages by sequence, for what a resumed state holds pending."""
    found: dict[int, SampleBatch] = {}
    for message in messages:
        incoming = open_message(message)
        if incoming.samples is None:
            raise AssertionError(f"pending message {message.sequence} holds no samples: {incoming.record}")
        found[message.sequence] = incoming.samples
    return found
