"""A critic that megatron-core runs beside the policy, on every mesh, beside the torch backend's: values, training, checkpoints."""

from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import ANY

import numpy as np
import numpy.typing as npt
import pytest
import torch

from streamrl.config.loss import CriticConfig, LossConfig
from streamrl.config.tree import Config
from streamrl.errors import TrainingError
from streamrl.schemas.versions import Version
from streamrl.trainers.factory import make_trainer
from streamrl.trainers.protocol import StepResult
from streamrl.trainers.ranks.local import open_trainer
from tests.support import meshes
from tests.support.errors import raises
from tests.support.meshes import BOUND, Mesh, apart, batch, in_float64, parameters, slow, soak
from tests.support.same_tensors import shapes
from tests.support.scoring import prepared
from tests.support.steps import check_alike
from tests.support.trainers import Models

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
TORCH: Mesh = {"backend": "torch"}
TENSOR: Mesh = {"ranks": 2, "tensor": 2}
STAGES: Mesh = {"ranks": 2, "pipeline": 2}
BOTH: Mesh = {"ranks": 4, "tensor": 2, "pipeline": 2}
EXPERTS: Mesh = {"ranks": 2, "experts": 2}
SHARDS: Mesh = {**TORCH, "ranks": 2, "shards": 2}
BFLOAT16: Mesh = {"dtype": "bfloat16"}
CONTEXT: Mesh = {"ranks": 2, "context": 2}
LARGE: Mesh = {"ranks": 8, "tensor": 2, "pipeline": 2}
DENSE = [slow(BOTH), slow(CONTEXT), *map(soak, ({}, TENSOR, STAGES, {"ranks": 2}, LARGE, {**LARGE, "context": 2}))]
MIXTURES = [slow(EXPERTS), soak({}), soak({"ranks": 4, "experts": 2})]
STEPS, HALF = 8, 4
"""Of them the first one is the critic's alone."""
VALUE_METRICS = ("rollout/values", "rollout/returns", *(f"train/value_{what}" for what in ("loss", "clipfrac", "grad_norm", "norm")))


def config(mesh: Mesh, *, path: object = "", **changes: Any) -> Config:
    critic = CriticConfig(path=str(path), learning_rate=3e-3, clip=0.05, only_steps=1)
    loss = LossConfig(advantage="ppo", gae_lambda=0.9, critic=critic)
    return meshes.config(loss, **{"backend": "megatron", **mesh, **changes})


class Ran(NamedTuple):
    """A run of STEPS steps."""

    results: list[StepResult]
    values: list[npt.NDArray[np.float32]]
    """[T] of each batch, before its first optimizer step, as rank 0 has them."""
    half: Path
    checkpoint: Path


def run(trainer: Any, where: Path) -> Ran:
    """Train STEPS batches, with checkpoints behind HALF of them and at the end."""
    seen, results = prepared(trainer), list[StepResult]()
    for step in range(STEPS):
        results.append(trainer.step(batch(step)))
        if step + 1 in (HALF, STEPS):
            trainer.save(where / str(step + 1), b"at", version=Version(0, step + 1)).result()
    return Ran(results, [each.scores.values for each in seen], where / str(HALF), where / str(STEPS))


HEADS = {"vocab_size": 19, "num_attention_heads": 4, "num_key_value_heads": 2}


class Model:
    """A model of tokens that two ranks do not divide, the runs on it, each made once, and the critic of one in float64."""

    def __init__(self, initial: Path, folders: pytest.TempPathFactory) -> None:
        self.initial, self.folders, self.made = initial, folders, dict[str, Ran]()

    def __call__(self, mesh: Mesh) -> Ran:
        if str(mesh) not in self.made:
            with open_trainer(config(mesh), self.initial) as trainer:
                self.made[str(mesh)] = run(trainer, self.folders.mktemp("run"))
        return self.made[str(mesh)]

    @cached_property
    def exact(self) -> dict[str, torch.Tensor]:
        return parameters(run(in_float64(config(TORCH), self.initial), self.folders.mktemp("exact")).checkpoint, "critic")


@pytest.fixture(scope="module")
def dense(make_model: Models, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Tied: of the policy's embedding two stages have a copy, of the critic's the first one."""
    return Model(make_model(**HEADS), tmp_path_factory)


@pytest.fixture(scope="module")
def mixture(make_mixture: Models, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(make_mixture(**HEADS, tie_word_embeddings=False), tmp_path_factory)


def check_run(made: Ran, alone: Ran, exact: dict[str, torch.Tensor]) -> None:
    """Beside the torch backend on one rank: values, what is told of them, and the critic at the end, by its distance from float64."""
    check_alike(made.results, alone.results, *VALUE_METRICS, rel=1e-3, abs=1e-5)
    assert all(np.abs(ours - theirs).max() < 1e-4 for ours, theirs in zip(made.values, alone.values, strict=True))
    assert sum(one.metrics["train/value_clipfrac"] for one in alone.results) > 0
    assert not made.values[0].any() and made.values[-1].std() > 0.05
    # It began alone: the policy learns from the second batch on.
    digests = [result.digest for result in made.results]
    assert len(set(digests)) == STEPS and made.results[0].metrics["train/lr"] == 0 < made.results[1].metrics["train/grad_norm"]
    ours, theirs = parameters(alone.checkpoint, "critic"), parameters(made.checkpoint, "critic")
    assert shapes(theirs) == shapes(ours)
    far = apart(ours, exact)
    assert 0 < far < 1e-3 * float(exact["value_head.weight"].abs().max())  # else the bound would hold for anything
    assert apart(theirs, exact) <= 2 * BOUND * far


@pytest.mark.parametrize("mesh", DENSE, ids=str)
def test_a_critic_learns_what_torchs_does(dense: Model, mesh: Mesh) -> None:
    check_run(dense(mesh), dense(TORCH), dense.exact)


@pytest.mark.parametrize("mesh", MIXTURES, ids=str)
def test_a_critic_that_is_a_mixture_learns_what_torchs_does(mixture: Model, mesh: Mesh) -> None:
    """Experts divided over ranks, of which some have no sample of every third batch."""
    check_run(mixture(mesh), mixture(TORCH), mixture.exact)


def equal(some: Path, others: Path) -> bool:
    return meshes.same(some, others, "critic", "critic_optimizer")


@pytest.mark.parametrize("mesh", [slow({**BOTH, **BFLOAT16}), *map(soak, (TENSOR, BOTH, {**EXPERTS, **BFLOAT16}))], ids=str)
def test_a_restart_gives_the_same_bits(dense: Model, mixture: Model, mesh: Mesh, tmp_path: Path) -> None:
    model = mixture if "experts" in mesh else dense
    made = model(mesh)
    with open_trainer(config(mesh), model.initial) as trainer:
        trainer.step(batch(9))  # which is forgotten
        assert trainer.load(made.half) == b"at"
        found = [trainer.step(batch(step)) for step in range(HALF, STEPS)]
        trainer.save(tmp_path / "end", b"at", version=Version(0, STEPS)).result()
    expected = made.results[HALF:]
    assert [(one.digest, one.metrics) for one in found] == [(one.digest, one.metrics) for one in expected]
    assert len({one.metrics["train/value_norm"] for one in expected}) == len(expected)
    assert equal(tmp_path / "end", made.checkpoint)


@pytest.mark.parametrize(
    ("mesh", "other"),
    [
        slow(BOTH, SHARDS),
        soak(EXPERTS, SHARDS),
        soak({**TENSOR, **BFLOAT16}, {**SHARDS, **BFLOAT16}),
        soak({**STAGES, **BFLOAT16}, {**TORCH, **BFLOAT16}),
        soak(STAGES, TENSOR),
        soak(TORCH, BOTH),
    ],
    ids=str,
)
def test_another_mesh_goes_on_with_masters_and_moments(dense: Model, mixture: Model, mesh: Mesh, other: Mesh, tmp_path: Path) -> None:
    """There and back: each writes what it has read."""
    model = mixture if "experts" in mesh else dense
    made = model(mesh)
    with open_trainer(config(other), model.initial) as trainer:
        assert trainer.load(made.half) == b"at"
        assert trainer.digest() == made.results[HALF - 1].digest
        trainer.save(tmp_path / "there", b"at", version=Version(0, HALF)).result()
        theirs = trainer.step(batch(HALF))
    check_alike([theirs], made.results[HALF : HALF + 1], *VALUE_METRICS, rel=0.03 if "dtype" in mesh else 1e-3, abs=1e-3)
    with open_trainer(config(mesh), model.initial) as trainer:
        assert trainer.load(tmp_path / "there") == b"at"
        trainer.save(tmp_path / "back", b"at", version=Version(0, HALF)).result()
        found = [trainer.step(batch(step)) for step in range(HALF, STEPS)]
    assert equal(tmp_path / "there", made.half) and equal(tmp_path / "back", made.half)
    assert [(one.digest, one.metrics) for one in found] == [(one.digest, one.metrics) for one in made.results[HALF:]]


@pytest.mark.parametrize("mesh", [slow({}), soak(BOTH)], ids=str)
def test_its_body_may_be_another_models_and_is_not_published(make_model: Models, dense: Model, mesh: Mesh) -> None:
    """Of another width and depth, with a head of its own, which the critic lacks."""
    sizes = {"hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    other = make_model(vocab_size=23, tie_word_embeddings=False, **sizes)
    found = []
    for asked in (TORCH, mesh):
        with open_trainer(config(asked, path=other), dense.initial) as trainer:
            found.append([trainer.step(batch(step)) for step in range(3)])
            assert {shard.name for shard in trainer.shards()} == parameters(dense.initial).keys()
    check_alike(found[1], found[0], *VALUE_METRICS, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(
    ("mesh", "sizes"),
    [slow({}, {"intermediate_size": 128}), soak(TENSOR, {"hidden_size": 16}), soak(STAGES, {"num_hidden_layers": 4})],
    ids=str,
)
def test_another_critic_or_none_is_refused(make_model: Models, dense: Model, mesh: Mesh, sizes: dict[str, int], tmp_path: Path) -> None:
    other = make_model(**HEADS, **sizes)
    make_trainer(config(TORCH, path=other), dense.initial).save(tmp_path / "other", b"", version=Version()).result()
    with open_trainer(Config(trainer=config(mesh).trainer), dense.initial) as trainer:
        assert trainer.load(tmp_path / "other") == b"", "the policy alone is wanted"
        trainer.save(tmp_path / "none", b"", version=Version()).result()
    for name, values in (("other", {"parameter": ANY}), ("none", {})):
        where = tmp_path / name
        with raises(TrainingError, what="a critic", path=str(where), **values), open_trainer(config(mesh), dense.initial) as trainer:
            trainer.load(where)
