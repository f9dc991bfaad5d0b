"""`f1`: words that a completion and an answer have in common, as SQuAD counts them (arXiv 1606.05250)."""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import ClassVar

from streamrl.rewards.answers import answering, labels
from streamrl.rewards.protocol import RewardValue, ScoredEpisode
from streamrl.schemas.tasks import RolloutTask

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED = frozenset({"yes", "no", "noanswer"})
"""Answers that are right or wrong as a whole (HotpotQA, arXiv 1809.09600)."""


class F1:
    """The best F1 over the labels; parts `f1`, `precision` and `recall`."""

    in_children: ClassVar[bool] = False

    def grade(self, task: RolloutTask, episode: ScoredEpisode) -> RewardValue:
        """In [0, 1]; reasoning up to `</think>` is left out."""
        text = answering(episode)
        wanted = labels(task)
        f1, precision, recall = max((f1_of(label, text) for label in wanted) if text is not None else [(0.0, 0.0, 0.0)])
        return RewardValue(f1, {"f1": f1, "precision": precision, "recall": recall})


def normalized(text: str) -> str:
    """In lower case, without punctuation, articles and superfluous white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def f1_of(label: str, answer: str) -> tuple[float, float, float]:
    """F1, precision and recall of the answer's words; where one of the two has none, as "A" has, 1 if they are the same text.

    Nothing is right without an answer: a row whose answer is that there is none has the label `noanswer`.
    """
    expected, got = normalized(label), normalized(answer)
    if expected != got and (expected in _CLOSED or got in _CLOSED):
        return 0.0, 0.0, 0.0
    expected_words, words = expected.split(), got.split()
    if not expected_words or not words:
        same = float(bool(answer.strip()) and label.strip().lower() == answer.strip().lower())
        return same, same, same
    common = (Counter(expected_words) & Counter(words)).total()
    precision, recall = common / len(words), common / len(expected_words)
    return (2 * precision * recall / (precision + recall) if common else 0.0), precision, recall
