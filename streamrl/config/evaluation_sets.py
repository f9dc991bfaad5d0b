"""The sets of problems of a configuration, each with all that it takes from other sections."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace

from streamrl.config.bounds import refuse
from streamrl.config.evaluation import EvaluationSetConfig
from streamrl.config.tree import Config
from streamrl.errors import ConfigError, SchemaError
from streamrl.schemas.subjects import check_name
from streamrl.schemas.tasks import Sampling, turn_sampling

HELDOUT = "heldout"
"""Name of the set that `data.heldout` is."""
_DATA_KEYS = (
    *("prompt_key", "label_key", "metadata_key", "tools_key", "reward_key", "images_key", "sampling_key"),
    *("chat_template_kwargs", "max_prompt_tokens"),
)


class ProblemSet(msgspec.Struct, frozen=True, kw_only=True):
    """One set."""

    name: str
    key: str
    """Where the configuration has it, such as `evaluation.sets[gsm8k]`."""
    n: int
    num_problems: int
    every: int
    pass_reward: float
    sampling: Sampling
    config: Config
    """The run's, with what the set has of its own in `data` (its path as `heldout`), `reward` and `producer`."""

    @property
    def path(self) -> str:
        """Its rows, with the slice."""
        return self.config.data.heldout


def problem_sets(config: Config) -> tuple[ProblemSet, ...]:
    """All sets in their order, that of `data.heldout` first.

    Raises:
        ConfigError: a set has no name or path, one that cannot be used, or the name of another; its sampling is none.
    """
    found = [_heldout(config)] if config.data.heldout else []
    for index, one in enumerate(config.evaluation.sets):
        place = f"evaluation.sets[{one.name or index}]"
        refuse(not one.name, f"{place}.name must be set, got nothing", hint="its metrics are called by it", key="evaluation.sets")
        refuse(not one.path, f"{place}.path must name rows, got nothing", hint="set it to a JSONL or Parquet file", key="evaluation.sets")
        refuse(
            one.name in {other.name for other in found},
            f"expected a name of its own for each set of problems, got {one.name!r} twice",
            hint=f"rename one of them; {HELDOUT!r} is the set of data.heldout",
            key="evaluation.sets",
        )
        found.append(_of_table(config, one, place))
    return tuple(found)


def _heldout(config: Config) -> ProblemSet:
    evaluation = config.evaluation
    return ProblemSet(
        name=HELDOUT,
        key="data.heldout",
        n=evaluation.n,
        num_problems=evaluation.num_problems,
        every=evaluation.every,
        pass_reward=evaluation.pass_reward,
        sampling=evaluation.sampling,
        config=config,
    )


def _of_table(config: Config, one: EvaluationSetConfig, place: str) -> ProblemSet:
    evaluation = config.evaluation
    try:
        check_name("name of a set of problems", one.name)
        sampling = turn_sampling(evaluation.sampling, one.sampling)
    except SchemaError as error:
        raise ConfigError(f"{error.message}, in {place}", hint=error.hint, key="evaluation.sets") from error
    refuse(
        bool(one.reward.options) and not one.reward.kind,
        f"{place}.reward.options are of a reward of its own, got none in {place}.reward.kind",
        hint="name it, or leave the options out",
        key="evaluation.sets",
    )
    own: dict[str, Any] = {key: value for key in _DATA_KEYS if (value := getattr(one, key)) is not None}
    reward = config.reward
    if one.reward.kind:
        # A reward of its own is that of all its rows, unless it says which field of them has theirs.
        own = {"reward_key": ""} | own
        reward = replace(reward, kind=one.reward.kind, options=one.reward.options, key="")
    if one.reward.key:
        reward = replace(reward, key=one.reward.key)
    producer = replace(
        config.producer, function=one.function or config.producer.function, options={**config.producer.options, **one.options}
    )
    return ProblemSet(
        name=one.name,
        key=place,
        n=evaluation.n if one.n is None else one.n,
        num_problems=evaluation.num_problems if one.num_problems is None else one.num_problems,
        every=evaluation.every if one.every is None else one.every,
        pass_reward=evaluation.pass_reward if one.pass_reward is None else one.pass_reward,
        sampling=sampling,
        config=replace(config, data=replace(config.data, heldout=one.path, **own), reward=reward, producer=producer),
    )
