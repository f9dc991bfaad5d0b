"""The section `filters`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from streamrl.config.bounds import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section


class FiltersConfig(Section, frozen=True, kw_only=True):
    """What else is left out of batches, beside tasks.drop_zero_variance and tasks.overlong (docs/algorithms.md); never in the warm-up."""

    min_tokens: NonNegativeInt = 0
    """Rollouts with fewer sampled tokens are refused as `too_short`; 0: none."""
    max_tokens: NonNegativeInt = 0
    """Rollouts with more sampled tokens are refused as `too_long`; 0: none."""
    max_repetition: Fraction = 0.0
    """Rollouts of which more than this part of the n-grams at the end of an answer has been there before are refused as `repetitive`
    (seq-rep-n, arXiv 1908.04319); 0: none."""
    repetition_ngram: Annotated[int, Meta(ge=1, le=64)] = 8
    """n, in tokens."""
    repetition_tokens: PositiveInt = 1024
    """Length of that end."""
    refused: Literal["drop", "mask"] = "drop"
    """Rollouts that the keys above refuse are left out of their groups, or masked, while their rewards still count there."""
    min_reward_std: NonNegativeFloat = 1e-6
    """With tasks.drop_zero_variance, groups whose rewards have a standard deviation (n - 1) of at most this are dropped too."""
    mean_reward: tuple[float, ...] = ()
    """Lowest and highest mean reward of a group, both included: others are dropped as `too_hard` and `too_easy`; empty: any."""
    function: str = ""
    """A filter of your own, `keep(task, episodes)`, as `file.py:name`, `pkg.mod:name` or `pkg.mod.name`; empty: none."""
    options: dict[str, Any] = {}
    """Handed to it as keyword arguments."""
    timeout_s: PositiveFloat = 10.0
    """When it takes longer for a group, the group's rollouts end as `timeout`."""


DECIDED = tuple(
    f"filters.{name}"
    for name in (
        *("min_tokens", "max_tokens", "max_repetition", "repetition_ngram", "repetition_tokens"),
        *("refused", "min_reward_std", "mean_reward"),
    )
)
"""Keys that are decided by what stands on the log, so that a branch may have others."""
