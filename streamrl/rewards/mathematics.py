r"""`math` and `deepscaler`: whether an answer states what the label does, by algebra.

Comparing two expressions may take for ever, or all memory, so both say `in_children`.
"""

from __future__ import annotations

from typing import ClassVar

from streamrl.config import reward_kinds
from streamrl.rewards import minerva
from streamrl.rewards.algebra import EQUALITY, explodes, found_in, library
from streamrl.rewards.answers import answering, boxed_answers, labels, stated, unclosed_box
from streamrl.rewards.notation import LONGEST, plain
from streamrl.rewards.numbers import begins_with
from streamrl.rewards.protocol import RewardValue, ScoredEpisode
from streamrl.schemas.samples import Status
from streamrl.schemas.tasks import RolloutTask

_LONGEST = 400
"""Characters of an answer that is computed with, or twice those of the label."""


class Math:
    """1.0 where the answer is the label's; parts `answer` and `boxed`.

    Args:
        options: checked.
    """

    in_children: ClassVar[bool] = True

    def __init__(self, options: reward_kinds.Math) -> None:
        self._boxed_only = options.boxed_only
        library()

    def grade(self, task: RolloutTask, episode: ScoredEpisode) -> RewardValue:
        """The answer is the last box, else what the text states (`answers.stated`), else what math-verify finds at its end."""
        text = answering(episode)
        boxed, wanted = boxed_answers(text or ""), labels(task)
        right = False
        if boxed:
            right = any(equal(label, answer) or begins_with(label, answer) for label in wanted for answer in boxed)
        elif text is not None and not self._boxed_only:
            left_open = unclosed_box(text)
            if left_open is None:
                right = any(_equal_in(label, text) for label in wanted)
            elif episode.status == Status.COMPLETED:  # one that was truncated may be the beginning of another answer
                right = any(equal(label, left_open) for label in wanted)
        return RewardValue(float(right), {"answer": float(right), "boxed": float(bool(boxed))})


class BoxedMath:
    """`boxed_math`: the whole completion, which is what a box held, is the answer."""

    in_children: ClassVar[bool] = True

    def __init__(self, options: reward_kinds.Math) -> None:
        library()

    def grade(self, task: RolloutTask, episode: ScoredEpisode) -> RewardValue:
        """1.0 or 0.0."""
        return RewardValue(float(any(equal(label, episode.completion) for label in labels(task))))


class DeepScaler:
    """1.0 where the box behind the reasoning has the label's value.

    Args:
        options: checked.
    """

    in_children: ClassVar[bool] = True

    def __init__(self, options: reward_kinds.DeepScaler) -> None:
        self._marker = options.marker
        library()

    def grade(self, task: RolloutTask, episode: ScoredEpisode) -> RewardValue:
        """The answer is the last box behind the last `</think>`, or else behind the first `###Response`."""
        text = episode.completion
        marked = True
        if "</think>" in text:
            text = text.rpartition("</think>")[2]
        elif "###Response" in text:
            text = text.partition("###Response")[2]
        else:
            marked = False
            text = "" if episode.thinking else text
        boxed = boxed_answers(text) if marked or not self._marker else []
        right = any(equal(label, answer) for label in labels(task) for answer in boxed)
        return RewardValue(float(right), {"answer": float(right), "marked": float(marked)})


def equal(label: str, answer: str) -> bool:
    """Tell whether an answer, without anything around it, states what the label does (`streamrl.rewards.statements`)."""
    if not answer.strip() or len(answer) > LONGEST:
        return False
    if minerva.same(label, answer):
        return True
    if len(answer) > max(_LONGEST, 2 * len(label)) or explodes(answer) or explodes(plain(answer)):
        return False
    return EQUALITY.holds(label, answer)


def _equal_in(label: str, text: str) -> bool:
    answer = stated(text)
    if answer is None:
        text = text[-_LONGEST:]
        return bool(text.strip()) and not explodes(text) and found_in(label, text)
    return equal(label, answer) or begins_with(label, answer)
