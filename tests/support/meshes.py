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

from streamrl.config.loss import LossConfig
from streamrl.config.tree import Config
from streamrl.core.batches import TrainBatch
from streamrl.errors import TrainingError
from streamrl.models.tensor_files import join_tensors
from streamrl.schemas.versions import Version
from streamrl.trainers.factory import learning_rates
from streamrl.trainers.protocol import Trainer
from streamrl.trainers.ranks.local import open_trainer
from streamrl.trainers.torch.kernels import Kernels
from streamrl.trainers.torch.trainer import TorchTrainer
from tests.support import trainers
from tests.support.batches import train_batch
from tests.support.errors import raises
from tests.support.preloaded import Preloaded

Mesh = dict[str, Any]
"""Settings of `trainer` that say how ranks share a model."""
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


HALF = STEPS // 2


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
        if step + 1 in (HALF, STEPS):
            trainer.save(where / str(step + 1), b"at", version=Version(0, step + 1)).result()
    norms = [result.metrics["train/grad_norm"] for result in results]
    return Ran(begun, [result.digest for result in results], norms, where / str(STEPS), where / str(HALF))


def config(loss: LossConfig | None = None, **trainer: Any) -> Config:
    """Few tokens a pass, so that ranks have several micro-batches, and unequally many."""
    return trainers.config(loss, **{"micro_tokens": 48, "minibatches": 2, "rank_timeout_s": 120.0, **trainer})


Runs = Callable[[Mesh], Ran]


def runs(config: Callable[[Mesh], Config], model_dir: Path, folders: pytest.TempPathFactory) -> Runs:
    """`runs(...)(mesh)`: a run by the trainer of `config(mesh)` and its ranks, made once."""

    @cache
    def made(items: tuple[tuple[str, Any], ...]) -> Ran:
        with open_trainer(config(dict(items)), model_dir) as trainer:
            return run(trainer, folders.mktemp("run"))

    return lambda mesh: made(tuple(mesh.items()))


def goes_on(trainer: Trainer, checkpoint: Path, made: Ran, until: int = STEPS) -> None:
    """From the checkpoint at half of a run, with its bits."""
    assert trainer.load(checkpoint) == b"at"
    assert [trainer.step(batch(step)).digest for step in range(HALF, until)] == made.digests[HALF:until]


def same(some: Path, others: Path, *stems: str) -> bool:
    """Whether two checkpoints have the same tensors, bit by bit and in the same types."""
    for stem in stems:
        ours, theirs = parameters(some, stem), parameters(others, stem)
        assert {name: value.dtype for name, value in ours.items()} == {name: value.dtype for name, value in theirs.items()}
        if not all(torch.equal(ours[name], theirs[name]) for name in ours):
            return False
    return True


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


def check_mesh(made: Ran, one: Ran, truth: dict[str, Any], alone: Trainer, initial: Path) -> None:
    """A run of a mesh has the digests of one rank, and ends as near to that as that to a run in float64."""
    assert made.begun == one.begun == alone.digest()
    assert alone.load(made.checkpoint) == b"at"
    assert alone.digest() == made.digests[-1]
    far = apart(parameters(one.checkpoint), truth)
    assert 0 < far < 1e-3 * apart(truth, parameters(initial))  # else the bound would hold for anything
    assert 0 < apart(parameters(made.checkpoint), parameters(one.checkpoint)) <= BOUND * far
    assert made.norms == pytest.approx(one.norms, rel=1e-3)
