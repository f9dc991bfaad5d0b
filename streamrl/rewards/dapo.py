r"""`dapo`: the grader of DAPO (arXiv 2503.14476), +1 or -1."""

from __future__ import annotations

import re
from typing import ClassVar

from streamrl.config import reward_kinds
from streamrl.rewards import minerva
from streamrl.rewards.answers import labels, last_box
from streamrl.rewards.protocol import RewardValue, ScoredEpisode
from streamrl.schemas.tasks import RolloutTask

_ANSWER = re.compile(r"answer\s{0,8}:\s{0,8}([^\n]+)", re.IGNORECASE)
_TAIL = 300
_STRICT_TAIL = 100


class Dapo:
    """1.0 or -1.0; parts `score`, which is that, and `acc`, 1.0 or 0.0.

    Args:
        options: checked.
    """

    in_children: ClassVar[bool] = False

    def __init__(self, options: reward_kinds.Dapo) -> None:
        self._strict = options.strict_box

    def grade(self, task: RolloutTask, episode: ScoredEpisode) -> RewardValue:
        """The answer is what stands behind the last `Answer:` of the last 300 characters, or, strictly, the last box of the last 100."""
        wanted = labels(task)
        if self._strict:
            right = last_box(episode.completion[-_STRICT_TAIL:]) in wanted
        else:
            found = behind_marker(episode.completion)
            right = found is not None and any(minerva.same(label, found) for label in wanted)
        return _value(right)


class BoxedDapo:
    """`boxed_dapo`: the whole completion, which is what a box held, is the answer."""

    in_children: ClassVar[bool] = False

    def __init__(self, options: reward_kinds.Dapo) -> None:
        self._strict = options.strict_box

    def grade(self, task: RolloutTask, episode: ScoredEpisode) -> RewardValue:
        """1.0 or -1.0."""
        answer, wanted = episode.completion, labels(task)
        return _value(answer in wanted if self._strict else any(minerva.same(label, answer) for label in wanted))


def behind_marker(completion: str) -> str | None:
    """What stands behind the last `Answer:` of the last 300 characters; None where there is none."""
    found = _ANSWER.findall(completion[-_TAIL:])
    return found[-1] if found else None


def _value(right: bool) -> RewardValue:
    score = 1.0 if right else -1.0
    return RewardValue(score, {"score": score, "acc": float(right)})
