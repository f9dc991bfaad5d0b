"""Where the calls of graders run: processes that are started as they are needed, seats in them, and slots for calls that hang."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from streamrl.errors import StreamRLError
from streamrl.producers.children.calls import Limits
from streamrl.producers.children.child import Child
from streamrl.producers.children.crew import CORES, Crew, default_count
from streamrl.producers.children.frames import Hello

_TICK_S = 0.1
_DOUBTED = 8
"""Calls that hang and are waited for, as no other has been slow enough lately: they have slots, too, beside the `max_hung`, so that they
keep no seats."""


class Seat:
    """A call's place in a process."""

    def __init__(self, child: Child, *, alone: bool = False) -> None:
        self.child = child
        self.alone = alone
        """It has a process that is nobody else's."""


class Seats:
    """The processes of a reward and who has a place in them.

    Args:
        hello: what they load.
        limits: of their start and of their calls.
        children: processes; 0: one a core, at most four.
        concurrency: calls of async functions at once.
        max_hung: slots for calls that hang.
        ends_s: that a call may take to end once it is told to, while more than `max_hung` do.
        looked: called ten times a second, after a look at all processes.
        waits: called when calls wait for seats.
    """

    def __init__(
        self,
        hello: Hello,
        limits: Limits,
        *,
        children: int,
        concurrency: int,
        max_hung: int,
        ends_s: float,
        looked: Callable[[], None],
        waits: Callable[[], None],
    ) -> None:
        self.crew = Crew(hello, limits, tick_s=_TICK_S, looked=looked)
        self.plain = self.by_episode = False
        """Whether the reward is a plain function, and whether it has a call for each episode; known once a process has started."""
        self._count = children or default_count()
        self._concurrency = concurrency
        self._max_hung = max_hung
        self._ends_s = ends_s
        self._waits = waits
        self._shared: list[Child] = []
        self._waiting: deque[asyncio.Future[Seat]] = deque()
        self._num_seated = 0
        self._in_slots: set[Seat] = set()
        """Of calls that hang."""
        self._starting: set[asyncio.Task[None]] = set()
        self._alone = asyncio.Semaphore(self._count)

    @property
    def number(self) -> int:
        """Calls that run at once, those that hang left out."""
        return self._count if self.plain else self._concurrency

    @property
    def _room(self) -> int:
        """Calls that one process takes."""
        return 1 if self.plain else math.ceil(self._concurrency / self._count)

    async def start(self) -> None:
        """Start a process, unless there is one; raises ConfigError when the user's code cannot be loaded."""
        if not self.crew.all:
            await self._add()

    async def close(self) -> None:
        """End all of them."""
        for starting in self._starting:
            starting.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        await self.crew.close()
        self._shared.clear()

    @asynccontextmanager
    async def seat(self, *, alone: bool) -> AsyncGenerator[Seat]:
        """A place for a call.

        Raises:
            ConfigError: the user's code can no longer be loaded.
            LaunchError: no process can be started.
        """
        if alone:
            async with self._alone:
                child = await self.crew.add(alone=True)
                try:
                    yield Seat(child, alone=True)
                finally:
                    self.crew.bury(child)
            return
        waiting: asyncio.Future[Seat] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        self.serve()
        try:
            seat = await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                self._leave(waiting.result())
            raise
        try:
            yield seat
        finally:
            self._leave(seat)

    def serve(self) -> None:
        """Give seats to those who have waited longest, and start processes for the others."""
        self._bury_useless()
        while self._waiting and self._num_seated < self.number and (child := self._free()) is not None:
            waiting = self._waiting.popleft()
            if not waiting.done():
                child.num_jobs += 1
                self._num_seated += 1
                waiting.set_result(Seat(child))
        if not self._waiting:
            return
        self._waits()
        if (failure := self.crew.failure) is None:
            if self._num_seated < self.number:
                self._start_for_those_who_wait()
        elif not self._shared:
            while self._waiting:
                if not (waiting := self._waiting.popleft()).done():
                    waiting.set_exception(failure)

    def _start_for_those_who_wait(self) -> None:
        stuck = self._stuck() if self.plain else set[Child]()
        usable = sum(child not in stuck for child in self._shared)
        missing = min(self._count - usable, len(self._waiting), CORES) - len(self._starting)
        for _ in range(missing):
            starting = asyncio.ensure_future(self._grow())
            self._starting.add(starting)
            starting.add_done_callback(self._started)

    def _stuck(self) -> set[Child]:
        """Processes of plain functions that only run what hangs, or what has been told to end and has not yet."""
        return {seat.child for seat in self._in_slots} | {child for child in self._shared if child.num_leaving}

    def _free(self) -> Child | None:
        found = [child for child in self._shared if child.num_jobs < self._room and not (self.plain and child.num_leaving)]
        return min(found, key=lambda child: child.num_jobs, default=None)

    def _leave(self, seat: Seat) -> None:
        if seat in self._in_slots:
            self._in_slots.remove(seat)
            if self.plain:
                seat.child.num_jobs -= 1
        else:
            self._num_seated -= 1
            seat.child.num_jobs -= 1
        self.serve()

    def keeps_others_out(self, seat: Seat) -> bool:
        """Whether its call counts among those that run: those in slots, and those alone in their process, do not."""
        return not (seat.alone or seat in self._in_slots)

    def move_to_slot(self, seat: Seat) -> bool:
        """A call that hangs counts no longer among those that run, and its process neither, if it runs nothing else.

        False: no slot is free.
        """
        if not self.keeps_others_out(seat):
            return True
        used = len(self._stuck()) if self.plain else len(self._in_slots)
        if used >= self._max_hung + _DOUBTED:
            return False
        self._in_slots.add(seat)
        self._num_seated -= 1
        if not self.plain:
            seat.child.num_jobs -= 1
        return True

    def kill_deaf(self) -> None:
        """Of the processes of plain functions whose call was told to end and goes on, leave no more than may hang."""
        deaf = [child for child in self._shared if self.plain and child.leaving_s > self._ends_s]
        for child in deaf[: max(0, len(deaf) - self._max_hung)]:
            child.kill(f"a call did not end within {self._ends_s:g} s, and too many of them hang")

    def _bury_useless(self) -> None:
        for child in [child for child in self._shared if child.lost or (child.worn and not child.num_jobs and not child.num_leaving)]:
            self._shared.remove(child)
            self.crew.bury(child)

    async def _grow(self) -> None:
        try:
            await self._add()
        except StreamRLError as error:  # told to those who wait, once no process is left
            self.crew.failure = error

    def _started(self, starting: asyncio.Task[None]) -> None:
        self._starting.discard(starting)
        if not starting.cancelled():
            self.serve()

    async def _add(self) -> None:
        child = await self.crew.add(alone=False)
        ready = await child.started()
        self.plain, self.by_episode = ready.plain, ready.by_episode
        self._shared.append(child)
