r"""`dapo`: the grader of DAPO (arXiv 2503.14476), +1 or -1."""

from __future__ import annotations

import re
from typing import ClassVar

from streamrl.config import reward_kinds
from streamrl.rewards import minerva
from streamrl.rewards.answers import HEADING, answering, labels, last_box
from streamrl.rewards.numbers import begins_with
from streamrl.rewards.protocol import RewardValue, ScoredEpisode
from streamrl.schemas.tasks import RolloutTask

_ANSWER = re.compile(
    r"answer[*_`]{0,3}\s{0,8}[:\uff1a][*_`]{0,3}\s{0,8}([^\n]+)"  # also **Answer:** 34
    rf"|{HEADING}([^\n]+)",
    re.IGNORECASE | re.MULTILINE,
)
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
        wanted, text = labels(task), answering(episode) or ""
        if self._strict:
            right = last_box(text[-_STRICT_TAIL:]) in wanted
        else:
            found = behind_marker(text)
            right = found is not None and any(minerva.same(label, found) or begins_with(label, found) for label in wanted)
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
    """What stands behind the last `Answer:` of the last 300 characters, taken out of its box; None where there is none."""
    found = list(_ANSWER.finditer(completion[-_TAIL:]))
    if not found:
        return None
    line = found[-1][1] or found[-1][2]
    return last_box(line) or line


def _value(right: bool) -> RewardValue:
    score = 1.0 if right else -1.0
    return RewardValue(score, {"score": score, "acc": float(right)})
