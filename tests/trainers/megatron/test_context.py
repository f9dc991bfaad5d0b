"""Replicas of megatron-core that share packed rows, with tensor ranks and with stages, beside the torch backend on one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from streamrl.config.loss import KLConfig, LossConfig
from streamrl.config.tree import Config, OptimizerConfig, TrainerConfig
from streamrl.trainers.factory import make_trainer
from streamrl.trainers.ranks.local import open_trainer
from tests.support.meshes import STEPS, Ran, batch, check_run, in_float64, parameters, run, slow, soak
from tests.support.trainers import Models

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
TENSOR, STAGES = {"ranks": 4, "tensor": 2}, {"ranks": 4, "pipeline": 2}
MESHES = [slow(TENSOR), soak(STAGES), soak({"ranks": 2}), soak({"ranks": 4})]
"""With two ranks a row; of the last, two rows at a time."""


def config(backend: str = "megatron", *, loss: LossConfig | None = None, mesh: dict[str, int] | None = None) -> Config:
    context = 2 if backend == "megatron" else 1
    options = {"optimizer": OptimizerConfig(learning_rate=1e-3), "micro_tokens": 48, "minibatches": 2, "rank_timeout_s": 120.0}
    section = TrainerConfig(backend=backend, context=context, **mesh or {}, **options)  # pyright: ignore[reportArgumentType]
    return Config(trainer=section, loss=loss or LossConfig())


@pytest.fixture(scope="module")
def initial(make_model: Models) -> Path:
    return make_model(vocab_size=19, num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture(scope="module")
def alone(initial: Path, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """By the torch backend on one rank."""
    return run(make_trainer(config("torch"), initial), tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def truth(initial: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return parameters(run(in_float64(config("torch"), initial), tmp_path_factory.mktemp("truth")).checkpoint)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_ranks_that_share_rows_train_as_one_rank_does(
    initial: Path, alone: Ran, truth: dict[str, torch.Tensor], mesh: dict[str, int], tmp_path: Path
) -> None:
    with open_trainer(config(mesh=mesh), initial) as trainer:
        made = run(trainer, tmp_path / "made")
    check_run(made, alone, truth)
    half = STEPS // 2
    with open_trainer(config(mesh=mesh), initial) as trainer:
        assert trainer.load(made.half) == b"at"
        assert [trainer.step(batch(step)).digest for step in range(half, half + 3)] == made.digests[half : half + 3]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [TENSOR, STAGES], ids=str)
def test_the_first_step_with_a_reference_has_torchs_log_probs_and_gradient(initial: Path, mesh: dict[str, int]) -> None:
    found = []
    kl = KLConfig(loss_coef=0.1, estimator="k3")
    gspo = LossConfig(policy="gspo", clip_low=0.5, clip_high=0.5, reduction="sequence_mean", kl=kl)
    for asked in (config("torch", loss=gspo), config(loss=gspo, mesh=mesh)):
        with open_trainer(asked, initial) as trainer:
            result = trainer.step(batch(0))
            assert result.tokens is not None
            assert asked.trainer.context == 1 or (
                result.choices is not None and result.choices.row_length % (4 * asked.trainer.tensor) == 0
            )
            found.append((result.tokens.logprobs, result.metrics["train/grad_norm"], result.metrics["train/loss"]))
    (ours, norm, loss), (theirs, other_norm, other_loss) = found
    assert abs(ours - theirs).max() < 5e-5  # float32 sums in another order, and a step between the two minibatches
    assert other_norm == pytest.approx(norm, rel=1e-4) and other_loss == pytest.approx(loss, rel=1e-3, abs=1e-6)
