"""Reads the sample stream ahead of the training thread: fetches, decodes and judges; decides nothing."""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import Iterable

import msgspec

from streamrl.bus.protocol import Log, Message
from streamrl.core.records import Poison, Record, judge
from streamrl.schemas.columns import SampleBatch
from streamrl.schemas.subjects import HEADER_DIGEST, HEADER_SCHEMA, HEADER_TASK, SAMPLES

WAKE_S = 0.05
"""Longest time between two looks for room in a full queue."""


class Incoming(msgspec.Struct, frozen=True):
    """One record with what it was made of. `message` is kept for poison only, `samples` for rollouts only."""

    record: Record
    samples: SampleBatch | None
    message: Message | None


def open_message(message: Message) -> Incoming:
    """Judge one stored message."""
    headers = message.headers
    record, samples = judge(
        message.subject,
        message.sequence,
        message.body,
        headers.get(HEADER_TASK),
        digest=headers.get(HEADER_DIGEST),
        schema=headers.get(HEADER_SCHEMA),
    )
    return Incoming(record, samples, message if isinstance(record, Poison) else None)


class RecordReader:
    """A bounded queue between the bus's event loop and the training thread.

    When the training thread falls behind by `capacity` records the reader stops fetching; `get` unblocks it.
    """

    def __init__(self, bus: Log, loop: asyncio.AbstractEventLoop, *, after: int, capacity: int) -> None:
        self._bus = bus
        self._after = after
        self._capacity = capacity
        self._queue: queue.SimpleQueue[Incoming | BaseException] = queue.SimpleQueue()
        self._loop = loop
        self._room = asyncio.Event()
        self._full = False
        self._task = asyncio.run_coroutine_threadsafe(self._pump(), loop)

    def get(self, timeout_s: float) -> Incoming | None:
        """The next record in stream order, or None after `timeout_s` without one.

        Raises:
            LogTruncated: the stream no longer holds what comes next.
            BusUnavailable: the bus stayed away.
        """
        try:
            item = self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if self._full and self._queue.qsize() <= self._capacity // 2:
            self._full = False
            self._loop.call_soon_threadsafe(self._room.set)
        if isinstance(item, BaseException):
            raise item
        return item

    @property
    def empty(self) -> bool:
        """Whether nothing is waiting right now."""
        return self._queue.empty()

    def close(self) -> None:
        """Stop reading."""
        self._task.cancel()

    async def _pump(self) -> None:
        try:
            async for message in self._bus.read(SAMPLES, after=self._after):
                await self._put(open_message(message))
        except asyncio.CancelledError:
            raise
        except Exception as error:  # handed to the training thread, which raises it
            await self._put(error)

    async def _put(self, item: Incoming | BaseException) -> None:
        # Only this coroutine puts, so the room that it has seen stays.
        while self._queue.qsize() >= self._capacity:
            self._room.clear()
            self._full = True
            with contextlib.suppress(TimeoutError):  # the other thread may have made room just before it was told to say so
                await asyncio.wait_for(self._room.wait(), WAKE_S)
        self._queue.put(item)


def open_samples(messages: Iterable[Message]) -> dict[int, SampleBatch]:
    """Decoded messages by sequence, for what a resumed state holds pending."""
    found: dict[int, SampleBatch] = {}
    for message in messages:
        incoming = open_message(message)
        if incoming.samples is None:
            raise AssertionError(f"pending message {message.sequence} holds no samples: {incoming.record}")
        found[message.sequence] = incoming.samples
    return found
