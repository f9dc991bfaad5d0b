"""Errors that take a run: four batches in lockstep with a tabular policy, in process; then its trainer starts again from the beginning."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from streamrl.bus.memory import MemoryBus
from streamrl.config.tree import (
    Config,
    DataConfig,
    EngineConfig,
    ModelConfig,
    OptimizerConfig,
    RewardConfig,
    RunConfig,
    TasksConfig,
    TrainerConfig,
    WeightsConfig,
)
from streamrl.consumers.training.worker import main as trainer_main
from streamrl.data.model import ensure_model
from streamrl.runtime.rundir import RunDir
from streamrl.runtime.worker import Worker
from streamrl.schemas.subjects import KEY_LATEST, SAMPLES
from streamrl.schemas.tasks import Sampling
from tests.support.harness import make_run, run_to_end


async def other_digits() -> None:
    """Another learning rate, put into a run's config.json by hand: the same batches train to other parameters."""
    faster = OptimizerConfig(learning_rate=0.5)
    await _again(lambda config: replace(config, trainer=replace(config.trainer, optimizer=faster)))


async def other_batches() -> None:
    """Another batch size, put in by hand: the stream does not give the batches that the ledger has."""
    await _again(lambda config: replace(config, tasks=replace(config.tasks, batch_tasks=2)))


async def no_checkpoint() -> None:
    """All checkpoints are gone, and the sample stream has been trimmed: nothing leads back to the newest version."""
    run, config, bus = await _finished()
    shutil.rmtree(run.checkpoints)
    await bus.trim(SAMPLES, through=2)
    await trainer_main(Worker(config=config, run_dir=run, bus=bus, kind="trainer", index=0))


async def _finished() -> tuple[RunDir, Config, MemoryBus]:
    run, config = make_run(Path.cwd(), _config())
    ensure_model(config, run.model_dir)
    bus = MemoryBus(config.run.name, config.bus)
    await run_to_end(config, run, bus)
    return run, config, bus


async def _again(change: Callable[[Config], Config]) -> None:
    run, config, bus = await _finished()
    await bus.kv.delete(f"{KEY_LATEST}/main")  # its checkpoints are lost, so it trains by the ledger
    await trainer_main(Worker(config=change(config), run_dir=run, bus=bus, kind="trainer", index=0))


def _config() -> Config:
    Path("rows.jsonl").write_text("".join(json.dumps({"prompt": f"{a}+1=", "label": str(a + 1)}) + "\n" for a in range(9)))
    Path("reward.py").write_text("async def score(task, episode):\n    return float(sum(map(ord, episode.completion)) % 5)\n")
    return Config(
        run=RunConfig(name="demo", dir=".", steps=4, numerics="bitwise"),
        model=ModelConfig(max_len=16),
        data=DataConfig(train="rows.jsonl"),
        tasks=TasksConfig(batch_tasks=3, num_rollouts=2, max_staleness=0, drop_zero_variance=False),
        sampling=Sampling(max_new_tokens=4),
        reward=RewardConfig(kind=f"{Path.cwd() / 'reward.py'}:score"),
        engine=EngineConfig(kind="table", deterministic=True),
        trainer=TrainerConfig(backend="table"),
        weights=WeightsConfig(transport="bus"),
    )
