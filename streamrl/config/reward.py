"""The section `reward`, its rules, and the reward that a row names for its own tasks: a kind, or a table of kind and options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from streamrl.config.bounds import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section, refuse
from streamrl.config.data import DataConfig
from streamrl.config.loss import LossConfig, estimator_of, is_function
from streamrl.config.reward_kinds import BOXED, KINDS, LATE, NOT_OF_ROWS, options_of
from streamrl.errors import ConfigError
from streamrl.schemas.tasks import RewardSpec

_LENGTH_READS = {
    "kimi": ("kind", "right", "weight"),
    "alp": ("kind", "right", "weight", "longest"),
    "cosine": ("kind", "right", "longest", "cosine_right", "cosine_wrong", "cosine_exceeded"),
}
"""By kind of `reward.length`, the keys that it reads."""


class LengthConfig(Section, frozen=True, kw_only=True):
    """A reward on the length of answers, added to every reward when a batch is made (docs/algorithms.md)."""

    kind: Literal["none", "kimi", "alp", "cosine"] = "none"
    """`kimi`: by the shortest and the longest answer to the task (arXiv 2501.12599). `alp`: a price on tokens that rises with the share of
    answers that are right (arXiv 2506.05256). `cosine`: the reward itself goes along half a cosine of the length (arXiv 2502.03373)."""
    right: float = 1.0
    """An answer is right whose reward is at least this."""
    weight: PositiveFloat = 1.0
    """`kimi` and `alp`: times what length gives."""
    longest: NonNegativeInt = 0
    """`alp` and `cosine`: L, in sampled tokens of a whole rollout; 0: its sampling.max_new_tokens, which is of one turn."""
    cosine_right: tuple[float, float] = (2.0, 1.0)
    """The reward of right answers of no length, and of L."""
    cosine_wrong: tuple[float, float] = (-10.0, 0.0)
    """That of wrong ones."""
    cosine_exceeded: float = -10.0
    """That of answers of L tokens and more, right or wrong."""


class RewardConfig(Section, frozen=True, kw_only=True):
    """How episodes are scored."""

    kind: str = "exact_match"
    """`exact_match`, `gsm8k`, `math`, `dapo`, `deepscaler`, `f1`, `gpqa`, `random`, `remote`, `judge` or `python`, most of them also with
    `boxed_` in front (docs/rewards.md); a custom reward as `file.py:name`, `pkg.mod:name` or `pkg.mod.name`; or `late`: samples are
    published without one."""
    options: dict[str, Any] = {}
    """Those of a built-in reward; handed to a custom one as keyword arguments."""
    key: str = ""
    """Of a reward in named parts, the part that is trained; all are kept with the sample. Empty: the part `reward`, or their sum."""
    workers: NonNegativeInt = 0
    """Rewarders started with the run (docs/agents.md): producers publish samples at once, and these processes score them. `streamrl
    rewarder` joins more. 0: producers score, and hold a slot for it."""
    late_versions: NonNegativeInt = 8
    """Versions that a complete group waits for rewards that come late, by reward.kind = `late` or reward.workers; then it is dropped as
    `unrewarded`. 0: for ever."""
    overlong_buffer: NonNegativeInt = 0
    """Tokens below the greatest length over which a penalty grows from 0 to reward.overlong_penalty (soft overlong punishment, arXiv
    2503.14476, eq. 13), taken from every reward when a batch is made; 0: none."""
    overlong_penalty: NonNegativeFloat = 1.0
    """The greatest penalty."""
    overlong_length: NonNegativeInt = 0
    """The greatest length, in sampled tokens of a sample; 0: its own sampling.max_new_tokens, which is of one turn."""
    length: LengthConfig = LengthConfig()
    timeout_s: PositiveFloat = 10.0
    """A custom reward that takes longer for a rollout (a class with `score`: for a group) is cut off, and the rollout ends as `timeout`."""
    children: NonNegativeInt = 0
    """Processes in which one worker runs a custom reward, apart from those of its producer; a plain function (`def`) has one to itself
    while it runs. 0: one a core, at most 4."""
    concurrency: PositiveInt = 64
    """Calls of an `async` custom reward that one worker runs at once."""
    max_hung: PositiveInt = 2
    """Calls of a custom reward that may hang at once in one worker without holding up the others; when more do, their rollouts end as
    timeout before timeout_s (docs/user-code.md)."""


def check_reward(reward: RewardConfig, data: DataConfig, advantage: str) -> None:
    """Raise ConfigError for a kind that there is not, and for options that it does not take. Looks at no file and no code."""
    for key, given in (("data.reward_key", data.reward_key), ("reward.key", reward.key), ("reward.options", reward.options)):
        refuse(
            reward.kind == LATE and bool(given),
            f"{key} must be empty for reward.kind = late, whose rewards somebody else gives, got {given!r}",
            hint=f"remove {key}, or choose another reward.kind",
            key=key,
        )
    refuse(
        reward.kind.removeprefix(BOXED) == "dapo" and reward.key != "acc" and advantage in ("maxrl", "pass_at_k"),
        f"reward.kind = {reward.kind} gives 1 and -1, got it with loss.advantage = {advantage}, which takes no rewards below 0",
        hint='set reward.key = "acc", its part of 1 and 0',
        key="reward.kind",
    )
    if reward.kind != LATE and not is_function(reward.kind):
        options_of(reward.kind, reward.options)
    refuse(
        bool(data.reward_options) and not data.reward_key,
        "data.reward_options are of rewards that rows name, but data.reward_key names no field of the rows",
        hint="set data.reward_key, or give the options in reward.options",
        key="data.reward_options",
    )
    for kind, options in data.reward_options.items():
        refuse(
            kind not in KINDS,
            f"data.reward_options has options by built-in kind ({', '.join(KINDS)}), got {kind!r}",
            hint="those of boxed_math are those of math",
            key="data.reward_options",
        )
        options_of(kind, options, key=f"data.reward_options.{kind}")


def check_penalties(reward: RewardConfig, loss: LossConfig, max_new_tokens: int) -> None:
    """Raise ConfigError for the first rule about the length of answers that does not hold."""
    _check_overlong(reward, loss, max_new_tokens)
    _check_length(reward.length, loss)


def _check_overlong(reward: RewardConfig, loss: LossConfig, max_new_tokens: int) -> None:
    longest = reward.overlong_length or max_new_tokens
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
        reward.overlong_buffer > 0 and loss.advantage in ("maxrl", "pass_at_k"),
        f"reward.overlong_buffer with loss.advantage = {loss.advantage}, which takes no rewards below 0: the penalty makes some",
        hint='take loss.advantage = "grpo", or leave the penalty out',
        key="reward.overlong_buffer",
    )


def _check_length(length: LengthConfig, loss: LossConfig) -> None:
    advantage = loss.advantage
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
        length.kind in ("kimi", "alp") and estimator_of(loss).greedy,
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


def row_reward(said: object, shared: Mapping[str, Mapping[str, Any]]) -> RewardSpec:
    """What a row says, checked with `shared`, which is `data.reward_options`; the options given back are the row's alone.

    Raises:
        ConfigError: it is no built-in kind, or not with these options; who calls says which row.
    """
    table = {"kind": said} if isinstance(said, str) else said
    if not isinstance(table, Mapping) or not isinstance(table.get("kind"), str) or set(table) - {"kind", "options"}:
        raise _wrong_row(f"expected the name of a reward, or a table of kind and options, got {said!r:.200}")
    given = table.get("options") or {}
    if not isinstance(given, Mapping):
        raise _wrong_row(f"expected a table of options, got {given!r:.200}")
    # Parquet has every field in every row.
    spec = RewardSpec(str(table["kind"]), {str(name): value for name, value in given.items() if value is not None})
    if is_function(spec.kind):
        raise _wrong_row(f"a row names a built-in reward, got {spec.kind!r}", "user code is named in reward.kind alone")
    if forbidden := sorted(NOT_OF_ROWS & set(spec.options)):
        hint = "set them in data.reward_options"
        raise _wrong_row(f"a row may not say where its texts go, or how programs are kept apart, got {forbidden}", hint)
    options_of(spec.kind, whole(spec, shared), key="its reward")
    return spec


def whole(spec: RewardSpec, shared: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Its options over those that all rows of its kind share."""
    return {**shared.get(spec.kind.removeprefix(BOXED), {}), **spec.options}


def _wrong_row(message: str, hint: str = "docs/rewards.md says what a row may name") -> ConfigError:
    return ConfigError(message, hint=hint, key="data.reward_key")
