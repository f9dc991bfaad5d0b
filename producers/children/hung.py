"""Which calls of graders hang, and for which of these nobody waits any more. Plain numbers; the clock is the caller's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from streamrl.producers.children.cores import Had

K = TypeVar("K")

UNWATCHED_S = 0.2
"""Two looks of the watch: a process is looked at ten times a second, and its time counts once it has answered."""
LEAST_S = 0.01
"""No call hangs before: a call that hangs keeps others from its seat for so long."""
_LEAST_FIRST_S = 1.0
"""No first call of a process is given up before: it may import what the later ones find."""
_MEANS = 10.0
"""Of the mean of those that ended: beyond it a call hangs."""
_TIMES = 2.0
"""Of the slowest that ended lately, or of the one that was overtaken most: beyond it a call may be given up."""
_CERTAIN = 10.0
"""Of the slowest: beyond it a call hangs for certain,"""
_CERTAIN_S = 1.0
"""not before."""
_REMEMBERED = 10_000
"""Calls that end after one has hung for certain, until it is forgotten that any does."""
_OVERTAKEN = 8
"""Calls that have ended since one began, beside twice those that may have run with it, before it may be given up."""
_KNOWN = 32
"""Calls that have ended before any is compared with them."""
_BLOCK = 1000
_WEIGHT = 1 / 256
_LONG_SHARE = 1 / 3
"""Of its time limit: a call that has had so much is said to hang, whatever is known of others."""


class Running(msgspec.Struct):
    """A call that runs."""

    ended_before: int
    """`Patience.num_ended` when it began."""
    spent_s: float = 0.0
    began_s: float = 0.0
    """By the caller's clock."""
    first: bool = False
    """Of its process."""
    before: Had = Had()
    """Core time that its process had had when it began."""

    def look(self, now_s: float, watched_s: float, had: Had) -> None:
        """Count what it has had by `now_s`: the time that was watched, and what may not have been counted yet.

        Time in which its process waited for a core is nobody's: beside other work a call that is as quick as any may wait for many times
        as long as others take. While the process could run, it has had what it had on a core.
        """
        waited_s = had.queued_s - self.before.queued_s
        had_s = had.ran_s - self.before.ran_s if had.runnable else now_s - self.began_s - waited_s
        self.spent_s = max(self.spent_s, min(had_s, watched_s + UNWATCHED_S))


class Patience:
    """Tells a call that hangs from one that is slow, by those that ended lately.

    A call hangs once it has had ten times as long as the mean of those that ended. It may be given up for that once it has had twice as
    long as the slowest of the last 1000 to 2000, or twice as many have ended meanwhile as during any of these: the second says the
    same on a machine that stands still now and then. Both are longer until 1000 have ended: the slowest of a few is hardly the slowest
    there is. Others that began after it must have ended: where all stand still, a judge that does not answer, each is given all of its
    time. And one must have hung for certain lately, for a second and ten times as long as the slowest: else it is the machine that has
    too much to do. How long the first call of a process took says nothing of others.

    Args:
        timeout_s: of a call.
        most: calls that may hang at once.
    """

    def __init__(self, timeout_s: float, *, most: int) -> None:
        self.num_ended = 0
        self._long_s = timeout_s * _LONG_SHARE
        self._most = most
        self._mean_s = 0.0
        self._slowest: tuple[float, int] = (0.0, 0)
        """Seconds, and calls that ended meanwhile: the most of each in this block of calls,"""
        self._before: tuple[float, int] = (0.0, 0)
        """and in the one before."""
        self._in_block = 0
        self._known_until = 0
        """`num_ended` up to which it is known that calls hang."""

    def ended(self, call: Running) -> None:
        """A call has ended by itself."""
        meanwhile = self._overtaken(call)
        self.num_ended += 1
        if call.first:
            return
        slowest_s, overtaken = self._slowest
        self._slowest = max(slowest_s, call.spent_s), max(overtaken, meanwhile)
        self._mean_s += (call.spent_s - self._mean_s) * max(_WEIGHT, 1 / self.num_ended)
        self._in_block += 1
        if self._in_block >= _BLOCK:
            self._before, self._slowest, self._in_block = self._slowest, (0.0, 0), 0

    @property
    def hangs_s(self) -> float:
        """Beyond it a call is said to hang."""
        return min(self._long_s, max(LEAST_S, _MEANS * self._mean_s)) if self.num_ended >= _KNOWN else self._long_s

    def hangs(self, call: Running) -> bool:
        """Whether it is said to hang."""
        return call.spent_s > self.hangs_s

    def _overtaken(self, call: Running) -> int:
        """Calls that have ended since it began."""
        return self.num_ended - call.ended_before

    def _slower(self, call: Running, times: float) -> tuple[bool, bool]:
        """Whether it has had so many times as long as the slowest, and whether so many times as many ended meanwhile."""
        usual_s, usual = (max(now, before) for now, before in zip(self._slowest, self._before, strict=True))
        times *= max(1.0, _BLOCK / max(1, self.num_ended)) ** 0.5
        return call.spent_s > times * usual_s, self._overtaken(call) > times * max(1, usual)

    def _may_be_slow(self, call: Running, seats: int) -> bool:
        """Whether too little is known to tell."""
        few = self._overtaken(call) < _OVERTAKEN + 2 * seats
        return few or self.num_ended < _KNOWN or (call.first and call.spent_s < _LEAST_FIRST_S)

    def too_many(self, calls: Mapping[K, Running], *, seats: int) -> list[K]:
        """Of the calls that hang those to be given up, the longest first: none, unless more than `most` hang.

        Some are to be left as witnesses until their time limit: if one ends by itself after all, calls are as slow as that, and none that
        is not slower is given up any more.

        Args:
            calls: all that run.
            seats: calls that may run at once, those that hang left out.
        """
        hung = sorted((key for key, call in calls.items() if self.hangs(call)), key=lambda key: -calls[key].spent_s)
        told = [key for key in hung if not self._may_be_slow(calls[key], seats)]
        if any(calls[key].spent_s > _CERTAIN_S and self._slower(calls[key], _CERTAIN)[0] for key in told):
            self._known_until = self.num_ended + _REMEMBERED
        if len(hung) <= self._most or self.num_ended >= self._known_until:
            return []
        return [key for key in told if any(self._slower(calls[key], _TIMES))]
