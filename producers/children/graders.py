"""The run's reward in processes of its own: a call that hangs, or kills its process, costs its own rollout and nobody else's.

```text
plain function (def)      one call at a time in a process, in its main thread, so that a signal can end it and a death has one to blame
async function            many calls in the event loop of a process
class with async score    the same, with all episodes of a group in one call
hangs (`hung.py`)         its seat goes to another call; it stays in a slot for hung ones until its time is up, or until they are too many
over its limit            interrupted, then its process is killed; its rollouts end as `timeout`
process lost              whoever may have done it runs alone in a new one; who dies there again has failed
```
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import msgspec

from streamrl.config.tree import RewardConfig
from streamrl.errors import SchemaError, StreamRLError
from streamrl.producers.children import frames
from streamrl.producers.children.calls import Call, Limits
from streamrl.producers.children.child import Child
from streamrl.producers.children.crew import Crew
from streamrl.producers.children.hung import Patience, Running
from streamrl.producers.episode import Episode, bare
from streamrl.producers.protocol import Failure
from streamrl.rewards.protocol import RewardValue
from streamrl.schemas.tasks import RolloutTask

logger = logging.getLogger(__name__)

_TICK_S = 0.1
_HURRY_S = 0.005
"""Between two looks at what hangs while something does, or calls wait for seats: what hangs holds its seat until it is seen."""
_DOUBTED = 8
"""Calls that hang and may neither be left until their time is up nor be ended yet, as no other has been slow enough lately: they have
slots, too, beside those of `Scoring.max_hung`, so that they keep no seats."""
_SAID_S = 0.1
"""A call that hangs for less than that is nothing that people should hear of."""
_MOST = 4
_LOSSES = 2
"""Processes that a call may lose without being suspected."""
_TRIES = 8
"""Processes that a call may have in all."""


class Scoring(msgspec.Struct, frozen=True):
    """How a reward is run: `[reward]` of the configuration."""

    timeout_s: float = 10.0
    children: int = 0
    """Processes; 0: one a core, at most four."""
    concurrency: int = 64
    max_hung: int = 2

    @classmethod
    def of(cls, config: RewardConfig) -> Scoring:
        """As a run is configured."""
        return cls(config.timeout_s, config.children, config.concurrency, config.max_hung)


class Hung(msgspec.Struct, frozen=True):
    """What hangs among the calls of a reward."""

    calls: int = 0
    longest_s: float = 0.0
    ended_early: int = 0
    """Calls that were ended before their time since this was asked last, as too many hung."""


class _Seat:
    """A call's place in a process."""

    def __init__(self, child: Child, *, alone: bool = False) -> None:
        self.child = child
        self.alone = alone
        """It has a process that is nobody else's."""
        self.in_slot = False
        """It hangs, in a slot of those that do."""


class Graders:
    """Runs a reward's calls. Processes are started as they are needed.

    Args:
        hello: what they load.
        scoring: limits and how many.
    """

    def __init__(self, hello: frames.Hello, scoring: Scoring) -> None:
        self._timeout_s = scoring.timeout_s
        self._count = scoring.children or min(_MOST, os.cpu_count() or 1)
        self._concurrency = scoring.concurrency
        self._max_hung = scoring.max_hung
        self._limits = Limits(idle_s=math.inf, total_s=scoring.timeout_s)
        self._crew = Crew(hello, self._limits, tick_s=_TICK_S, looked=self._looked)
        self._plain = self._by_episode = False
        self._patience = Patience(scoring.timeout_s, most=scoring.max_hung, seats=self.seats)
        self._shared: list[Child] = []
        self._waiting: deque[asyncio.Future[_Seat]] = deque()
        self._num_seated = 0
        self._starting: set[asyncio.Task[None]] = set()
        self._alone = asyncio.Semaphore(self._count)
        self._running: dict[Call, tuple[_Seat, Running]] = {}
        self._num_ended_early = 0
        self._hurry: asyncio.TimerHandle | None = None

    @property
    def seats(self) -> int:
        """Calls that run at once, those that hang left out; known once a process has started."""
        return self._count if self._plain else self._concurrency

    @property
    def _room(self) -> int:
        """Calls that one process takes."""
        return 1 if self._plain else math.ceil(self._concurrency / self._count)

    @property
    def notice(self) -> str:
        """What people should know of user code now; empty: nothing."""
        return self._crew.notice

    @property
    def pids(self) -> list[int]:
        """Of its processes."""
        return [child.pid for child in self._crew.all]

    def take_hung(self) -> Hung:
        """What hangs now."""
        hung_s = [running.spent_s for _, running in self._running.values() if running.spent_s > _SAID_S and self._patience.hangs(running)]
        ended, self._num_ended_early = self._num_ended_early, 0
        return Hung(len(hung_s), max(hung_s, default=0.0), ended)

    async def start(self) -> None:
        """Start the first process; raises ConfigError when the user's code cannot be loaded."""
        await self._add()

    async def close(self) -> None:
        """End all of them."""
        if self._hurry is not None:
            self._hurry.cancel()
        for starting in self._starting:
            starting.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        await self._crew.close()
        self._shared.clear()

    async def score(
        self, task: RolloutTask, episodes: Sequence[Episode], *, max_deaths: int = 1
    ) -> Sequence[RewardValue | Exception] | Failure:
        """One value for each episode, or why it has none (a TimeoutError: the call was over its limit), or what ends all of them.

        Raises:
            ConfigError: the user's code can no longer be loaded.

        Args:
            task: of the episodes.
            episodes: of one group.
            max_deaths: processes that a call may lose to SIGKILL, alone in them; other deaths it has one of.
        """
        if not self._crew.all:
            await self.start()
        bared = [msgspec.structs.replace(episode, segments=bare(episode.segments)) for episode in episodes]
        if self._by_episode:
            calls = [asyncio.ensure_future(self._one(task, (episode,), max_deaths)) for episode in bared]
            try:
                return [_only(given) for given in await asyncio.gather(*calls)]
            finally:
                for call in calls:
                    call.cancel()
        given = await self._one(task, tuple(bared), max_deaths)
        if isinstance(given, Exception):
            reason = "timeout" if isinstance(given, TimeoutError) else "failed"
            return Failure(0, reason, f"reward: {given}")
        return Failure(0, "failed", f"reward: {given.error}") if given.error else [_value(one) for one in given.values]

    async def _one(self, task: RolloutTask, episodes: tuple[Episode, ...], max_deaths: int) -> frames.Scored | Exception:
        """What one call gave."""
        alone, losses, deaths, why = False, 0, 0, ""
        for _ in range(_TRIES + max_deaths):
            async with self._seat(alone=alone) as seat:
                child = seat.child
                call = child.begin(
                    lambda number, child=child: Call(number, self._limits, task=task.index, engine=None, send=child.send),
                    lambda call: frames.Score(call.number, task, episodes),
                )
                running = Running(self._patience.num_ended, began_s=time.monotonic())
                self._running[call] = seat, running
                try:
                    given = await child.wait(call)
                finally:
                    del self._running[call]
            if given == Call.TIMEOUT:
                return TimeoutError(call.expired)
            if isinstance(given, frames.Scored):
                running.look(time.monotonic(), call.spent_s)
                self._patience.ended(running)
                return given
            why = child.lost
            if not alone:
                losses += 1
                # Somebody's hand says nothing of those that ran; what ends the process itself does, and they are tried one by one.
                alone = losses >= _LOSSES or (call.suspect and child.exit_code != -signal.SIGKILL)
            elif not child.killed:
                deaths += 1
                logger.warning("event=grader_died task=%d times=%d reason=%r", task.index, deaths, why)
                # What kills with SIGKILL may be the kernel, out of memory, or somebody's hand; every other death is the code's own.
                if child.exit_code != -signal.SIGKILL or deaths >= max_deaths:
                    break
        return SchemaError(f"the process that graded it alone died: {why}")

    # Seats

    @asynccontextmanager
    async def _seat(self, *, alone: bool) -> AsyncGenerator[_Seat]:
        if alone:
            async with self._alone:
                child = await self._crew.add(alone=True)
                try:
                    yield _Seat(child, alone=True)
                finally:
                    self._crew.bury(child)
            return
        waiting: asyncio.Future[_Seat] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        self._serve()
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

    def _serve(self) -> None:
        """Give seats to those who have waited longest, and start processes for the others."""
        self._bury_useless()
        # Of plain ones, a process that was started in place of one that hung runs some too once that is over.
        while self._waiting and (self._plain or self._num_seated < self.seats) and (child := self._free()) is not None:
            waiting = self._waiting.popleft()
            if not waiting.done():
                child.num_jobs += 1
                self._num_seated += 1
                waiting.set_result(_Seat(child))
        if not self._waiting:
            return
        self._look_soon()
        if (failure := self._crew.failure) is None:
            missing = min(self._count - len(self._usable()), len(self._waiting), os.cpu_count() or 1) - len(self._starting)
            for _ in range(missing if self._plain or self._num_seated < self.seats else 0):
                starting = asyncio.ensure_future(self._grow())
                self._starting.add(starting)
                starting.add_done_callback(self._started)
        elif not self._shared:
            while self._waiting:
                if not (waiting := self._waiting.popleft()).done():
                    waiting.set_exception(failure)

    def _usable(self) -> list[Child]:
        """Processes that take calls, now or once others have ended: not those that only run what hangs."""
        stuck = {seat.child for seat, _ in self._running.values() if seat.in_slot} if self._plain else set[Child]()
        return [child for child in self._shared if child not in stuck and not (self._plain and child.num_leaving)]

    def _free(self) -> Child | None:
        found = [child for child in self._usable() if child.num_jobs < self._room]
        return min(found, key=lambda child: child.num_jobs, default=None)

    def _leave(self, seat: _Seat) -> None:
        if not seat.in_slot:
            self._num_seated -= 1
        if not seat.in_slot or self._plain:
            seat.child.num_jobs -= 1
        self._serve()

    def _move_to_slot(self, seat: _Seat) -> None:
        """A call that hangs no longer counts among those that run; its process, if it runs nothing else, neither."""
        seat.in_slot = True
        self._num_seated -= 1
        if not self._plain:
            seat.child.num_jobs -= 1

    def _bury_useless(self) -> None:
        for child in [child for child in self._shared if child.lost or (child.worn and not child.num_jobs and not child.num_leaving)]:
            self._shared.remove(child)
            self._crew.bury(child)

    async def _grow(self) -> None:
        try:
            await self._add()
        except StreamRLError as error:  # told to those who wait, once no process is left
            self._crew.failure = error

    def _started(self, starting: asyncio.Task[None]) -> None:
        self._starting.discard(starting)
        if not starting.cancelled():
            self._serve()

    async def _add(self) -> None:
        child = await self._crew.add(alone=False)
        ready = await child.started()
        if (ready.plain, ready.by_episode) != (self._plain, self._by_episode):
            self._plain, self._by_episode = ready.plain, ready.by_episode
            self._patience = Patience(self._timeout_s, most=self._max_hung, seats=self.seats)
        self._shared.append(child)

    # What hangs

    def _looked(self, seconds: float) -> None:
        now_s = time.monotonic()
        calls = {call: running for call, (_, running) in self._running.items()}
        for call, running in calls.items():
            running.look(now_s, call.spent_s)
        for call in self._patience.too_many(calls):
            self._num_ended_early += 1
            child = self._running[call][0].child
            child.give_up(call, f"it hung for {calls[call].spent_s:.2f} s while others did too (reward.max_hung = {self._max_hung})")
            calls.pop(call)
        in_slots = sum(seat.in_slot for seat, _ in self._running.values())
        hung = sorted((call for call, running in calls.items() if self._patience.hangs(running)), key=lambda call: -calls[call].spent_s)
        movable = [seat for seat in (self._running[call][0] for call in hung) if not (seat.in_slot or seat.alone)]
        for seat in movable[: max(0, self._max_hung + _DOUBTED - in_slots)]:
            self._move_to_slot(seat)
        # Those that do not end when they are told to have processes beside all others: no more than hung ones may.
        stuck = [child for child in self._shared if self._plain and child.num_leaving]
        for child in stuck[: max(0, len(stuck) - self._max_hung)]:
            child.kill("a call did not end at once, and too many of them hang")
        self._serve()
        if hung:
            self._look_soon()

    def _look_soon(self) -> None:
        """Look again before the watch does, once."""
        if self._hurry is None:
            self._hurry = asyncio.get_running_loop().call_later(_HURRY_S, self._look_again)

    def _look_again(self) -> None:
        self._hurry = None
        self._looked(0.0)


def _only(given: frames.Scored | Exception) -> RewardValue | Exception:
    """The value of a call with one episode."""
    if isinstance(given, Exception):
        return given
    return SchemaError(given.error) if given.error else _value(given.values[0])


def _value(given: frames.Value) -> RewardValue | Exception:
    return SchemaError(given.error) if given.error else RewardValue(given.value, given.parts)
