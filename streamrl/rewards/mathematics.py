r"""`math` and `deepscaler`: whether an answer is the label's value, by the library math-verify (on sympy).

Comparing two expressions may take for ever, or all memory. So both say `in_children`, and what is known to explode (towers of powers,
factorials, hundreds of braces) is wrong before anything is computed.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from streamrl.config import reward_kinds
from streamrl.errors import ConfigError
from streamrl.rewards import minerva
from streamrl.rewards.answers import labels, last_box, without_reasoning
from streamrl.rewards.protocol import RewardValue, ScoredEpisode
from streamrl.schemas.tasks import RolloutTask

if TYPE_CHECKING:
    from collections.abc import Sequence

_DEEPEST = 12
_LONGEST = 400
"""Characters of an answer that is computed with, or twice those of the label."""
_TALL = re.compile(
    r"\^\s*\{?[^{}^]{0,40}\^|\*\*[^*]{0,20}\*\*|(?:\^|\*\*)\s*\{?\s*-?\(?\d{4,}"  # a power of a power, an exponent of four digits
    r"|[)\]}]\s*(?:\^|\*\*)\s*\{?\s*-?\(?\d{2,}"  # a large power of more than one thing
    r"|\d{4,}\s*\)?\s*!|!\s*\)*\s*!|\d{200,}"  # a factorial of a large number, or of a factorial
)
_OPERATORS = re.compile(r"\\(?:int|iint|oint|sum|prod|lim)(?![a-zA-Z])")


class Math:
    """1.0 where the answer has the label's value; parts `answer` and `boxed`.

    Args:
        options: checked.
    """

    in_children: ClassVar[bool] = True

    def __init__(self, options: reward_kinds.Math) -> None:
        self._boxed_only = options.boxed_only
        library()

    def grade(self, task: RolloutTask, episode: ScoredEpisode) -> RewardValue:
        """The answer is the last box, else what stands behind the last `####`, else what math-verify finds in the last 400 characters."""
        text = without_reasoning(episode.completion)
        box = None if text is None else last_box(text)
        right = False
        if box is not None:
            right = any(equal(label, box) for label in labels(task))
        elif text is not None and not self._boxed_only:
            right = any(_equal_in(label, text) for label in labels(task))
        return RewardValue(float(right), {"answer": float(right), "boxed": float(box is not None)})


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
        box = last_box(text) if marked or not self._marker else None
        right = box is not None and any(equal(label, box) for label in labels(task))
        return RewardValue(float(right), {"answer": float(right), "marked": float(marked)})


def equal(label: str, answer: str) -> bool:
    """Whether an answer, without anything around it, has the label's value."""
    if not answer.strip() or len(answer) > minerva.LONGEST:
        return False
    if minerva.same(label, answer):
        return True
    if len(answer) > max(_LONGEST, 2 * len(label)) or explodes(answer):
        return False
    return _verify(label, _boxed(answer.strip().rstrip(".")))


def _equal_in(label: str, text: str) -> bool:
    if "####" in text:
        answer = text.rpartition("####")[2].strip()
        return equal(label, answer.partition("\n")[0])
    text = text[-_LONGEST:]
    return bool(text.strip()) and not explodes(text) and _verify(label, text)


def explodes(text: str) -> bool:
    """Whether computing with it may take for ever; no row's label is expected to."""
    depth = deepest = 0
    for character in text:
        depth += (character in "{([") - (character in "})]")
        deepest = max(deepest, depth)
    return deepest > _DEEPEST or _TALL.search(text) is not None or len(_OPERATORS.findall(text)) > 2


def _verify(label: str, text: str) -> bool:
    # No limits of the library's own: they are alarms of the main thread, and what hangs here is killed.
    found = library()
    answers = found.parse(text, found.targets, parsing_timeout=None)
    return bool(answers) and found.verify(_gold(label), answers, timeout_seconds=None)


@lru_cache(maxsize=256)
def _gold(label: str) -> Sequence[Any]:
    found = library()
    return found.parse(_boxed(label.strip().rstrip(".")), found.targets, parsing_timeout=None)


def _boxed(answer: str) -> str:
    return f"\\boxed{{{answer}}}"


class Library:
    """What is used of math-verify, which takes half a second to load."""

    def __init__(self) -> None:
        try:
            import math_verify
        except ImportError as error:
            raise ConfigError(
                f"expected the package math-verify for the rewards math and deepscaler, got: {error}",
                hint="pip install math-verify",
                key="reward.kind",
            ) from error
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the limits that it is not given
        self.parse: Any = math_verify.parse
        self.verify: Any = math_verify.verify
        self.targets = (math_verify.LatexExtractionConfig(boxed_match_priority=0), math_verify.ExprExtractionConfig())


@lru_cache(maxsize=1)
def library() -> Library:
    """Loaded once a process; raises ConfigError where it is not installed."""
    return Library()
