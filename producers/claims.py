"""Claimed tasks of one source: kept alive while they are worked on, done after their last record is stored, given back otherwise.

```text
claimed -> worked on (kept alive) -> done        its records are stored
                                  -> retry       an engine went away; or the worker drains
                                  -> tombstone   unreadable; then done
                                  -> done        it has ended meanwhile, say because it expired: the work is cut short
```
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from streamrl.bus.protocol import Bus, Lease
from streamrl.errors import BusError, EngineError, SchemaError
from streamrl.producers.protocol import Claim
from streamrl.producers.publishing import Publisher
from streamrl.runtime.retries import pause_s
from streamrl.schemas.codec import decode
from streamrl.schemas.control import Grant
from streamrl.schemas.subjects import KEY_GRANTED, TASKS
from streamrl.schemas.tasks import Refused, RolloutTask

logger = logging.getLogger(__name__)

GRACE_S = 1.0
"""How long a drain lets open tasks finish before they are given back."""
_ENDED_AFTER_S = 1.0
"""A task that has ended is left so much time to be taken off the queue by the work that ended it."""
_CLAIM_WAIT_S = 0.5
_GIVE_BACK_S = 2.0
_RETRY_FIRST_S = 0.5
_RETRY_MAX_S = 30.0


@dataclass(slots=True, eq=False)
class _Claim:
    """A task in hand."""

    lease: Lease
    task: int
    finished: bool = False
    """Whether its records are stored, or there will be none: it only has to leave the queue."""
    dropped: bool = False
    """Whether its work was cancelled because the task had ended. Once: a second time would cut short how it leaves the queue."""


class Counts:
    """What has happened since the last report."""

    def __init__(self) -> None:
        self.num_done = 0
        self.num_failures = 0
        """Tasks given back, or ended without being tried."""
        self.num_redelivered = 0


class Demand(Protocol):
    """Who has use for tasks, where that is not whoever has a free slot: nothing is claimed for nobody."""

    def wanted(self) -> int:
        """How many tasks more there is use for now."""
        ...

    def claimed(self, task: int) -> None:
        """A task has been claimed."""
        ...

    async def left(self, task: int, ended: bool) -> None:
        """A task has left this worker: it has ended and is off the queue, or is delivered again."""
        ...

    def listen(self, changed: Callable[[], None], first_open: Callable[[], int]) -> None:
        """Call `changed` whenever `wanted` may have risen; `first_open` is the task below which all have ended."""
        ...


class Queue(Protocol):
    """What is claimed, where that is not tasks."""

    stream: str
    follows_ends: bool
    """Whether what belongs to a task that has ended (`Grant.first_open`) is no more worth the work."""

    def task(self, lease: Lease) -> int:
        """Index of the task that a message is about; asked once, first."""
        ...

    async def read(self, lease: Lease) -> Any | None:
        """What `work` gets; None: it cannot be read, and leaves the queue."""
        ...


class Tasks:
    """The queue of tasks. One that cannot be read ends with a tombstone."""

    stream = TASKS
    follows_ends = True

    def __init__(self, source: str, publisher: Publisher) -> None:
        self._source = source
        self._publisher = publisher

    def task(self, lease: Lease) -> int:
        """Index of a task: its place on the stream."""
        return lease.sequence - 1

    async def read(self, lease: Lease) -> RolloutTask | None:
        """The task, or None after a tombstone was stored in its place: it cannot be read, or its row cannot be used."""
        index = self.task(lease)
        try:
            task = decode(lease.body, RolloutTask, where=f"task {index}")
            if task.index != index:
                raise SchemaError(f"expected task {index} at sequence {lease.sequence} of the task stream, got task {task.index}")
        except SchemaError as error:
            logger.error("event=task_unreadable source=%s task=%d error=%s", self._source, index, error.message)
            await self._publisher.end_task(index, self._source, "poison", error.message)
            return None
        if isinstance(task.refused, Refused):
            claim = Claim(lease.deliveries, lease.stored_s, time.time())
            reason, detail = task.refused.reason, task.refused.detail
            await self._publisher.end_task(index, task.source, reason, detail, group_size=task.num_rollouts, claim=claim)
            return None
        return task


class Claims:
    """Keeps up to `concurrency` tasks of `source` in flight and hands each to `work`.

    `work` gets a task and its claim; it returns once every record of the task is stored. It may raise EngineError (the task is given back
    with a growing delay) and be cancelled; any other error ends `run`, and with it the process: its leases lapse and others get the tasks.

    `let_go` gets a task's index and whether the task has ended, before it leaves the queue or is given back: also of tasks that had ended
    before they came, and of those whose work was cancelled for it.

    With `demand` it claims no more than there is use for. With `queue` it claims the messages of another one, and `work` gets what that
    reads.
    """

    def __init__(
        self,
        bus: Bus,
        publisher: Publisher,
        source: str,
        work: Callable[[Any, Claim], Awaitable[None]],
        *,
        concurrency: int,
        ack_wait_s: float,
        grace_s: float = GRACE_S,
        let_go: Callable[[int, bool], Awaitable[None]] | None = None,
        demand: Demand | None = None,
        queue: Queue | None = None,
    ) -> None:
        self.source = source
        self._queue = queue or Tasks(source, publisher)
        self.num_done = 0
        """Tasks taken off the queue."""
        self._counts = Counts()
        self._bus = bus
        self._work = work
        self._concurrency = concurrency
        self._keep_every_s = ack_wait_s / 3
        self._grace_s = grace_s
        self._let_go = let_go
        self._open: dict[asyncio.Task[None], _Claim] = {}
        self._wake = asyncio.Event()
        self._first_open = 0
        """Tasks below it have ended."""
        self._demand = demand
        if demand is not None:
            demand.listen(self._wake.set, lambda: self._first_open)

    def take_counts(self) -> Counts:
        """What has happened since the last call."""
        counts, self._counts = self._counts, Counts()
        return counts

    @property
    def num_open(self) -> int:
        """Tasks in flight."""
        return len(self._open)

    @property
    def open_tasks(self) -> list[int]:
        """Their indices."""
        return sorted(claim.task for claim in self._open.values())

    async def run(self, draining: asyncio.Event) -> None:
        """Claim and work until `draining`, then finish or give back what is open. Raises what `work` raised, other than EngineError."""
        async with asyncio.TaskGroup() as group:
            keeper = group.create_task(self._keep())
            waker = group.create_task(self._wake_when(draining))
            follower = group.create_task(self._follow_ends()) if self._queue.follows_ends else keeper
            while not draining.is_set():
                self._wake.clear()
                free = self._concurrency - len(self._open)
                if self._demand is not None:
                    free = min(free, self._demand.wanted())
                if free <= 0:
                    await self._wake.wait()
                    continue
                # Not cancelled by a drain: a lease that arrives after its claim was cut would lie idle for the whole ack wait.
                for lease in await self._bus.claim(self.source, max=free, wait_s=_CLAIM_WAIT_S, stream=self._queue.stream):
                    claim = _Claim(lease, self._queue.task(lease))
                    if self._demand is not None:
                        self._demand.claimed(claim.task)
                    task = group.create_task(self._hold(claim))
                    self._open[task] = claim
                    task.add_done_callback(self._closed)
            await self._drain()
            keeper.cancel()
            waker.cancel()
            follower.cancel()

    def drop_below(self, first_open: int) -> None:
        """Give up what is claimed of the tasks below `first_open`, which have ended: their work is cancelled, they leave the queue.

        Whatever is claimed of them later leaves the queue at once.
        """
        self._first_open = max(self._first_open, first_open)
        for work, claim in self._open.items():
            if self._has_ended(claim) and not claim.finished and not claim.dropped:
                claim.dropped = work.cancel()
                logger.info("event=claim_dropped source=%s task=%d reason=ended", self.source, claim.task)

    def _closed(self, task: asyncio.Task[None]) -> None:
        self._open.pop(task, None)
        self._wake.set()

    async def _wake_when(self, draining: asyncio.Event) -> None:
        await draining.wait()
        self._wake.set()

    async def _follow_ends(self) -> None:
        """Hear from the grants which tasks have ended."""
        loop = asyncio.get_running_loop()
        async for entry in self._bus.kv.watch_key(KEY_GRANTED):
            if entry.value is None:
                continue
            try:
                first_open = decode(entry.value, Grant, where=f"key {KEY_GRANTED}").first_open
            except SchemaError as error:
                logger.warning("event=grant_unreadable error=%s", error.message)
                continue
            if isinstance(first_open, int):
                loop.call_later(_ENDED_AFTER_S, self.drop_below, first_open)

    def _has_ended(self, claim: _Claim) -> bool:
        return self._queue.follows_ends and claim.task < self._first_open

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._keep_every_s)
            for claim in list(self._open.values()):
                try:
                    await claim.lease.keep()
                except BusError as error:
                    # The next round tries again; a lease that lapses meanwhile costs a second rollout, which is dropped as a duplicate.
                    logger.warning("event=keep_failed source=%s sequence=%d error=%s", self.source, claim.lease.sequence, error.message)

    async def _drain(self) -> None:
        if self._open:
            await asyncio.wait(self._open, timeout=self._grace_s)
        left = dict(self._open)
        for task, claim in left.items():
            if not claim.dropped:
                task.cancel()
        if left:
            await asyncio.wait(left)
        logger.info("event=drained source=%s given_back=%d", self.source, len(left))

    async def _hold(self, claim: _Claim) -> None:
        lease = claim.lease
        try:
            if not self._has_ended(claim):
                self._counts.num_redelivered += lease.deliveries > 1
                if (item := await self._queue.read(lease)) is not None:
                    await self._work(item, Claim(lease.deliveries, lease.stored_s, time.time()))
                else:
                    self._counts.num_failures += 1
            claim.finished = True
            await self._leave(claim, ended=True)
            self.num_done += 1
            self._counts.num_done += 1
        except EngineError as error:
            delay_s = pause_s(lease.deliveries, first_s=_RETRY_FIRST_S, most_s=_RETRY_MAX_S)
            self._counts.num_failures += 1
            logger.warning("event=task_given_back source=%s task=%d delay_s=%.1f error=%s", self.source, claim.task, delay_s, error.message)
            await self._leave(claim, ended=False, delay_s=delay_s)
        except asyncio.CancelledError:
            # Once its records are stored a task is not asked for again: if `done` did not get through, the ack wait settles it.
            if not claim.finished:
                with contextlib.suppress(BusError, TimeoutError):
                    await asyncio.wait_for(self._leave(claim, ended=self._has_ended(claim)), _GIVE_BACK_S)
            raise

    async def _leave(self, claim: _Claim, *, ended: bool, delay_s: float = 0.0) -> None:
        """Take a task that has ended off the queue, or give it back."""
        if self._let_go is not None:
            await self._let_go(claim.task, ended)
        await (claim.lease.done() if ended else claim.lease.retry(delay_s))
        if self._demand is not None:
            # After: what is left of a task that has ended must not be gone while it can still be delivered again.
            await self._demand.left(claim.task, ended)
