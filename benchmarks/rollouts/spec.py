"""The options of `bench rollouts`, and the configuration that it gives the stack."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from benchmarks.rollouts.flags import CONFIGURED, FLAG_SETS, LONE_SETS
from streamrl.config.check import check
from streamrl.config.load import load
from streamrl.config.tree import Config, EvaluationConfig
from streamrl.errors import ConfigError
from streamrl.schemas.tasks import Sampling

STACK, PLAIN, TOGETHER = "the whole stack", "plain client", "plain client, groups"
"""The contenders. The last one asks for all answers to a prompt in one request."""
LEFT_OUT, BEST, SLOTS = "left out", "best flags", "slots"
"""Names of facts."""
MOST_SETS = 7
"""A sweep starts a server for each, and one more for those that helped, together."""


class RolloutsSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One benchmark."""

    config: str
    """File of the run."""
    changes: tuple[str, ...] = ()
    """`SECTION.KEY=VALUE`."""
    rollouts: tuple[int, ...] = (2048,)
    """Rollouts of a round, one number for each length or one for all; rounded up to whole groups."""
    tokens: tuple[int, ...] = (10, 300)
    """Lengths of the answers, which do not end by themselves."""
    plain: bool = False
    """Have a plain client ask the same servers, too."""
    sweep: bool = False
    """Compare sets of SGLang's flags first, and take the best of them."""
    sets: tuple[str, ...] = LONE_SETS
    """Sets of flags that the sweep compares."""
    sweep_s: float = 360.0
    """No set is begun this long after the sweep's start."""
    start_s: float = 150.0
    """A server that has not started by then is left out of the sweep."""
    rounds: int = 1

    def __post_init__(self) -> None:
        if not self.config:
            raise ConfigError("expected the file of a run, got none", hint="for example streamrl bench rollouts run.toml --plain")
        if not self.tokens or len(self.rollouts) not in (1, len(self.tokens)) or min(*self.tokens, *self.rollouts, self.rounds) < 1:
            raise ConfigError(
                f"expected lengths, and one number of rollouts or one for each of them, got {self.tokens} and {self.rollouts}",
                hint="for example --tokens 10,300 --rollouts 4096,1024",
            )
        if unknown := [name for name in self.sets if name not in FLAG_SETS]:
            raise ConfigError(f"--sets: expected some of {', '.join(FLAG_SETS)}, got {unknown[0]!r}", option="--sets", got=unknown[0])
        if (count := len(self.compared)) > MOST_SETS:
            raise ConfigError(f"--sets: expected at most {MOST_SETS}, {CONFIGURED!r} included, got {count}", option="--sets", got=count)

    @property
    def compared(self) -> tuple[str, ...]:
        """The sets of the sweep, in their order; what the others are compared with comes first."""
        return tuple(dict.fromkeys((CONFIGURED, *self.sets)))

    def rounds_of(self) -> Sequence[tuple[int, int]]:
        """(tokens of an answer, rollouts) of each length."""
        counts = self.rollouts * len(self.tokens) if len(self.rollouts) == 1 else self.rollouts
        return tuple(zip(self.tokens, counts, strict=True))


def config_of(spec: RolloutsSpec, directory: Path) -> Config:
    """The run's configuration without what a trainer, an evaluation or an end of its own would add.

    Raises:
        ConfigError: the file cannot be used, or names what has no engine here: a cluster of Ray, supervised training.
    """
    config = load(spec.config, spec.changes)
    for key, found in (("ray.address", bool(config.ray.address)), ("run.kind", config.run.kind == "sft")):
        if found:
            raise ConfigError(f"bench rollouts: expected a run of engines and producers on this host, got {key} set", key=key)
    if spec.plain and not config.engine.workers:
        raise ConfigError("--plain: expected engines of the run's own to be asked, got engine.workers = 0", key="engine.workers")
    if spec.sweep and not config.engine.traits.server:
        raise ConfigError(
            f"--sweep: expected an engine that is started with flags, got engine.kind = {config.engine.kind!r}",
            hint='only engine.kind = "sglang" has some',
            key="engine.kind",
        )
    longest = max(spec.tokens)
    config = replace(
        config,
        run=replace(config.run, name="bench-rollouts", dir=str(directory / "runs")),
        model=replace(config.model, max_len=max(config.model.max_len, config.data.max_prompt_tokens + longest)),
        data=replace(config.data, heldout=""),
        evaluation=EvaluationConfig(),
        warmup=replace(config.warmup, max_steps=0),
        bus=replace(config.bus, url=""),
        gateway=replace(config.gateway, workers=0),
        weights=replace(config.weights, transport="shm"),
        # A worker that was started again would be measured while it loads.
        supervise=replace(config.supervise, max_restarts=0),
        sampling=sampling_of(config.sampling, longest),
    )
    check(config)
    return config


def sampling_of(sampling: Sampling, tokens: int) -> Sampling:
    """The same distribution for answers of that many tokens, whatever they say."""
    unended: dict[str, Any] = {"stop": (), "stop_token_ids": (), "json_schema": "", "regex": ""}
    return replace(sampling, max_new_tokens=tokens, ignore_eos=True, **unended)


def with_tokens(config: Config, tokens: int) -> Config:
    """The configuration for answers of that many tokens."""
    return replace(config, sampling=sampling_of(config.sampling, tokens))


def num_tasks(config: Config, rollouts: int) -> int:
    """Return how many tasks give at least `rollouts` rollouts."""
    return -(-rollouts // config.group_size)


def in_flight(config: Config) -> int:
    """Tasks that all producers together have in hand."""
    return max(1, config.producer.workers) * config.producer.concurrency
