"""The run's reward in processes of its own: a call that hangs, or kills its process, costs its own rollout and nobody else's.

```text
plain function (def)      one call at a time in a process, in its main thread, so that a signal can end it and a death has one to blame
async function            many calls in the event loop of a process
class with async score    the same, with all episodes of a group in one call
hangs (`hung.py`)         its seat goes to another call; it stays in a slot for hung ones until its time is up
too many hang             nobody waits for them any more: they end, but for `max_hung` witnesses, which show whether it ends after all
over its limit            interrupted, then its process is killed; its rollouts end as `timeout`
process lost              whoever may have done it runs alone in a new one; who dies there again has failed
```
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from streamrl.config.tree import RewardConfig
from streamrl.errors import SchemaError
from streamrl.producers.children import frames
from streamrl.producers.children.calls import Call, Limits
from streamrl.producers.children.child import Child
from streamrl.producers.children.hung import Patience, Running
from streamrl.producers.children.seats import Seat, Seats
from streamrl.producers.episode import Episode, bare
from streamrl.producers.protocol import Failure
from streamrl.rewards.protocol import RewardValue
from streamrl.schemas.tasks import RolloutTask

logger = logging.getLogger(__name__)

_HURRY_S = 0.005
"""At least, between two looks at what hangs."""
_SAID_S = 0.1
"""A call that hangs for less than that is nothing that people should hear of."""
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
    answer_s: float = 5.0
    """A call may take so long to end once it is told to, over its limit, before its process is killed."""
    ends_s: float = 0.5
    """The same while more than `max_hung` hang: one that has to wait for a core needs some of it, and
    a process takes as much of a core to start."""

    @classmethod
    def of(cls, config: RewardConfig) -> Scoring:
        """As a run is configured."""
        return cls(config.timeout_s, config.children, config.concurrency, config.max_hung)


class Hung(msgspec.Struct, frozen=True):
    """What hangs among the calls of a reward."""

    calls: int = 0
    longest_s: float = 0.0
    ended_early: int = 0
    """Calls that were given up before their time since this was asked last, as too many hung."""


_Given = frames.Scored | Exception


class _Runs(NamedTuple):
    """A call that runs."""

    seat: Seat
    time: Running
    answer: asyncio.Future[_Given]
    """What is said of it; once that is done it is a witness, for which nobody waits."""


class Graders:
    """Runs a reward's calls. Processes are started as they are needed.

    Args:
        hello: what they load.
        scoring: limits and how many.
    """

    def __init__(self, hello: frames.Hello, scoring: Scoring) -> None:
        self._max_hung = scoring.max_hung
        self._limits = Limits(idle_s=math.inf, total_s=scoring.timeout_s, answer_s=scoring.answer_s)
        self._seats = Seats(
            hello,
            self._limits,
            children=scoring.children,
            concurrency=scoring.concurrency,
            max_hung=scoring.max_hung,
            ends_s=scoring.ends_s,
            looked=self._looked,
            waits=self._look_at_seats,
        )
        self._patience = Patience(scoring.timeout_s, most=scoring.max_hung)
        self._calls: set[asyncio.Task[_Given]] = set()
        self._running: dict[Call, _Runs] = {}
        self._num_ended_early = 0
        self._hurry: asyncio.TimerHandle | None = None

    @property
    def seats(self) -> int:
        """Calls that run at once, those that hang left out; known once a process has started."""
        return self._seats.number

    @property
    def notice(self) -> str:
        """What people should know of user code now; empty: nothing."""
        return self._seats.crew.notice

    @property
    def processes(self) -> list[Child]:
        """List those that have been started and not buried."""
        return self._seats.crew.all

    @property
    def pids(self) -> list[int]:
        """Of its processes."""
        return [child.pid for child in self.processes]

    def take_hung(self) -> Hung:
        """What hangs now."""
        hung_s = [runs.time.spent_s for runs in self._running.values() if runs.time.spent_s > _SAID_S and self._patience.hangs(runs.time)]
        ended, self._num_ended_early = self._num_ended_early, 0
        return Hung(len(hung_s), max(hung_s, default=0.0), ended)

    async def start(self) -> None:
        """Start the first process; raises ConfigError when the user's code cannot be loaded."""
        await self._seats.start()

    async def close(self) -> None:
        """End all of them."""
        if self._hurry is not None:
            self._hurry.cancel()
        for call, runs in self._running.items():
            if runs.answer.done():
                call.end(None)
        await self._seats.close()

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
        await self.start()
        bared = [msgspec.structs.replace(episode, segments=bare(episode.segments)) for episode in episodes]
        if self._seats.by_episode:
            answers = [self._ask(task, (episode,), max_deaths) for episode in bared]
            try:
                return [_only(given) for given in await asyncio.gather(*answers)]
            finally:
                for answer in answers:
                    answer.cancel()
        given = await self._ask(task, tuple(bared), max_deaths)
        if isinstance(given, Exception):
            reason = "timeout" if isinstance(given, TimeoutError) else "failed"
            return Failure(0, reason, f"reward: {given}")
        return Failure(0, "failed", f"reward: {given.error}") if given.error else [_value(one) for one in given.values]

    def _ask(self, task: RolloutTask, episodes: tuple[Episode, ...], max_deaths: int) -> asyncio.Future[_Given]:
        """What is said of one call: what it gave, or that it hangs, before it has ended."""
        answer: asyncio.Future[_Given] = asyncio.get_running_loop().create_future()
        call = asyncio.ensure_future(self._one(task, episodes, max_deaths, answer))
        self._calls.add(call)
        call.add_done_callback(lambda call: self._called(call, answer))
        answer.add_done_callback(lambda answer: call.cancel() if answer.cancelled() else None)
        return answer

    def _called(self, call: asyncio.Task[_Given], answer: asyncio.Future[_Given]) -> None:
        self._calls.discard(call)
        error = None if call.cancelled() else call.exception()
        if answer.done():
            return
        if call.cancelled():
            answer.cancel()
        elif error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(call.result())

    async def _one(self, task: RolloutTask, episodes: tuple[Episode, ...], max_deaths: int, answer: asyncio.Future[_Given]) -> _Given:
        """What one call gave."""
        alone, losses, deaths, why = False, 0, 0, ""
        for _ in range(_TRIES + max_deaths):
            async with self._seats.seat(alone=alone) as seat:
                child = seat.child
                call = child.begin(
                    lambda number, child=child: Call(number, self._limits, task=task.index, engine=None, send=child.send),
                    lambda call: frames.Score(call.number, task, episodes),
                )
                running = Running(self._patience.num_ended, began_s=time.monotonic(), first=call.number == 1, before=child.cores.look())
                self._running[call] = _Runs(seat, running, answer)
                try:
                    given = await child.wait(call)
                finally:
                    self._running.pop(call, None)
            if given == Call.TIMEOUT:
                return TimeoutError(call.expired)
            if isinstance(given, frames.Scored):
                running.look(time.monotonic(), call.spent_s, child.cores.look())
                self._patience.ended(running)
                return given
            why = child.lost
            if answer.done():
                break
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

    def _looked(self) -> None:
        now_s = time.monotonic()
        for call, runs in self._running.items():
            runs.time.look(now_s, call.spent_s, runs.seat.child.cores.look(state=True))
        # One that has ended is still among them until its own task has run again: where this process had to wait, that may be later.
        times = {call: runs.time for call, runs in self._running.items() if not call.done.done()}
        for call in self._patience.too_many(times, seats=self._seats.number):
            self._give_up(call)
        hung = sorted((runs for runs in self._running.values() if self._patience.hangs(runs.time)), key=lambda runs: -runs.time.spent_s)
        for runs in hung:
            if not self._seats.move_to_slot(runs.seat):
                break
        self._seats.kill_deaf()
        self._seats.serve()
        if len(hung) > self._max_hung:
            self._look_at(self._patience.hangs_s, [runs for runs in hung if not runs.answer.done()])

    def _give_up(self, call: Call) -> None:
        """Say that it hangs, and end it; or leave it as a witness."""
        seat, running, answer = self._running[call]
        if answer.done():
            return
        why = f"it hung for {running.spent_s:.2f} s while others did too (reward.max_hung = {self._max_hung})"
        self._num_ended_early += 1
        stays = sum(runs.answer.done() for runs in self._running.values()) < self._max_hung
        answer.set_result(TimeoutError(why))
        if stays:
            logger.warning(
                "event=grader_hangs child=%d call=%d limit=%r action=it is waited for no longer", seat.child.number, call.number, why
            )
        else:
            del self._running[call]
            seat.child.give_up(call, why)

    def _look_at_seats(self) -> None:
        self._look_at(self._patience.hangs_s, [runs for runs in self._running.values() if self._seats.keeps_others_out(runs.seat)])

    def _look_at(self, after_s: float, found: Iterable[_Runs]) -> None:
        """Look again, before the watch does, once the first of these calls has had so long."""
        began_s = [runs.time.began_s for runs in found]
        if not began_s:
            return
        loop = asyncio.get_running_loop()
        due_s = max(min(began_s) + after_s - time.monotonic(), _HURRY_S) + loop.time()
        if self._hurry is not None:
            if self._hurry.when() <= due_s:
                return
            self._hurry.cancel()
        self._hurry = loop.call_at(due_s, self._look_again)

    def _look_again(self) -> None:
        self._hurry = None
        self._looked()


def _only(given: _Given) -> RewardValue | Exception:
    """The value of a call with one episode."""
    if isinstance(given, Exception):
        return given
    return SchemaError(given.error) if given.error else _value(given.values[0])


def _value(given: frames.Value) -> RewardValue | Exception:
    return SchemaError(given.error) if given.error else RewardValue(given.value, given.parts)
