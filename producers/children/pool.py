"""The children of a worker: seats for tasks in them, one clock over all of them, new ones in place of those that died."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from streamrl.errors import StreamRLError
from streamrl.producers.children.calls import Limits
from streamrl.producers.children.child import TICK_S, Child
from streamrl.producers.children.frames import Hello

logger = logging.getLogger(__name__)

_MOST = 4


def default_count() -> int:
    """Children of a worker whose configuration leaves it open: one a core, at most four."""
    return min(_MOST, os.cpu_count() or 1)


class Children:
    """Starts children as they are needed.

    Args:
        hello: what each of them loads.
        limits: of their start and of a producer's calls.
        score_s: of a reward's call.
        count: children that tasks share; as many again may run suspects, one task each.
    """

    def __init__(self, hello: Hello, limits: Limits, *, score_s: float, count: int) -> None:
        self.hello = hello
        self.limits = limits
        self.score_limits = Limits(idle_s=score_s, total_s=score_s)
        self.by_rollout = True
        """Whether the producer is called once per rollout; known once a child has started."""
        self._count = count
        self._shared: list[Child] = []
        self._all: list[Child] = []
        self._rooms = asyncio.Semaphore(count)
        self._numbers = itertools.count()
        self._growing: asyncio.Future[None] | None = None
        self._failure: BaseException | None = None
        self._clock: asyncio.Task[None] | None = None
        self._burials: set[asyncio.Task[None]] = set()

    @property
    def notice(self) -> str:
        """What people should know of user code now; empty: nothing."""
        return next((child.notice for child in self._all if child.notice), "")

    def hung_s(self) -> list[float]:
        """Of each task that hangs: how long its user code has asked no engine."""
        return [seconds for child in self._all for seconds in child.hung_s().values()]

    async def start(self) -> None:
        """Start the first child; raises ConfigError when the user's code cannot be loaded."""
        await self._add(alone=False)

    async def close(self) -> None:
        """End all of them."""
        if self._growing is not None:
            self._growing.cancel()
            await asyncio.gather(self._growing, return_exceptions=True)
        await asyncio.gather(*(child.close() for child in self._all), *self._burials)
        self._all.clear()
        self._shared.clear()
        if self._clock is not None:
            self._clock.cancel()

    @asynccontextmanager
    async def seat(self, *, alone: bool) -> AsyncGenerator[Child]:
        """A child for a task, shared with others or for this one alone; to be left as soon as it is lost.

        Raises:
            ConfigError: the user's code cannot be loaded.
            LaunchError: no process can be started.
        """
        if alone:
            async with self._rooms:
                child = await self._add(alone=True)
                try:
                    yield child
                finally:
                    self._bury(child)
            return
        child = await self._least_loaded()
        child.num_jobs += 1
        try:
            yield child
        finally:
            child.num_jobs -= 1
            if child.lost:
                self._bury(child)

    async def _least_loaded(self) -> Child:
        while True:
            alive = [child for child in self._shared if not child.lost]
            if self._failure is not None and not alive:
                raise self._failure
            busy = all(child.num_jobs for child in alive)
            if busy and len(alive) < self._count and self._growing is None and self._failure is None:
                # Meanwhile tasks share what is there.
                self._growing = asyncio.ensure_future(self._grow())
            if alive:
                return min(alive, key=lambda child: child.num_jobs)
            await asyncio.shield(self._growing or asyncio.sleep(0))

    async def _grow(self) -> None:
        try:
            await self._add(alone=False)
        except StreamRLError as error:  # told to whoever wants a seat next
            self._failure = error
        finally:
            self._growing = None

    async def _add(self, *, alone: bool) -> Child:
        if self._clock is None or self._clock.done():
            self._clock = asyncio.create_task(self._tick())
            self._clock.add_done_callback(self._stopped)
        child = Child(next(self._numbers), self.hello, self.limits, alone=alone)
        self._all.append(child)
        try:
            self.by_rollout = (await child.started()).by_rollout
        except BaseException:
            self._bury(child)
            raise
        logger.info("event=child_started child=%d alone=%s", child.number, alone)
        if not alone:
            self._shared.append(child)
        return child

    def _bury(self, child: Child) -> None:
        """End it and free what it had, without waiting for that."""
        if child in self._all:
            self._all.remove(child)
            if child in self._shared:
                self._shared.remove(child)
            burial = asyncio.ensure_future(child.close())
            self._burials.add(burial)
            burial.add_done_callback(self._burials.discard)

    def _stopped(self, clock: asyncio.Task[None]) -> None:
        """Without a clock nothing is limited, so an error in it ends everything."""
        if not clock.cancelled() and (error := clock.exception()) is not None:
            self._failure = error
            for child in list(self._all):
                child.kill(f"the watch ended: {error!r}")

    async def _tick(self) -> None:
        before = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            # What lies beyond is time in which this process stood still itself.
            seconds, before = min(now - before, 2 * TICK_S), now
            for child in list(self._all):
                child.tick(seconds)
                if child.lost and not child.num_jobs and child in self._shared:
                    self._bury(child)  # nobody has a seat in it who would
