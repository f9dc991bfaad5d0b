"""Which part of a run's rollouts fails: over the last of them, in all, and by producer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from streamrl.core.failed_share import FailedShare
from streamrl.monitor.drawing import visible
from streamrl.monitor.failures import REASONS
from streamrl.monitor.numbers import RunNumbers

_SAID_SHARE = 0.05
"""Fewer failures than this are usual."""
_SAID_CHARS = 300


def failed_of(reasons: Mapping[str, int]) -> int:
    """Count the rollouts that have failed, among those that ended for these reasons."""
    return sum(count for reason, count in reasons.items() if reason in REASONS)


class Shares:
    """The shares of a run and of its producers. Nothing is counted that was before this session.

    Args:
        most: rollouts that a share is taken over.
    """

    def __init__(self, most: int) -> None:
        self.run = FailedShare(most)
        self._most = most
        self._producers: dict[str, FailedShare] = {}

    def trained(self, used: int, drops: Counter[str]) -> None:
        """Count a batch: rollouts used, and those decided against by reason."""
        self.run.add(failed=failed_of(drops), ended=used + drops.total())

    def told(self, producer: str, *, failed: int = 0, stored: int = 0) -> None:
        """Count what is heard of a producer."""
        if failed or stored:
            self._producers.setdefault(producer, FailedShare(self._most)).add(failed=failed, ended=failed + stored)

    def forget(self, producer: str) -> None:
        """It has left."""
        self._producers.pop(producer, None)

    def bad_beside_good(self, there: Collection[str], limit: float, *, untrained: tuple[int, int]) -> set[str]:
        """Return producers of which more fails than `limit` while others are there of which it does not; the run's share begins anew.

        One that is there and of which nothing is known yet counts as good: it may be slow, beside another that takes all tasks and fails at
        once. Before the run is given up, those count as bad too of which less than a full share is known.
        """
        bad = {name for name, one in self._producers.items() if one.exceeds(limit) and (one.is_full or self.too_many(limit, untrained))}
        if not there or not bad or self.all_bad(there, limit):
            return set()
        self.run = FailedShare(self._most)
        return bad

    def all_bad(self, there: Collection[str], limit: float) -> bool:
        """True if more than `limit` fails of each producer that is there; what those failed that have left says nothing of the run."""
        return bool(there) and all(self.of(name).exceeds(limit) for name in there)

    def of(self, producer: str) -> FailedShare:
        """The share of a producer."""
        return self._producers.get(producer) or FailedShare(self._most)

    def worst(self, untrained: tuple[int, int]) -> tuple[int, int]:
        """Failed and ended rollouts of those that `too_many` was found of."""
        return (self.run.failed, self.run.ended) if self.run.is_full else untrained

    def too_many(self, limit: float, untrained: tuple[int, int]) -> bool:
        """True if more than `limit` fails in the run.

        Args:
            limit: greatest part.
            untrained: rollouts since the newest batch: failed, and ended.
        """
        failed, ended = untrained
        return (self.run.is_full and self.run.exceeds(limit)) or (ended >= self._most and failed > limit * ended)


def failed_rollouts_line(failed: int, ended: int, newest: str) -> str:
    """Say how many rollouts have failed, and why the newest did; empty where that is no more than usual."""
    if not failed or failed <= _SAID_SHARE * ended:
        return ""
    why = visible(" ".join(newest.removeprefix("failed: ").split()))[:_SAID_CHARS]
    return f"{failed:,} of {ended:,} rollouts failed{f': {why}' if why else ''}"


def line_of_numbers(numbers: RunNumbers) -> str:
    """The same of a run now."""
    return failed_rollouts_line(numbers.failed_rollouts, numbers.ended_rollouts, numbers.newest_error)
