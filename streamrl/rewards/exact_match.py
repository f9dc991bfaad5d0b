"""The built-in reward: 1 when the completion is the label, else 0."""

from __future__ import annotations

from collections.abc import Sequence

from streamrl.rewards.protocol import RewardValue, ScoredEpisode
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
