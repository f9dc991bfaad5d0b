"""Trainers by the settings that a test names, and the types of the fixtures that make their models and batches."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from streamrl.config.loss import LossConfig
from streamrl.config.tree import Config, DebugConfig, OptimizerConfig, RunConfig, TrainerConfig
from streamrl.core.batches import TrainBatch
from streamrl.trainers.factory import make_trainer

Rollouts = Callable[..., TrainBatch]
Models = Callable[..., Path]
DIRECT = LossConfig(proximal="sampler")
"""Without a pass before the first optimizer step."""


def config(loss: LossConfig | None = None, *, numerics: Any = "fast", rate: float = 1e-3, limit: int = 0, **trainer: Any) -> Config:
    """A configuration with a rate that is constant; `limit`: positions of a row that there is memory for."""
    options: dict[str, Any] = {"optimizer": OptimizerConfig(learning_rate=rate, final_fraction=1.0), **trainer}
    run, debug = RunConfig(numerics=numerics), DebugConfig(memory_tokens=limit)
    return Config(run=run, trainer=TrainerConfig(**options), loss=loss or LossConfig(), debug=debug)


def make(directory: Path, loss: LossConfig | None = None, **settings: Any) -> Any:
    """The trainer of this process, by the settings of `config`."""
    return make_trainer(config(loss, **settings), directory)
