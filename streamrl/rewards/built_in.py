"""`exact_match`, `gsm8k` and `random`: 1 when the completion is the label, when their last numbers are the same, or by chance; else 0."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import ClassVar

from streamrl.config import reward_kinds
from streamrl.rewards.answers import answering
from streamrl.rewards.numbers import Answer, final_answer
from streamrl.rewards.protocol import RewardValue, ScoredEpisode
from streamrl.schemas.samples import Status
from streamrl.schemas.tasks import RolloutTask


class ExactMatch:
    """Compares the last turn's text with the task's label, both as text without surrounding white space."""

    async def score(self, task: RolloutTask, episodes: Sequence[ScoredEpisode]) -> Sequence[RewardValue | Exception]:
        """1.0 or 0.0 for each episode; a task without a label scores 0.0, and so does a thought that did not end."""
        label = None if task.label is None else str(task.label).strip()
        return [RewardValue(float(_whole(episode) == label)) for episode in episodes]


class FinalNumber:
    """Compares the final number of the last turn with the label's, as exact values: `1,234.0` is `$1234`, `0.5` is `1/2`.

    Args:
        options: checked.
    """

    in_children: ClassVar[bool] = False

    def __init__(self, options: reward_kinds.Gsm8k) -> None:
        self._format_reward = options.format_reward
        self._marked_only = options.marked_only

    def grade(self, task: RolloutTask, episode: ScoredEpisode) -> RewardValue:
        """1.0 or 0.0 and the format's reward, as parts `answer` and `format`.

        The label is a number or a whole solution that ends in one; a task whose label holds no number gives no answer's reward.
        """
        expected = None if task.label is None else final_answer(str(task.label))
        found = number_of(episode)
        right = found is not None and (found.marked or not self._marked_only)
        right = right and expected is not None and found is not None and found.value == expected.value
        shaped = found is not None and found.marked and episode.status == Status.COMPLETED
        parts = {"answer": float(right), "format": self._format_reward * shaped}
        return RewardValue(sum(parts.values()), parts)


def number_of(episode: ScoredEpisode) -> Answer | None:
    """The final number of an episode; None where there is none."""
    text = answering(episode)
    return None if text is None else final_answer(text)


def _whole(episode: ScoredEpisode) -> str | None:
    """The completion; of a thought that the prompt has opened, what follows it."""
    text = answering(episode) if episode.thinking else episode.completion
    return None if text is None else text.strip()


class Random:
    """1.0 or 0.0, by the seeds of the task and the rollout alone: for trying out how a run is wired.

    Args:
        options: checked.
    """

    in_children: ClassVar[bool] = False

    def __init__(self, options: reward_kinds.Random) -> None:
        self._probability = options.probability

    def grade(self, task: RolloutTask, episode: ScoredEpisode) -> RewardValue:
        """The same for the same rollout in each run with its seed."""
        return RewardValue(float(random.Random(f"reward {task.seed} {episode.rollout}").random() < self._probability))
