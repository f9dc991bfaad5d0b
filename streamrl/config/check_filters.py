"""What the section `filters` and the penalty on long answers may not say."""

from __future__ import annotations

from streamrl.config.bounds import refuse
from streamrl.config.loss import estimator_of, is_function
from streamrl.config.reward import LengthConfig
from streamrl.config.tree import Config

_LENGTH_READS = {
    "kimi": ("kind", "right", "weight"),
    "alp": ("kind", "right", "weight", "longest"),
    "cosine": ("kind", "right", "longest", "cosine_right", "cosine_wrong", "cosine_exceeded"),
}
"""By kind of `reward.length`, the keys that it reads."""


def check_filters(config: Config) -> None:
    """Raise ConfigError for bounds that contradict each other or could never be met."""
    _check_overlong(config)
    _check_length(config)
    _check_function(config)
    filters = config.filters
    refuse(
        0 < filters.max_tokens < filters.min_tokens,
        f"filters.max_tokens = {filters.max_tokens} is below filters.min_tokens = {filters.min_tokens}: every rollout would be refused",
        hint="raise filters.max_tokens, or lower filters.min_tokens",
        key="filters.max_tokens",
    )
    refuse(
        filters.min_tokens > config.model.max_len,
        f"filters.min_tokens = {filters.min_tokens} is above model.max_len = {config.model.max_len}: every rollout would be refused",
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


def _check_function(config: Config) -> None:
    filters = config.filters
    refuse(
        bool(filters.function) and not is_function(filters.function),
        f"filters.function must name a function of yours, got {filters.function!r}",
        hint="write it as file.py:name; bounds on lengths, repetition and rewards are keys of [filters]",
        key="filters.function",
    )
    refuse(
        bool(filters.function) and (config.reward.kind == "late" or config.reward.workers > 0),
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


def _check_overlong(config: Config) -> None:
    reward = config.reward
    longest = reward.overlong_length or config.sampling.max_new_tokens
    named = "reward.overlong_length" if reward.overlong_length else "sampling.max_new_tokens"
    refuse(
        reward.overlong_buffer > longest,
        f"reward.overlong_buffer = {reward.overlong_buffer} is above {named} = {longest}: every answer would be punished",
        hint=f"lower reward.overlong_buffer, or raise {named}",
        key="reward.overlong_buffer",
    )
    refuse(
        reward.overlong_length > 0 and reward.overlong_buffer == 0,
        f"reward.overlong_length = {reward.overlong_length} without reward.overlong_buffer: there is no penalty",
        hint="set reward.overlong_buffer, in tokens, or leave reward.overlong_length out",
        key="reward.overlong_length",
    )
    refuse(
        reward.overlong_buffer > 0 and config.loss.advantage in ("maxrl", "pass_at_k"),
        f"reward.overlong_buffer with loss.advantage = {config.loss.advantage}, which takes no rewards below 0: the penalty makes some",
        hint='take loss.advantage = "grpo", or leave the penalty out',
        key="reward.overlong_buffer",
    )


def _check_length(config: Config) -> None:
    length, advantage = config.reward.length, config.loss.advantage
    refuse(
        length.kind == "none" and length != LengthConfig(),
        "reward.length has numbers, but reward.length.kind is none",
        hint="set reward.length.kind = 'kimi', 'alp' or 'cosine', or leave them out",
        key="reward.length.kind",
    )
    refuse(
        length.kind != "none" and advantage in ("maxrl", "pass_at_k"),
        f"reward.length with loss.advantage = {advantage}, which takes no rewards below 0: length makes some",
        hint='take loss.advantage = "grpo", or leave reward.length out',
        key="reward.length.kind",
    )
    refuse(
        length.kind in ("kimi", "alp") and estimator_of(config.loss).greedy,
        f"reward.length.kind = {length.kind} rewards length by what other answers of the task were: the greedy answer of "
        f"loss.advantage = {advantage} would have a reward that hangs on the answers that it is the baseline of",
        hint="set reward.length.kind = 'cosine', or reward.overlong_buffer, which look at each answer alone",
        key="reward.length.kind",
    )
    read = _LENGTH_READS.get(length.kind, LengthConfig.__struct_fields__)
    for name in LengthConfig.__struct_fields__:
        refuse(
            name not in read and getattr(length, name) != getattr(LengthConfig(), name),
            f"reward.length.{name} is not read by kind {length.kind}",
            hint="leave it out",
            key=f"reward.length.{name}",
        )
