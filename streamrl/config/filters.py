"""The section `filters` and its rules."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from streamrl.config.bounds import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section, refuse
from streamrl.config.loss import is_function


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


def check_filters(filters: FiltersConfig, max_len: int, *, late: bool) -> None:
    """Raise ConfigError for bounds that contradict each other or could never be met.

    Args:
        filters: the section.
        max_len: longest sequence in tokens.
        late: rewards come after their samples.
    """
    _check_function(filters, late=late)
    refuse(
        0 < filters.max_tokens < filters.min_tokens,
        f"filters.max_tokens = {filters.max_tokens} is below filters.min_tokens = {filters.min_tokens}: every rollout would be refused",
        hint="raise filters.max_tokens, or lower filters.min_tokens",
        key="filters.max_tokens",
    )
    refuse(
        filters.min_tokens > max_len,
        f"filters.min_tokens = {filters.min_tokens} is above model.max_len = {max_len}: every rollout would be refused",
        hint="lower filters.min_tokens",
        key="filters.min_tokens",
    )
    refuse(
        len(filters.mean_reward) not in (0, 2),
        f"filters.mean_reward must be [lowest, highest], got {list(filters.mean_reward)}",
        hint="write both bounds, such as [0.1, 0.9]; they are included",
        key="filters.mean_reward",
    )
    refuse(
        len(filters.mean_reward) == 2 and filters.mean_reward[0] > filters.mean_reward[-1],
        f"filters.mean_reward must rise, got {list(filters.mean_reward)}: every group would be dropped",
        hint="write the lowest first",
        key="filters.mean_reward",
    )
    refuse(
        filters.max_repetition > 0 and filters.repetition_ngram >= filters.repetition_tokens,
        f"filters.repetition_ngram = {filters.repetition_ngram} must be below filters.repetition_tokens = {filters.repetition_tokens}: "
        "nothing could occur twice",
        hint="lower filters.repetition_ngram, or raise filters.repetition_tokens",
        key="filters.repetition_ngram",
    )


def _check_function(filters: FiltersConfig, *, late: bool) -> None:
    refuse(
        bool(filters.function) and not is_function(filters.function),
        f"filters.function must name a function of yours, got {filters.function!r}",
        hint="write it as file.py:name; bounds on lengths, repetition and rewards are keys of [filters]",
        key="filters.function",
    )
    refuse(
        bool(filters.function) and late,
        "filters.function is asked by producers once rewards are known, but with reward.kind = late, or reward.workers, they come later",
        hint="choose a reward that is computed, or filter by filters.mean_reward, which looks at rewards when they come",
        key="filters.function",
    )
    refuse(
        bool(filters.options) and not filters.function,
        "filters.options are for filters.function, which names nothing",
        hint="set filters.function, or leave them out",
        key="filters.options",
    )
