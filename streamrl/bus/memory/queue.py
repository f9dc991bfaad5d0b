"""Claims in memory: leases that run out, redelivery, delays."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

from streamrl.bus.memory.log import Log
from streamrl.bus.protocol import Message


class MemoryLease:
    """One claimed task."""

    def __init__(self, queue: TaskQueue, message: Message, deliveries: int) -> None:
        self._queue = queue
        self._message = message
        self._sequence = message.sequence
        self._deliveries = deliveries

    @property
    def body(self) -> bytes:
        return self._message.body

    @property
    def sequence(self) -> int:
        return self._sequence

    @property
    def deliveries(self) -> int:
        return self._deliveries

    @property
    def stored_s(self) -> float:
        return self._message.time_s

    async def keep(self) -> None:
        await self._queue.hold(self._sequence, self._deliveries)

    async def done(self) -> None:
        await self._queue.finish(self._sequence)

    async def retry(self, delay_s: float = 0.0) -> None:
        await self._queue.put_back(self._sequence, self._deliveries, delay_s)


class TaskQueue:
    """Leases on the messages of the task log; several sources share it.

    Args:
        log: the stream `tasks`.
        ack_wait_s: a claimed task that is not kept alive for this long is delivered again.
    """

    def __init__(self, log: Log, ack_wait_s: float) -> None:
        self._log = log
        self._ack_wait_s = ack_wait_s
        self._free_at: dict[int, float] = {}
        """Time (monotonic) from which a delivered message may be delivered again."""
        self._deliveries: dict[int, int] = {}

    async def claim(self, subject: str, *, max: int, wait_s: float) -> Sequence[MemoryLease]:
        """See `Bus.claim`."""
        deadline = time.monotonic() + wait_s
        async with self._log.changed:
            while True:
                now = time.monotonic()
                ready, next_s = self._ready(subject, now)
                if ready or now >= deadline:
                    return [self._deliver(sequence, now) for sequence in ready[:max]]
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._log.changed.wait(), min(deadline, next_s) - now)

    def _ready(self, subject: str, now: float) -> tuple[list[int], float]:
        """Deliverable sequences, those that come back first; and when the next one will come back."""
        again: list[int] = []
        fresh: list[int] = []
        next_s = float("inf")
        for sequence in range(self._log.first, self._log.last + 1):
            message = self._log.get(sequence)
            if message is None or message.subject != subject:
                continue
            free_at = self._free_at.get(sequence)
            if free_at is None:
                fresh.append(sequence)
            elif free_at <= now:
                again.append(sequence)
            else:
                next_s = min(next_s, free_at)
        return again + fresh, next_s

    def _deliver(self, sequence: int, now: float) -> MemoryLease:
        message = self._log.get(sequence)
        assert message is not None
        self._free_at[sequence] = now + self._ack_wait_s
        self._deliveries[sequence] = self._deliveries.get(sequence, 0) + 1
        return MemoryLease(self, message, self._deliveries[sequence])

    async def hold(self, sequence: int, delivery: int) -> None:
        """Begin the ack wait anew, unless the task was delivered to somebody else since."""
        if self._deliveries.get(sequence) == delivery and sequence in self._free_at:
            self._free_at[sequence] = time.monotonic() + self._ack_wait_s

    async def finish(self, sequence: int) -> None:
        """Take the task off the queue; late is fine."""
        self._log.remove(sequence)
        self._free_at.pop(sequence, None)
        self._deliveries.pop(sequence, None)

    async def put_back(self, sequence: int, delivery: int, delay_s: float) -> None:
        """Make the task deliverable after a delay, unless it was delivered to somebody else since."""
        if self._deliveries.get(sequence) == delivery and sequence in self._free_at:
            self._free_at[sequence] = time.monotonic() + delay_s
            await self._log.notify()
