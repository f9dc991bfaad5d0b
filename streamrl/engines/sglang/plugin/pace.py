"""Pacing: how much may be copied beside one forward pass."""

from __future__ import annotations

from typing import Protocol

IDLE_S = 0.05
"""Without a new forward pass for so long there is nobody to disturb."""


class Passes(Protocol):
    """Forward passes, as they are launched."""

    launched: int
    """So far."""

    def wait(self, seen: int, timeout_s: float) -> None:
        """Sleep until more than `seen` have been launched, or for `timeout_s`."""
        ...


class Pacer:
    """Bounds the copying that goes on beside one forward pass.

    A copy can delay a forward pass by at most the time that both run times the share of the GPU that the copy takes, so with at most
    `budget_ms` of that beside each pass no token's gap grows by more than that.

    Args:
        budget_ms: milliseconds of copying, times its share, for each forward pass; 0: no bound.
        passes: forward passes.
    """

    def __init__(self, budget_ms: float, passes: Passes) -> None:
        self.bounded = budget_ms > 0
        self._budget_s = budget_ms / 1e3
        self._passes = passes
        self._seen = passes.launched
        self._used_s = 0.0

    def used(self, seconds: float) -> None:
        """Account for a copy that has just ended; sleeps until the next forward pass when this one's share is used up."""
        if not self.bounded:
            return
        now = self._passes.launched
        if now != self._seen:
            self._seen, self._used_s = now, 0.0
        self._used_s += seconds
        if self._used_s < self._budget_s:
            return
        self._passes.wait(self._seen, IDLE_S)
        now = self._passes.launched
        # What a long copy took beyond its share is paid by the passes that follow.
        self._used_s = max(0.0, self._used_s - self._budget_s) if now != self._seen else 0.0
        self._seen = now
