"""Pacing: how much may be copied beside one forward pass."""

from __future__ import annotations

import time
from collections.abc import Callable

POLL_S = 0.0005
IDLE_S = 0.05
"""Without a new forward pass for so long there is nobody to disturb."""


class Pacer:
    """Bounds the copying that goes on beside one forward pass.

    A copy can delay a forward pass by at most the time that both run times the share of the GPU that the copy takes, so with at most
    `budget_ms` of that beside each pass no token's gap grows by more than that.

    Args:
        budget_ms: milliseconds of copying, times its share, for each forward pass; 0: no bound.
        forwards: forward passes launched so far.
    """

    def __init__(self, budget_ms: float, forwards: Callable[[], int]) -> None:
        self.bounded = budget_ms > 0
        self._budget_s = budget_ms / 1e3
        self._forwards = forwards
        self._seen = forwards()
        self._used_s = 0.0

    def used(self, seconds: float) -> None:
        """Account for a copy that has just ended; sleeps until the next forward pass when this one's share is used up."""
        if not self.bounded:
            return
        now = self._forwards()
        if now != self._seen:
            self._seen, self._used_s = now, 0.0
        self._used_s += seconds
        if self._used_s < self._budget_s:
            return
        end = time.monotonic() + IDLE_S
        while (now := self._forwards()) == self._seen and time.monotonic() < end:
            time.sleep(POLL_S)
        # What a long copy took beyond its share is paid by the passes that follow.
        self._used_s = max(0.0, self._used_s - self._budget_s) if now != self._seen else 0.0
        self._seen = now
