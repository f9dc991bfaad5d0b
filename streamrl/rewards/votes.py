"""What a completion answers, as far as that can be told: for votes among the samples of one problem (maj@k)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamrl.config.reward_kinds import BOXED
from streamrl.rewards.answers import answering, boxed_answers, last_box
from streamrl.rewards.dapo import behind_marker
from streamrl.rewards.gpqa import letter_of
from streamrl.rewards.minerva import normalized
from streamrl.rewards.numbers import final_answer
from streamrl.rewards.protocol import ScoredEpisode

ANSWER = "answer"
"""Key of an episode's metadata under which a producer leaves its answer."""
_BOXES = ("math", "deepscaler")


def answer_of(kind: str, episode: ScoredEpisode, metadata: Mapping[str, Any]) -> str | None:
    """The answer that the producer has left in `metadata["answer"]`, else what the reward looks for, else the whole last turn.

    Of `gsm8k` that is the final number, of `gpqa` the letter, of `dapo` what stands behind the last marker, of rewards that look for a box
    what the last one holds. Answers that a reward takes for the same should be the same text.

    Args:
        kind: of the reward that scores it: the row's own, or the run's or set's.
        episode: whose answer it is.
        metadata: of the problem.

    Returns:
        None: there is no answer.
    """
    left = episode.metadata.get(ANSWER)
    if isinstance(left, str | int | float):
        return str(left).strip() or None
    text = answering(episode)
    if text is None:
        return None
    if kind == "gsm8k":
        found = final_answer(text)
        return None if found is None else str(found.value)
    if kind == "gpqa":
        return letter_of(text, metadata)
    if kind == "dapo":
        return normalized(behind_marker(text) or last_box(text) or "") or None
    if kind in _BOXES or kind.startswith(BOXED):
        return next(iter(boxed_answers(text)), None) or None
    return (text if episode.thinking else episode.completion).strip() or None
