"""What a completion answers, as far as that can be told: for votes among the samples of one problem (maj@k)."""

from __future__ import annotations

from streamrl.config.tree import RewardConfig
from streamrl.rewards.answers import last_box, without_reasoning
from streamrl.rewards.numbers import final_answer
from streamrl.rewards.protocol import ScoredEpisode

ANSWER = "answer"
"""Key of an episode's metadata under which a producer leaves its answer."""
_BOXES = ("math", "deepscaler")


def answer_of(reward: RewardConfig, episode: ScoredEpisode) -> str | None:
    """The answer that the producer has left in `metadata["answer"]`, else what the reward looks for, else the whole last turn.

    Of `gsm8k` that is the final number, of rewards that look for a box what the last one holds.

    Answers that a reward takes for the same should be the same text. None: there is none.
    """
    left = episode.metadata.get(ANSWER)
    if isinstance(left, str | int | float):
        return str(left).strip() or None
    if reward.kind == "gsm8k":
        found = final_answer(episode.completion)
        return None if found is None else str(found.value)
    if reward.kind in _BOXES or reward.kind.startswith("boxed_"):
        return last_box(without_reasoning(episode.completion) or "") or None
    return episode.completion.strip() or None
