"""Which calls of graders hang, and which of these are ended before their time. Plain numbers; the clock is the caller's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec

K = TypeVar("K")

LEAST_S = 0.2
"""No call hangs before."""
_TIMES = 4.0
"""Of the longest that ended lately."""
_OVERTAKEN = 8
"""Calls that have ended since one began, beside twice those that may have run with it, before it is ended for that."""
_KNOWN = 32
"""Calls that have ended before any is compared with them."""
_BLOCK = 5000
_LONG_SHARE = 1 / 3
"""Of its time limit: a call that has had so much is said to hang, whatever is known of others."""


class Running(msgspec.Struct):
    """A call that runs."""

    ended_before: int
    """`Patience.num_ended` when it began."""
    spent_s: float = 0.0


class Patience:
    """Tells a call that hangs from one that is slow, by those that ended lately.

    A call hangs once it has had four times as long as the longest of the last 5000 to 10,000 that ended by themselves. It is ended for that
    only if others that began after it have ended: where all stand still, a judge that does not answer, each is given all of its time.

    Args:
        timeout_s: of a call.
        most: calls that may hang at once.
        seats: calls that may run at once, those that hang left out.
    """

    def __init__(self, timeout_s: float, *, most: int, seats: int) -> None:
        self.num_ended = 0
        self._long_s = timeout_s * _LONG_SHARE
        self._most = most
        self._overtaken = _OVERTAKEN + 2 * seats
        self._longest_s = self._before_s = 0.0
        self._in_block = 0

    def ended(self, spent_s: float) -> None:
        """A call has ended by itself."""
        self.num_ended += 1
        self._in_block += 1
        self._longest_s = max(self._longest_s, spent_s)
        if self._in_block >= _BLOCK:
            self._before_s, self._longest_s, self._in_block = self._longest_s, 0.0, 0

    def hangs(self, call: Running) -> bool:
        """Whether it is said to hang."""
        usual_s = max(self._longest_s, self._before_s)
        beyond = self.num_ended >= _KNOWN and call.spent_s > max(LEAST_S, _TIMES * usual_s)
        return beyond or call.spent_s > self._long_s

    def _is_overtaken(self, call: Running) -> bool:
        usual_s = max(self._longest_s, self._before_s)
        return self.num_ended - call.ended_before >= self._overtaken and call.spent_s > _TIMES * usual_s

    def too_many(self, calls: Mapping[K, Running]) -> list[K]:
        """Of the calls that hang those to be ended now, the longest first, so that no more than `most` are left.

        The one that hangs longest of all is left until its time limit: if it ends by itself after all, calls are as slow as that, and
        none that is not slower hangs any more.
        """
        hung = sorted((key for key, call in calls.items() if self.hangs(call)), key=lambda key: -calls[key].spent_s)
        ends = [key for key in hung[1:] if self._is_overtaken(calls[key])]
        return ends[: max(0, len(hung) - max(1, self._most))]
