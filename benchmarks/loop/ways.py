"""The ways in which a benchmark runs one loop, and the configurations it runs."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path

import msgspec
from msgspec.structs import replace

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
    WarmupConfig,
)
from streamrl.errors import ConfigError
from streamrl.schemas.tasks import Sampling


class Way(StrEnum):
    """How the parts of a loop are bound together."""

    STREAM = "stream"
    """`streamrl up`: nats-server, feeder, producer, engine and trainer, each a process."""
    PIPES = "pipes"
    """No bus: the engine and those who ask it in one process, the trainer in another, pipes between."""
    QUEUES = "queues"
    """No bus: all in one process, two queues between the thread that decodes and the one that trains."""
    MEMORY = "memory"
    """The product's services in one process over the in-memory bus: the stream's logic without a server."""


OVERHEAD, TAIL = "overhead", "tail"
"""The two parts of the benchmark."""
ASYNCHRONOUS, LOCKSTEP = "asynchronous", "lockstep"
TITLES = {
    Way.STREAM: "stream: 5 processes over nats-server",
    Way.PIPES: "no bus: 2 processes and pipes",
    Way.QUEUES: "no bus: 1 process and queues",
    Way.MEMORY: "in-memory bus: 1 process",
}


class LoopSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One benchmark."""

    ways: tuple[Way, ...] = (Way.STREAM, Way.QUEUES, Way.PIPES, Way.MEMORY)
    batches: int = 120
    """Trained in every run of the first part."""
    skip: int = 30
    """The first of them, which are not measured: start-up, full queues."""
    rounds: int = 5
    """Each runs every way once, one after the other."""
    backend: str = "torch"
    """`torch`: the quickstart's model and trainer; `table`: the table engine and trainer, without torch (for tests)."""
    tail_batches: int = 30
    tail_skip: int = 6
    tail_rounds: int = 3
    tail_staleness: int = 8
    """tasks.max_staleness of the asynchronous run; the other one has 0."""
    tail_delay_s: float = 0.02
    """Mean time of a token."""
    tail_sigma: float = 1.5
    """Spread of the completions' paces (debug.token_delay_sigma)."""

    def __post_init__(self) -> None:
        if not (0 < self.skip < self.batches and 0 < self.tail_skip < self.tail_batches):
            raise ConfigError(
                f"expected some batches to be left out at the start and some to be measured, got {self.skip} of {self.batches} and "
                f"{self.tail_skip} of {self.tail_batches}",
                hint="for example --batches 60 --skip 12",
            )
        if self.rounds < 1 or self.tail_rounds < 0:
            raise ConfigError(f"expected at least one round, got {self.rounds} and {self.tail_rounds}")


def write_problems(path: Path) -> None:
    """The quickstart's sums, as training rows."""
    rows = ({"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(10, 100) for b in range(2, 10))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def quickstart(spec: LoopSpec, directory: Path, *, name: str, model: str = "") -> Config:
    """The quickstart's configuration without warm-up and evaluation, for a fixed number of batches.

    Args:
        spec: how many.
        directory: holds the problems, and the runs.
        name: of the run.
        model: directory of the policy it starts from; empty: a new one.
    """
    table = spec.backend == "table"
    return Config(
        run=RunConfig(name=name, dir=str(directory / "runs"), steps=spec.batches),
        model=ModelConfig(path=model, max_len=32),
        data=DataConfig(train=str(directory / "train.jsonl"), max_prompt_tokens=16),
        tasks=TasksConfig(batch_tasks=64, num_rollouts=8, max_staleness=1, drop_zero_variance=False),
        sampling=Sampling(max_new_tokens=5),
        producer=ProducerConfig(concurrency=64),
        engine=EngineConfig(kind="table" if table else "local", slots=128),
        trainer=TrainerConfig(
            backend="table" if table else "torch",
            optimizer=OptimizerConfig(learning_rate=6e-4, final_fraction=0.3, beta1=0.9, beta2=0.95, clip_norm=1.0),
        ),
    )


def warm(config: Config) -> Config:
    """The same with the quickstart's warm-up, ending with the first batch after it: gives the policy that measured runs start from."""
    return replace(
        config,
        run=replace(config.run, steps=1),
        warmup=WarmupConfig(max_steps=200, until=0.2, learning_rate=2e-3),
    )


def heavy_tail(spec: LoopSpec, directory: Path, *, name: str, lockstep: bool) -> Config:
    """The table engine with an artificial time per token whose spread over completions is heavy-tailed; only staleness differs."""
    return Config(
        run=RunConfig(name=name, dir=str(directory / "runs"), steps=spec.tail_batches),
        model=ModelConfig(max_len=32),
        data=DataConfig(train=str(directory / "train.jsonl"), max_prompt_tokens=16),
        tasks=TasksConfig(
            batch_tasks=16,
            num_rollouts=4,
            max_staleness=0 if lockstep else spec.tail_staleness,
            stale="wait",
            drop_zero_variance=False,
        ),
        sampling=Sampling(max_new_tokens=8, ignore_eos=True),
        producer=ProducerConfig(concurrency=256),
        engine=EngineConfig(kind="table", slots=1024),
        trainer=TrainerConfig(backend="table", checkpoint_every=1000, optimizer=OptimizerConfig(learning_rate=0.01)),
        debug=DebugConfig(token_delay_s=spec.tail_delay_s, token_delay_sigma=spec.tail_sigma),
    )
