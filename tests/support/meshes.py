"""Runs of a few tiny steps on meshes of ranks, and how far they may end from each other."""

import math
import os
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from streamrl.config.tree import Config
from streamrl.core.batches import TrainBatch
from streamrl.errors import TrainingError
from streamrl.schemas.versions import Version
from streamrl.trainers.factory import learning_rates
from streamrl.trainers.parts import join_tensors
from streamrl.trainers.protocol import Trainer
from streamrl.trainers.ranks.local import open_trainer
from streamrl.trainers.torch.kernels import Kernels
from streamrl.trainers.torch.trainer import TorchTrainer
from tests.support.batches import train_batch
from tests.support.errors import raises
from tests.support.preloaded import Preloaded

STEPS = 20
BOUND = 2.0
"""How far from one rank another mesh may end, as a multiple of how far one rank ends from a run in float64: docs/training.md."""


def slow(*values: object, id: str | None = None) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow, id=id)


def soak(*values: object, id: str | None = None) -> Any:
    return pytest.param(*values, marks=pytest.mark.soak, id=id)


class Ran(NamedTuple):
    """A run of STEPS steps."""

    begun: str
    digests: list[str]
    norms: list[float]
    checkpoint: Path
    half: Path


def batch(step: int, groups: int = 4) -> TrainBatch:
    """Every third batch has one group, which leaves ranks without work."""
    rng = np.random.default_rng(step)
    samples = [
        {
            "prompt": rng.integers(2, 16, 2 + task).tolist(),
            "answer": (answer := rng.integers(2, 16, rng.integers(2, 9)).tolist()),
            "mu": (-2.5 + 0.5 * rng.standard_normal(len(answer))).tolist(),
            "reward": float(rollout == task % 3),
            "task": task,
            "rollout": rollout,
        }
        for task in range(1 if step % 3 == 2 else groups)
        for rollout in range(3)
    ]
    return train_batch(samples, stage_step=step)


def killed_in_a_step(config: Config, model_dir: Path, preloaded: Preloaded, victim: int = 0) -> None:
    """Another rank is killed between two steps: all that train with it are told, within two."""
    with raises(TrainingError, what=ANY) as caught, open_trainer(config, model_dir) as trainer:
        trainer.step(batch(0))
        ranks = preloaded.running()
        assert len(ranks) == config.trainer.ranks - 1
        os.kill(ranks[victim], signal.SIGKILL)
        for step in range(1, 3):
            trainer.step(batch(step))
    assert "logs/trainer-<rank>.log" in caught.value.hint


def run(trainer: Trainer, where: Path) -> Ran:
    """Train STEPS batches, with checkpoints at half of them and at the end."""
    begun = trainer.digest()
    results = []
    for step in range(STEPS):
        results.append(trainer.step(batch(step)))
        if step + 1 in (STEPS // 2, STEPS):
            trainer.save(where / str(step + 1), b"at", version=Version(0, step + 1)).result()
    norms = [result.metrics["train/grad_norm"] for result in results]
    return Ran(begun, [result.digest for result in results], norms, where / str(STEPS), where / str(STEPS // 2))


Runs = Callable[[tuple[int, int]], Ran]


def runs(config: Callable[[tuple[int, int]], Config], model_dir: Path, folders: pytest.TempPathFactory) -> Runs:
    """`runs(...)(mesh)`: a run by the trainer of `config(mesh)` and its ranks, made once."""

    @cache
    def made(mesh: tuple[int, int]) -> Ran:
        with open_trainer(config(mesh), model_dir) as trainer:
            return run(trainer, folders.mktemp("run"))

    return made


def in_float64(config: Config, model_dir: Path) -> TorchTrainer:
    """The trainer of a configuration of one rank, on a CPU, with parameters of float64."""
    return TorchTrainer(
        model_dir,
        trainer=config.trainer,
        loss=config.loss,
        learning_rate=learning_rates(config),
        kernels=Kernels(),
        dtype=torch.float64,
        device=torch.device("cpu"),
        deterministic=True,
    )


def parameters(checkpoint: Path, stem: str = "model") -> dict[str, Any]:
    """Tensors of a checkpoint by name, whatever mesh wrote it."""
    with TemporaryDirectory() as folder:
        join_tensors(checkpoint, f"{stem}.safetensors", Path(folder) / "whole")
        return {name: value.clone() for name, value in load_file(Path(folder) / "whole").items()}


def apart(some: dict[str, Any], others: dict[str, Any]) -> float:
    return max(float((some[name].double() - others[name].double()).abs().max()) for name in some)


def check_run(made: Ran, alone: Ran, truth: dict[str, Any], *, moved: float = math.inf) -> None:
    """A run by megatron-core beside the torch backend's on one rank, by its distance from one in float64, which has moved so far."""
    far = apart(parameters(alone.checkpoint), truth)
    assert 0 < far < 1e-3 * moved  # else the bound would hold for anything
    assert made.begun == alone.begun
    assert apart(parameters(made.checkpoint), truth) <= 2 * BOUND * far
    assert made.norms == pytest.approx(alone.norms, rel=1e-3)
