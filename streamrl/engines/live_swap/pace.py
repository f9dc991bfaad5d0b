"""Pacing: how much of the GPU staging may take beside one forward pass."""

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
    """Bounds the work that goes on beside one forward pass.

    Work that takes the whole GPU for some time delays a forward pass beside it by at most that time; a copy by the copy engines takes a
    part of the memory's bandwidth and delays it by as much less. So with at most `budget_ms` of that beside each pass no token's gap grows
    by more. What a piece costs is known before it is asked for, and nobody waits for it to be done: a thread that wakes up to look how
    long it took wants the interpreter's lock from the scheduler each time.

    Args:
        budget_ms: of the GPU's time for each forward pass; 0: no bound.
        passes: forward passes.
    """

    def __init__(self, budget_ms: float, passes: Passes) -> None:
        self.bounded = budget_ms > 0
        self._budget_s = budget_ms / 1e3
        self._passes = passes
        self._seen = passes.launched
        self._spent_s = 0.0

    def spend(self, seconds: float) -> None:
        """Sleep until there is room beside a forward pass for a piece that takes the GPU for so long, and account for it.

        A piece that is larger than the budget goes alone, and the passes that follow pay for it.
        """
        if not self.bounded:
            return
        self._renew()
        while self._spent_s and self._spent_s + seconds > self._budget_s:
            self._passes.wait(self._seen, IDLE_S)
            if not self._renew():
                self._spent_s = 0.0
        self._spent_s += seconds

    def _renew(self) -> bool:
        """Take up the budgets of the passes launched since; False when there are none."""
        passes = self._passes.launched - self._seen
        self._seen += passes
        self._spent_s = max(0.0, self._spent_s - passes * self._budget_s)
        return passes > 0
