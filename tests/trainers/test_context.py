"""Ranks that share packed rows over gloo: the same digests, log-probs and gradients as one rank. Rank 0 is this process."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from streamrl.config.loss import CorrectionConfig, ExpertsConfig, KLConfig, LossConfig, RejectionConfig
from streamrl.config.tree import OptimizerConfig
from streamrl.core.batches import TrainBatch
from streamrl.errors import ConfigError
from streamrl.schemas.versions import Version
from streamrl.trainers.factory import make_trainer
from streamrl.trainers.protocol import TokenValues
from streamrl.trainers.ranks.local import open_trainer
from tests.support.batches import train_batch
from tests.support.compilers import COMPILES
from tests.support.errors import raises
from tests.support.meshes import (
    BOUND,
    HALF,
    Mesh,
    Runs,
    apart,
    batch,
    check_mesh,
    config,
    goes_on,
    in_float64,
    killed_in_a_step,
    parameters,
    run,
    runs,
    slow,
    soak,
)
from tests.support.preloaded import Preloaded
from tests.support.trainers import Models

# Meshes of up to four processes, on however few cores there are.
pytestmark = [pytest.mark.process, *COMPILES]
MESHES = [slow({"ranks": 4, "shards": 2, "context": 2}), soak({"ranks": 2, "context": 2}), soak({"ranks": 3, "shards": 3, "context": 3})]
"""Two copies in two parts for two rows, two ranks with the whole model each, one row over three parts."""


@pytest.fixture(scope="module")
def ran(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return runs(lambda mesh: config(**mesh), model_dir, tmp_path_factory)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_ranks_that_share_rows_end_as_near_to_one_rank_as_that_to_float64(ran: Runs, mesh: Mesh, model_dir: Path, tmp_path: Path) -> None:
    truth = parameters(run(in_float64(config(), model_dir), tmp_path).checkpoint)
    check_mesh(ran(mesh), ran({}), truth, make_trainer(config(), model_dir), model_dir)
    with open_trainer(config(**mesh), model_dir) as trainer:
        assert [trainer.step(batch(step)).digest for step in range(2)] == ran(mesh).digests[:2]
        goes_on(trainer, ran(mesh).half, ran(mesh), HALF + 3)


def long_batch() -> TrainBatch:
    """Four samples of 512 tokens, of two groups; a fourth of each is predicted, anywhere in it."""
    rng = np.random.default_rng(0)
    samples = [
        {
            "prompt": rng.integers(2, 16, 2).tolist(),
            "answer": rng.integers(2, 16, 510).tolist(),
            "mask": (mask := rng.random(510) < 0.25).tolist(),
            "mu": np.where(mask, -3 + 0.5 * rng.standard_normal(510), 0).tolist(),
            "reward": float(index % 2),
            "task": index // 2,
            "rollout": index % 2,
        }
        for index in range(4)
    ]
    return train_batch(samples)


@pytest.mark.parametrize("rows", [512, slow(2048)])
def test_log_probs_and_gradient_of_long_samples_are_those_of_one_rank(make_model: Models, tmp_path: Path, rows: int) -> None:
    """A row of one sample, over which the ranks' work is exactly equal, and one of four, where a chunk is half a sample."""
    directory = make_model(max_position_embeddings=1024)
    given = long_batch()
    # A rate of 0 leaves the parameters; after one step Adam's first moment is the gradient, not clipped, times 1 - beta1.
    changes: dict[str, Any] = {"minibatches": 1, "micro_tokens": rows, "optimizer": OptimizerConfig(learning_rate=1e-3, clip_norm=0.0)}
    exact, alone = in_float64(config(**changes), directory), make_trainer(config(attention="packed", **changes), directory)
    first = {name: trainer.step(given) for name, trainer in (("exact", exact), ("alone", alone))}
    for name, trainer in (("exact", exact), ("alone", alone)):
        trainer.save(tmp_path / name, b"", version=Version(0, 1)).result()
    with open_trainer(config(ranks=2, context=2, **changes), directory) as trainer:
        first["shared"] = trainer.step(given)
        trainer.save(tmp_path / "shared", b"", version=Version(0, 1)).result()
        second = trainer.step(replace(given, stage_step=1, version=Version(0, 1)))
    assert np.isfinite(second.metrics["train/loss"])
    assert first["shared"].choices is not None and first["shared"].choices.row_length == rows
    values = {name: result.tokens for name, result in first.items()}
    assert all(isinstance(found, TokenValues) for found in values.values())
    logprobs: dict[str, Any] = {name: found.logprobs for name, found in values.items() if found is not None}
    far = np.abs(logprobs["alone"] - logprobs["exact"]).max()
    assert 0 < far < 1e-4
    assert np.abs(logprobs["shared"] - logprobs["exact"]).max() <= BOUND * far
    moments = {name: parameters(tmp_path / name, "optimizer") for name in first}
    gradient = {name: {key: value for key, value in found.items() if not key.endswith(".master")} for name, found in moments.items()}
    far = apart(gradient["alone"], gradient["exact"])
    assert far > 0
    assert apart(gradient["shared"], gradient["exact"]) <= BOUND * far
    assert first["shared"].metrics == pytest.approx(first["alone"].metrics, rel=1e-3, abs=1e-4)


@pytest.mark.slow
def test_losses_over_whole_samples_a_critic_and_a_reference_see_them_whole(model_dir: Path) -> None:
    loss = LossConfig(
        advantage="ppo",
        policy="gspo",
        top_entropy=0.5,
        entropy_coef=0.01,
        kl=KLConfig(loss_coef=0.1, estimator="k3"),
        correction=CorrectionConfig(
            level="sequence", high=5.0, normalize=True, reject=(RejectionConfig(measure="k3", level="sequence_mean", high=0.5),)
        ),
    )
    metrics: dict[int, list[dict[str, float]]] = {}
    for context in (1, 2):
        asked = config(loss, ranks=context, shards=context, context=context, check_logprobs=2, activations=1)
        with open_trainer(asked, model_dir) as trainer:
            metrics[context] = [trainer.step(batch(step)).metrics for step in range(3)]
    for ours, theirs in zip(metrics[2], metrics[1], strict=True):
        assert ours == pytest.approx(theirs, rel=2e-3, abs=1e-4)


@pytest.mark.soak
def test_layers_are_compiled_where_rows_are_shared(model_dir: Path) -> None:
    """On GPUs: test_context_gpu.py."""
    asked = {"compile": "on", "attention": "packed", "activations": 1}
    losses: dict[int, list[float]] = {}
    for context in (1, 2):
        with open_trainer(config(ranks=context, context=context, **asked), model_dir) as trainer:
            results = [trainer.step(batch(step)) for step in range(2)]
        assert all(result.choices is not None and result.choices.compiled for result in results)
        losses[context] = [result.metrics["train/grad_norm"] for result in results]
    assert losses[2] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize("which", ["policy", "reference"])
def test_a_model_with_sliding_windows_is_refused(model_dir: Path, make_model: Models, which: str) -> None:
    """A reference is scored on the rows that ranks share, as the policy is."""
    windows = make_model(use_sliding_window=True, sliding_window=8, max_window_layers=1)
    kl = KLConfig(loss_coef=0.1, reference=str(windows)) if which == "reference" else KLConfig()
    asked = config(LossConfig(kl=kl), ranks=2, context=2)
    with raises(ConfigError, key="trainer.context"), open_trainer(asked, windows if which == "policy" else model_dir):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2])
def test_a_rank_that_is_killed_ends_a_step_of_ranks_that_share_rows(model_dir: Path, shards: int, preloaded: Preloaded) -> None:
    killed_in_a_step(config(ranks=2, shards=shards, context=2), model_dir, preloaded)


@pytest.mark.slow
def test_the_load_of_experts_is_of_all_tokens(make_mixture: Models) -> None:
    directory = make_mixture()
    loss = LossConfig(experts=ExpertsConfig(balance_coef=0.1, z_coef=0.01))
    metrics: dict[int, dict[str, float]] = {}
    for context in (1, 2):
        with open_trainer(config(loss, ranks=context, context=context, attention="packed"), directory) as trainer:
            metrics[context] = trainer.step(batch(0)).metrics
    assert any("expert" in name for name in metrics[1])
    assert metrics[2] == pytest.approx(metrics[1], rel=2e-3, abs=1e-4)
