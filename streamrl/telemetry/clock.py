"""Where time goes: seconds in states that exclude each other, so that their shares add up to one."""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Mapping

from streamrl.telemetry.states import gpus_of, seconds

REPORT_EVERY_S = 2.0


class StateClock:
    """`slots` things, each in one state at any moment; a thread is one of them. Any thread may call any method.

    Args:
        state: in which all of them begin.
        slots: how many there are.
        now: seconds that never go back.
    """

    def __init__(self, state: str, *, slots: int = 1, now: Callable[[], float] = time.monotonic) -> None:
        self.slots = slots
        self._now = now
        self._since_s = now()
        self._state = state
        self._counts = {state: slots}
        self._sums = {state: 0.0}
        """Seconds by state since `_since_s`, those of slots that are in it now less their time to come: a move costs two sums."""
        self._lock = threading.Lock()

    @property
    def state(self) -> str:
        """What `enter` was called with last."""
        return self._state

    def enter(self, state: str) -> str:
        """The only slot is in `state` from now on; returns the one that it was in."""
        before = self._state
        if before != state:
            self.move(before, state)
            self._state = state
        return before

    def within(self, state: str) -> _Within:
        """The only slot is in `state`, and afterwards in the one that it was in."""
        return _Within(self, state)

    def move(self, before: str, after: str, *, slots: int = 1) -> None:
        """`slots` of them go from one state to another."""
        with self._lock:
            now_s = self._now() - self._since_s
            counts, sums = self._counts, self._sums
            counts[before] -= slots
            counts[after] = counts.get(after, 0) + slots
            sums[before] += now_s * slots
            sums[after] = sums.get(after, 0.0) - now_s * slots

    def take(self) -> dict[str, float]:
        """Slot seconds by state since the last call, none left out: together `slots` times the time that has passed."""
        with self._lock:
            now_s = self._now() - self._since_s
            counts = self._counts
            found = {state: max(0.0, seconds + counts[state] * now_s) for state, seconds in self._sums.items()}
            self._since_s += now_s
            self._sums = dict.fromkeys(found, 0.0)
            return found


class _Within:
    """A context that costs a third of a generator's."""

    __slots__ = ("_before", "_clock", "_state")

    def __init__(self, clock: StateClock, state: str) -> None:
        self._clock = clock
        self._state = state

    def __enter__(self) -> None:
        self._before = self._clock.enter(self._state)

    def __exit__(self, *_: object) -> None:
        self._clock.enter(self._before)


class ClockReports:
    """Reports what a clock has counted, as the seconds of a kind of worker. What the bus does not take is part of the next report.

    Args:
        clock: of the worker.
        kind: whose states they are (`streamrl.telemetry.names.STATES`).
        put: publishes values and says whether the bus took them.
        gpus: asked at each report: GPUs that a trainer's ranks or an engine compute on; 0: they are on the CPU; None: not known.
    """

    def __init__(
        self,
        clock: StateClock,
        kind: str,
        put: Callable[[Mapping[str, float]], Awaitable[bool]],
        *,
        gpus: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._clock = clock
        self._kind = kind
        self._put = put
        self._gpus = gpus
        self._left: dict[str, float] = {}

    async def report(self) -> None:
        """Report the seconds since the last call."""
        values = {seconds(self._kind, state): amount for state, amount in self._clock.take().items()}
        for name, amount in self._left.items():
            values[name] = values.get(name, 0.0) + amount
        self._left = dict(values)
        if self._kind == "producer":
            values["producer/slots"] = float(self._clock.slots)
        elif (gpus := self._gpus()) is not None:
            values[gpus_of(self._kind)] = gpus
        if await self._put(values):
            self._left = {}
