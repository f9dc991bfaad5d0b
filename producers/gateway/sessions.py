"""The gateway as a producer: the rollouts of its claimed tasks are sessions, given to agents that ask, and done when all have ended.

```text
an agent waits for a session -> a task is claimed -> its rollouts are given out, the oldest task's first
-> the agents' calls -> each session ends: by its agent, by `failed`, by a limit -> the task's episodes and failures, as of any producer
```

A task of which nobody has started a session is given back. One that comes a second time has the sessions that its journal tells of, and
their agents go on with the keys that they have.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from itertools import count

from streamrl.errors import BusError, EngineError, SchemaError
from streamrl.producers.episode import Episode
from streamrl.producers.gateway.entries import Ended, Started
from streamrl.producers.gateway.episodes import episodes_of
from streamrl.producers.gateway.errors import ApiError, gone, later
from streamrl.producers.gateway.granted import Granted
from streamrl.producers.gateway.journal import Journal
from streamrl.producers.gateway.keys import SessionKey, new_nonce
from streamrl.producers.gateway.placing import Rules, prompt_messages
from streamrl.producers.gateway.rendering import Rendering
from streamrl.producers.gateway.session import AGAIN_S, Bounds, Session
from streamrl.producers.protocol import Context, Failure
from streamrl.runtime.worker import AGENTS_WAIT
from streamrl.schemas.tasks import RolloutTask, Sampling

logger = logging.getLogger(__name__)

TIMEOUT = "timeout"
LOOK_EVERY_S = 0.25
_LOOKS_A_SWEEP = 240
_QUIET_S = 10.0
"""Agents that have made no call for so long are waited for."""
_WHY_CHARS = 300
_LOST_S = 10.0
"""So long after a call for a session that is not here there is use for its task."""
_UNASKED_S = 2.0
"""Longest that a task is kept which came instead of a lost one."""
_ENDED_KEPT = 65_536
"""Tasks that have ended here and are remembered, so that a late call is told so."""


class Counts:
    """What has happened since the last report."""

    def __init__(self) -> None:
        self.num_started = 0
        self.num_timeouts = 0
        self.num_abandoned = 0
        """Turns that are not trained."""


class Calls:
    """Requests that were answered and refused, and how many a second."""

    def __init__(self) -> None:
        self.num_answered = self.num_refused = 0
        self.per_s = 0.0
        self.heard_s = time.monotonic()
        """When the newest call was made, on the monotonic clock."""
        self.newest_refusal = ""
        """Why the newest call was refused; empty: it was answered, or there was none."""
        self._taken = (0, 0)
        self._since_s = time.monotonic()

    def answered(self) -> None:
        """One more was."""
        self.num_answered += 1
        self.heard_s, self.newest_refusal = time.monotonic(), ""

    def refused(self, why: str) -> None:
        """One more was."""
        self.num_refused += 1
        self.heard_s, self.newest_refusal = time.monotonic(), " ".join(why.split())[:_WHY_CHARS]

    def take(self) -> tuple[int, int]:
        """Answered and refused since the last call."""
        now_s, (answered, refused) = time.monotonic(), self._taken
        self._taken = (self.num_answered, self.num_refused)
        found = self.num_answered - answered, self.num_refused - refused
        self.per_s = found[0] / max(1e-3, now_s - self._since_s)
        self._since_s = now_s
        return found


class Sessions:
    """A `Producer` whose rollouts are sessions, and the `Demand` for its tasks.

    Args:
        journal: where entries are kept.
        bounds: of each session.
        idle_s: longest that an agent may not call.
        total_s: longest that it may have in all, its calls left out.
        own_prompts: whether calls may begin with other prompts than the task's.
        drawable: raises ConfigError for sampling that the run cannot do.
        num_rollouts: of a task.
    """

    def __init__(
        self,
        journal: Journal,
        bounds: Bounds,
        *,
        idle_s: float,
        total_s: float,
        own_prompts: bool,
        drawable: Callable[[Sampling], None],
        num_rollouts: int,
    ) -> None:
        self._journal = journal
        self._bounds = bounds
        self._idle_s = idle_s
        self._total_s = total_s
        self._own_prompts = own_prompts
        self._drawable = drawable
        self._num_rollouts = num_rollouts
        self._tasks: dict[int, Granted] = {}
        self._rendering: Rendering | None = None
        """Of the newest task."""
        self._coming: set[int] = set()
        """Tasks that are claimed and whose sessions are not here yet."""
        self._waiting: deque[asyncio.Future[Session]] = deque()
        self._lost: dict[int, float] = {}
        """When a task was last asked for that is not here."""
        self._arrived = asyncio.Condition()
        self._ended: OrderedDict[int, tuple[str | None, ...]] = OrderedDict()
        """Why each session of a task that has left has ended: by its agent (empty), for a reason, or not here (None)."""
        self._changed: Callable[[], None] = lambda: None
        self._first_open: Callable[[], int] = lambda: 0
        self._closed = False
        self._counts = Counts()
        self.calls = Calls()
        """Told by the server."""

    def doing(self) -> str:
        """People see of it whether it waits for agents, and why those are refused that do call."""
        refused = f"; the newest call was refused: {self.calls.newest_refusal}" if self.calls.newest_refusal else ""
        quiet_s = time.monotonic() - self.calls.heard_s
        if not self.num_open and not self.num_waiting:
            return f"{AGENTS_WAIT}: none has a session open{refused}"
        if not self._is_asked and (refused or quiet_s >= _QUIET_S):
            return f"{AGENTS_WAIT}: {self.num_open} sessions are open, no call was answered for {quiet_s:.0f} s{refused}"
        return f"serves sessions: {self.num_open} open, {self.num_waiting} agents wait, {self.calls.per_s:.1f} calls/s"

    def take_metrics(self) -> dict[str, float]:
        """What has happened since the last call."""
        counts, self._counts = self._counts, Counts()
        calls, refused = self.calls.take()
        return {
            "gateway/open_sessions": self.num_open,
            "gateway/waiting_agents": self.num_waiting,
            "gateway/started_total": counts.num_started,
            "gateway/timeouts_total": counts.num_timeouts,
            "gateway/abandoned_total": counts.num_abandoned,
            "gateway/calls_total": calls,
            "gateway/refused_total": refused,
        }

    @property
    def _is_asked(self) -> bool:
        """Tell whether an agent waits for the answer to a call, or for a session."""
        return bool(self._waiting) or any(session.busy for granted in self._tasks.values() for session in granted.sessions)

    @property
    def num_open(self) -> int:
        """Sessions that agents have."""
        return sum(granted.num_open for granted in self._tasks.values())

    @property
    def num_waiting(self) -> int:
        """Agents that wait for one."""
        return len(self._waiting)

    def listen(self, changed: Callable[[], None], first_open: Callable[[], int]) -> None:
        """See `Demand`."""
        self._changed, self._first_open = changed, first_open

    def wanted(self) -> int:
        """See `Demand`."""
        now_s = time.monotonic()
        self._lost = {task: last_s for task, last_s in self._lost.items() if now_s - last_s < _LOST_S and task not in self._tasks}
        free = sum(len(granted.free) for granted in self._tasks.values())
        tasks = math.ceil(max(0, len(self._waiting) - free) / self._num_rollouts)
        # A queue gives what it has: what came instead of a lost task is given back before another is asked for, or all would come.
        unasked = sum(granted.is_unasked for granted in self._tasks.values())
        return max(0, tasks + max(0, len(self._lost) - unasked) - len(self._coming))

    def claimed(self, task: int) -> None:
        """See `Demand`."""
        self._coming.add(task)

    async def left(self, task: int, ended: bool) -> None:
        """A task has left this gateway, because it has ended or to be delivered again."""
        self._coming.discard(task)
        if ended:
            self._ended.setdefault(task, ())
            if len(self._ended) > _ENDED_KEPT:
                self._ended.popitem(last=False)
            await self._journal.forget(task)
        self._changed()

    async def rollout(self, task: RolloutTask, context: Context) -> Sequence[Episode | Failure]:
        """See `Producer`; raises EngineError where the task is to be given back."""
        granted = await self._grant(task, context)
        try:
            await granted.finished.wait()
            if any(session.moved for session in granted.sessions):
                raise EngineError(f"sessions of task {task.index} go on at another gateway", hint="this one was away for too long")
            if all(session.started is None for session in granted.sessions):
                raise EngineError(f"nobody has started a session of task {task.index}", hint="it goes back to the queue")
            given = [item for session in granted.sessions for item in self._outcome(session)]
            self._ended[task.index] = tuple(one.ended.reason if one.ended is not None else None for one in granted.sessions)
        finally:
            self._tasks.pop(task.index, None)
            granted.is_over.set()
            for session in granted.sessions:
                session.close(later("the session's task is no longer at this gateway", AGAIN_S, code="session_moved"))
        return given

    async def _grant(self, task: RolloutTask, context: Context) -> Granted:
        while (held := self._tasks.get(task.index)) is not None:  # it was stopped for longer than its lease
            self._coming.discard(task.index)
            await held.is_over.wait()
        try:
            prompt_messages(task)
            entries = await self._journal.load(task.index)
        except ApiError as error:
            raise SchemaError(f"expected a prompt that a gateway can hand out: {error.message}") from error
        except BusError as error:
            raise EngineError(f"the sessions of task {task.index} cannot be read: {error.message}") from error
        if not entries and task.index in self._ended:
            raise EngineError(f"task {task.index} has ended here", hint="this delivery of it was on its way meanwhile")
        self._rendering = Rendering(context, self._rendering)
        rules = Rules(task, self._rendering, self._own_prompts, self._drawable)
        sessions: list[Session] = []
        granted = Granted(task, sessions)

        def touched() -> None:
            if all(session.ended is not None for session in sessions) or any(session.moved for session in sessions):
                granted.finished.set()

        for rollout in range(task.num_rollouts):
            of_rollout = context.for_rollout(rollout)
            sessions.append(Session(of_rollout, rules, self._journal, self._bounds, entries.get(rollout, ()), touched))
        self._coming.discard(task.index)
        self._tasks[task.index] = granted
        touched()
        self._hand_out()
        async with self._arrived:
            self._arrived.notify_all()
        return granted

    def _outcome(self, session: Session) -> Sequence[Episode | Failure]:
        ended, rollout = session.ended, session.context.rollout_index
        assert ended is not None
        if ended.reason:
            return [Failure(rollout, ended.reason, ended.detail)]
        episodes, abandoned = episodes_of(session)
        self._counts.num_abandoned += abandoned
        return episodes or [Failure(rollout, "failed", "the session ended without an answered call")]

    async def start(self, wait_s: float, request: str = "") -> Session:
        """A session for an agent.

        Args:
            wait_s: how long it waits for a task.
            request: its `Idempotency-Key`: a second time gives the same session, as long as its task is here.

        Raises:
            ApiError: 429, there is none.
        """
        if request and (known := self._started_by(request)) is not None:
            return known
        session = next((one for granted in self._tasks.values() for one in granted.free), None)
        if session is None:
            session = await self._wait(wait_s)
        session.reserved = True
        try:
            await session.start(Started(nonce=new_nonce(), started_s=time.time(), request=request))
        finally:
            session.reserved = False
            if session.started is None:
                self._hand_out()
        self._counts.num_started += 1
        return session

    async def _wait(self, wait_s: float) -> Session:
        waiter: asyncio.Future[Session] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self._changed()
        try:
            async with asyncio.timeout(wait_s if not self._closed else 0):
                return await asyncio.shield(waiter)
        except (TimeoutError, asyncio.CancelledError) as error:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                waiter.result().reserved = False
                self._hand_out()
            if isinstance(error, asyncio.CancelledError):
                raise
            raise later(
                "there is no task to be had now: all that the run has issued are taken", AGAIN_S, status=429, code="no_task"
            ) from None
        finally:
            waiter.cancel()
            if waiter in self._waiting:
                self._waiting.remove(waiter)

    def _hand_out(self) -> None:
        """Give free sessions to those that wait longest."""
        free = [session for granted in self._tasks.values() for session in granted.free]
        while self._waiting and free:
            waiter = self._waiting.popleft()
            if not waiter.done():
                session = free.pop(0)
                session.reserved = True
                waiter.set_result(session)
        if self._waiting:
            self._changed()

    def _started_by(self, request: str) -> Session | None:
        sessions = (session for granted in self._tasks.values() for session in granted.sessions)
        return next((one for one in sessions if one.started is not None and one.started.request == request), None)

    async def find(self, key: SessionKey, wait_s: float) -> Session:
        """The session of a key, waiting for its task to come back if it is not here.

        Raises:
            ApiError: it has ended; or it is not here.
        """
        deadline = time.monotonic() + wait_s
        while key.task not in self._tasks:
            if key.task in self._ended or key.task < self._first_open():
                raise gone("the session has ended: its task is done")
            left_s = deadline - time.monotonic()
            if left_s <= 0 or self._closed:
                raise later(
                    "the session is not at this gateway",
                    AGAIN_S,
                    hint="its task may be at another gateway, or comes back",
                    code="session_away",
                )
            self._lost[key.task] = time.monotonic()
            self._changed()
            async with self._arrived:
                try:
                    await asyncio.wait_for(self._arrived.wait(), min(left_s, 1.0))
                except TimeoutError:
                    continue
        session = self.at_hand(key)
        assert session is not None
        return session

    def has_ended(self, key: SessionKey) -> bool:
        """Whether its agent is known to have ended a session whose task is done."""
        reasons = self._ended.get(key.task, ())
        return key.task not in self._tasks and key.rollout < len(reasons) and reasons[key.rollout] == ""

    def at_hand(self, key: SessionKey) -> Session | None:
        """The session of a key, if its task is here; raises ApiError for a key of no session."""
        granted = self._tasks.get(key.task)
        if granted is None:
            return None
        session = granted.sessions[key.rollout] if key.rollout < len(granted.sessions) else None
        if session is None or session.started is None or session.started.nonce != key.nonce:
            raise ApiError(401, "expected the key of a session, got one that nobody has been given", code="invalid_api_key")
        return session

    def close(self) -> None:
        """No further sessions: the gateway drains."""
        self._closed = True
        while self._waiting:
            self._waiting.popleft().set_exception(TimeoutError())

    async def look(self) -> None:
        """End what is over its limits, again and again; and now and then remove what a gateway that died has left of ended tasks."""
        for number in count(1):
            await asyncio.sleep(LOOK_EVERY_S)
            if number % _LOOKS_A_SWEEP == 0:
                await self._journal.sweep(self._first_open())
            for granted in list(self._tasks.values()):
                await self._expire(granted)

    async def _expire(self, granted: Granted) -> None:
        now_s = time.monotonic()
        if granted.is_open:
            granted.idle_since_s = now_s
        for session in granted.sessions:
            if session.ended is not None or session.busy or session.reserved:
                continue
            if session.started is None:
                instead = self._lost and not self._waiting and granted.is_unasked
                over = now_s - granted.idle_since_s > (min(_UNASKED_S, self._idle_s) if instead else self._idle_s)
                if over and granted.is_unasked:
                    granted.finished.set()  # given back
                    return
                why = "nobody has started a session for it"
            else:
                idle_s = now_s - session.active_s
                over = idle_s > self._idle_s or session.agent_s + idle_s > self._total_s
                why = f"no call for {idle_s:.0f} s (gateway.idle_timeout_s, producer.rollout_timeout_s)"
            if over:
                try:
                    await session.end(Ended(reason=TIMEOUT, detail=why))
                    self._counts.num_timeouts += 1
                except ApiError as error:
                    logger.warning("event=session_not_ended session=%s error=%s", session.name, error.message)
