"""Tells once that the first rollouts of a run earn almost nothing: from answers that are all wrong there is nothing to learn."""

from __future__ import annotations

from collections.abc import Sequence

from streamrl.monitor.numbers import Point
from streamrl.schemas.control import Untrained

LEAST = 500
"""Rollouts that are looked at."""
LOW = 0.02
"""A mean reward below this is worth a word."""
_SPREAD = 0.05
"""Rewards that go below zero may average to nothing too; then the means of single batches lie farther from it than this."""


class LowReward:
    """Looks at the first rollouts of a run, trained or not.

    Args:
        run: name of the run.
        per_batch: rollouts that a batch trains, which are the fewest that it was made from.
    """

    def __init__(self, run: str, per_batch: int) -> None:
        self._run = run
        self._per_batch = per_batch
        self.over = False
        """True once the first rollouts have been judged: no look says anything any more."""

    def look(self, batches: Sequence[Point], untrained: Untrained) -> str:
        """Return a line for people once enough rollouts have come and earn too little, and an empty text otherwise.

        Args:
            batches: of reinforcement learning, from the run's beginning.
            untrained: the trainer's words on what has come since the newest.
        """
        if self.over:
            return ""
        parts = [(one.num_batches * self._per_batch, one.reward) for one in batches if one.reward is not None]
        parts += [(untrained.rewarded, untrained.reward)] if untrained.rewarded else []
        count = sum(number for number, _ in parts)
        if count < LEAST:
            return ""
        self.over = True
        mean = sum(number * reward for number, reward in parts) / count
        if not 0 <= mean < LOW or any(abs(reward) > _SPREAD for _, reward in parts):
            return ""
        return (
            f"the mean reward of the first {count} rollouts is {mean:.3g}: answers that are all wrong teach next to nothing. "
            f"hint: `streamrl inspect {self._run} 0` shows some; take easier rows, a reward in parts, more answers a row, or begin with "
            "demonstrations ([warmup])"
        )
