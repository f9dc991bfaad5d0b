"""The built-in rewards: 1 when the completion is the label, or when their last numbers are the same; else 0."""

from __future__ import annotations

from collections.abc import Sequence

from streamrl.rewards.numbers import final_answer
from streamrl.rewards.protocol import RewardValue, ScoredEpisode
from streamrl.schemas.samples import Status
from streamrl.schemas.tasks import RolloutTask

_RIGHT = RewardValue(1.0)
_WRONG = RewardValue(0.0)


class ExactMatch:
    """Compares the last turn's text with the task's label, both as text without surrounding white space."""

    async def score(self, task: RolloutTask, episodes: Sequence[ScoredEpisode]) -> Sequence[RewardValue | Exception]:
        """1.0 or 0.0 for each episode; a task without a label scores 0.0."""
        if task.label is None:
            return [_WRONG] * len(episodes)
        label = str(task.label).strip()
        return [_RIGHT if episode.completion.strip() == label else _WRONG for episode in episodes]


class FinalNumber:
    r"""Compares the final number of the last turn with the label's, as exact values: `1,234.0` is `$1234`, `0.5` is `1/2`.

    Args:
        format_reward: added when the completion ended by itself and its number stands behind a marker (`####`, `\boxed{}`, `answer is`).
        marked_only: a number without a marker counts as no answer.
    """

    def __init__(self, format_reward: float = 0.0, marked_only: bool = False) -> None:
        self._format_reward = format_reward
        self._marked_only = marked_only

    async def score(self, task: RolloutTask, episodes: Sequence[ScoredEpisode]) -> Sequence[RewardValue | Exception]:
        """1.0 or 0.0 and the format's reward, as parts `answer` and `format`.

        The label is a number or a whole solution that ends in one; a task whose label holds no number gives no answer's reward.
        """
        expected = None if task.label is None else final_answer(str(task.label))
        return [self._one(episode, None if expected is None else expected.value) for episode in episodes]

    def _one(self, episode: ScoredEpisode, expected: object) -> RewardValue:
        found = final_answer(episode.completion)
        right = found is not None and (found.marked or not self._marked_only) and found.value == expected
        shaped = found is not None and found.marked and episode.status == Status.COMPLETED
        parts = {"answer": float(right), "format": self._format_reward * shaped}
        return RewardValue(sum(parts.values()), parts)
