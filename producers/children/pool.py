"""The children of a worker: seats for tasks in those that roll out, and beside them the graders (`graders.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from msgspec.structs import replace

from streamrl.errors import StreamRLError
from streamrl.producers.children.calls import Limits
from streamrl.producers.children.child import TICK_S, Child
from streamrl.producers.children.crew import Crew
from streamrl.producers.children.frames import Hello
from streamrl.producers.children.graders import Graders, Scoring


class Children:
    """Starts children as they are needed.

    A producer and a reward have processes of their own: a grader that blocks or dies holds up no rollout.

    Args:
        hello: what they load.
        limits: of their start and of a producer's calls.
        count: children that tasks share; as many again may run suspects, one task each.
        scoring: how the reward is run, where there is one.
    """

    def __init__(self, hello: Hello, limits: Limits, *, count: int, scoring: Scoring | None = None) -> None:
        self.limits = limits
        self.by_rollout = True
        """Whether the producer is called once per rollout; known once a child has started."""
        self.graders = Graders(replace(hello, function=""), scoring or Scoring()) if hello.reward else None
        """Run the reward; None: there is none here."""
        self._has_producer = bool(hello.function)
        self._crew = Crew(replace(hello, reward=""), limits, tick_s=TICK_S, looked=self._looked)
        self._count = count
        self._shared: list[Child] = []
        self._rooms = asyncio.Semaphore(count)
        self._growing: asyncio.Future[None] | None = None

    @property
    def notice(self) -> str:
        """What people should know of user code now; empty: nothing."""
        return self._crew.notice or (self.graders.notice if self.graders is not None else "")

    def hung_s(self) -> list[float]:
        """Of each task whose rollouts hang: how long its user code has asked no engine."""
        return [seconds for child in self._crew.all for seconds in child.hung_s().values()]

    async def start(self) -> None:
        """Start the first child of each kind; raises ConfigError when the user's code cannot be loaded."""
        if self._has_producer:
            await self._add(alone=False)
        if self.graders is not None:
            await self.graders.start()

    async def close(self) -> None:
        """End all of them."""
        if self._growing is not None:
            self._growing.cancel()
            await asyncio.gather(self._growing, return_exceptions=True)
        await self._crew.close()
        self._shared.clear()
        if self.graders is not None:
            await self.graders.close()

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
            failure = self._crew.failure
            if failure is not None and not alive:
                raise failure
            busy = all(child.num_jobs for child in alive)
            if busy and len(alive) < self._count and self._growing is None and failure is None:
                # Meanwhile tasks share what is there.
                self._growing = asyncio.ensure_future(self._grow())
            if alive:
                return min(alive, key=lambda child: child.num_jobs)
            await asyncio.shield(self._growing or asyncio.sleep(0))

    async def _grow(self) -> None:
        try:
            await self._add(alone=False)
        except StreamRLError as error:  # told to whoever wants a seat next
            self._crew.failure = error
        finally:
            self._growing = None

    async def _add(self, *, alone: bool) -> Child:
        child = await self._crew.add(alone=alone)
        self.by_rollout = (await child.started()).by_rollout
        if not alone:
            self._shared.append(child)
        return child

    def _bury(self, child: Child) -> None:
        if child in self._shared:
            self._shared.remove(child)
        self._crew.bury(child)

    def _looked(self) -> None:
        for child in list(self._shared):
            if child.lost and not child.num_jobs:
                self._bury(child)  # nobody has a seat in it who would
