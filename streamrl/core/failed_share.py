"""The part of the last rollouts that has failed: of a run, of a producer."""

from __future__ import annotations

from collections import deque

LEAST_ROLLOUTS = 256
LEAST_BATCHES = 2


def window_of(batch_tasks: int, group_size: int) -> int:
    """Rollouts that a share is taken over."""
    return max(LEAST_ROLLOUTS, LEAST_BATCHES * batch_tasks * group_size)


class FailedShare:
    """The part of the last rollouts that has failed.

    Args:
        most: rollouts that are looked at; what is older is forgotten.
    """

    def __init__(self, most: int) -> None:
        self.failed = self.ended = 0
        self._most = most
        self._told: deque[tuple[int, int]] = deque()

    def add(self, *, failed: int, ended: int) -> None:
        """Count rollouts that have ended, and those among them that failed."""
        self._told.append((failed, ended))
        self.failed, self.ended = self.failed + failed, self.ended + ended
        while self.ended - self._told[0][1] >= self._most:
            failed, ended = self._told.popleft()
            self.failed, self.ended = self.failed - failed, self.ended - ended

    @property
    def is_full(self) -> bool:
        """Enough have ended to judge by."""
        return self.ended >= self._most

    def exceeds(self, limit: float) -> bool:
        """True if a greater part than `limit` has failed."""
        return self.failed > limit * self.ended
