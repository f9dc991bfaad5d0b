"""What `bench hung` runs: rollouts that wait for a busy engine, and then for a tool that sometimes never answers."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from streamrl.config.tree import (
    Config,
    DataConfig,
    DebugConfig,
    EngineConfig,
    ModelConfig,
    OptimizerConfig,
    ProducerConfig,
    RunConfig,
    TasksConfig,
    TrainerConfig,
)
from streamrl.errors import ConfigError
from streamrl.schemas.tasks import Sampling

UNDISTURBED, HUNG = "undisturbed", "some rollouts hang"
_TOKENS = 8
CODE = '''
import asyncio
import random


async def producer(task, engine):
    """One turn; then, in a fixed choice of rollouts, a tool that never answers."""
    chat = engine.chat(task)
    await chat.generate()
    if random.Random(f"{task.index}.{engine.context.rollout_index}").random() < engine.options["hung"]:
        await asyncio.sleep(86400)
    return chat.episode()
'''
"""The user's code."""


class HungSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One benchmark."""

    rounds: int = 3
    """Each runs both, one after the other."""
    batches: int = 40
    """Trained in every run."""
    skip: int = 10
    """The first of them, which are not measured: credits that hung rollouts hold have to build up."""
    rollout_s: float = 2.0
    """Time of a rollout on the engine."""
    limit_s: float = 6.0
    """producer.idle_timeout_s."""
    hung: float = 0.05
    """Share of rollouts that hang."""
    slots: int = 32
    """Of the engine, which decides the rate."""
    batch_tasks: int = 8
    num_rollouts: int = 4
    staleness: int = 0
    """tasks.max_staleness; 0: `max_staleness`."""

    def __post_init__(self) -> None:
        if not 0 < self.skip < self.batches or self.rounds < 1 or not 0 <= self.hung < 1:
            raise ConfigError(
                f"expected rounds, some batches left out at the start and a share below 1, got {self.rounds} rounds, {self.skip} of "
                f"{self.batches} batches and {self.hung:g}",
                hint="for example --rounds 1 --batches 20 --skip 5",
            )

    @property
    def tasks_per_s(self) -> float:
        """What the engine allows."""
        return self.slots / (self.rollout_s * self.num_rollouts)

    @property
    def hung_tasks(self) -> float:
        """Share of tasks with a rollout that hangs."""
        return 1 - (1 - self.hung) ** self.num_rollouts

    @property
    def max_staleness(self) -> int:
        """S: as asked for; else the least with credits of twice the rate times the mean hold, at which no hung group is too old."""
        credits = 2 * self.tasks_per_s * (self.rollout_s + self.hung_tasks * self.limit_s)
        age = (self.rollout_s + self.limit_s) * self.tasks_per_s / self.batch_tasks
        return self.staleness or max(math.ceil(credits / self.batch_tasks) - 1, math.ceil(age) + 1)


def config_of(spec: HungSpec, directory: Path, *, name: str, hung: float) -> Config:
    """A run under `up` with table engine and trainer.

    Args:
        spec: of the benchmark.
        directory: holds the problems, the user's code and the runs.
        name: of the run.
        hung: share of rollouts that hang.
    """
    return Config(
        run=RunConfig(name=name, dir=str(directory / "runs"), steps=spec.batches),
        model=ModelConfig(max_len=32),
        data=DataConfig(train=str(directory / "train.jsonl"), max_prompt_tokens=16),
        tasks=TasksConfig(
            batch_tasks=spec.batch_tasks, num_rollouts=spec.num_rollouts, max_staleness=spec.max_staleness, drop_zero_variance=False
        ),
        sampling=Sampling(max_new_tokens=_TOKENS, ignore_eos=True),
        producer=ProducerConfig(
            function=f"{directory / 'code.py'}:producer", options={"hung": hung}, concurrency=1024, idle_timeout_s=spec.limit_s
        ),
        engine=EngineConfig(kind="table", slots=spec.slots),
        trainer=TrainerConfig(backend="table", checkpoint_every=1000, optimizer=OptimizerConfig(learning_rate=0.01)),
        debug=DebugConfig(token_delay_s=spec.rollout_s / _TOKENS, token_delay_sigma=0.0),
    )
