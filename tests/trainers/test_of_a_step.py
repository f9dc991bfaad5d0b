"""What both trainers tell of a step: the cosine between gradients, the rate that follows the effective sample size, gradients at logits."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from streamrl.algorithms.estimators import token_advantages
from streamrl.algorithms.optimal_baselines import token_energies
from streamrl.algorithms.step_size import rollout_ess
from streamrl.config.loss import LossConfig
from streamrl.config.registry import Role
from streamrl.config.tree import OptimizerConfig, TrainerConfig
from streamrl.core.batches import TrainBatch, sample_of_token
from streamrl.core.packing import split_groups
from streamrl.telemetry.names import METRICS
from streamrl.tensors.mesh import mesh_of
from streamrl.trainers.table.trainer import TableTrainer
from streamrl.trainers.torch.direction import Direction
from streamrl.trainers.torch.parallel import Parallel
from tests.support.batches import by_turn
from tests.support.scoring import prepare, score
from tests.support.trainers import Rollouts, make

NAME = "train/grad_cosine"
Make = Callable[..., Any]


def test_cosines_by_hand() -> None:
    direction = Direction(Parallel(mesh_of(TrainerConfig()), torch.device("cpu")))

    def turned(*values: float, kind: str = "rl") -> float | None:
        return direction.turned(kind, [torch.tensor(values[:1]), torch.tensor(values[1:])])

    assert turned(1.0, 2.0, 2.0) is None, "the first"
    assert turned(-2.0, -4.0, -4.0) == pytest.approx(-1.0)
    assert turned(4.0, 0.0, 3.0) == pytest.approx(-20 / (6 * 5))
    assert turned(4.0, 0.0, 3.0, kind="sft") is None, "another loss"
    assert turned(0.0, 5.0, 0.0, kind="sft") == 0.0
    assert turned(0.0, 0.0, 0.0, kind="sft") is turned(1.0, 0.0, 0.0, kind="sft") is None, "nothing has no direction"
    assert turned(math.inf, 0.0, 0.0, kind="sft") is turned(1.0, 0.0, 0.0, kind="sft") is None
    assert turned(1.0, 0.0, 0.0, kind="sft") == 1.0, "what is given may be written to: a copy was kept"


def test_equal_batches_go_the_same_way_and_opposite_ones_back(make_either: Make, rollouts: Rollouts, demonstrations: Rollouts) -> None:
    """At a rate of 0 a batch has the same gradient again, and with the rewards' sign turned the opposite one."""
    trainer, batch = make_either(rate=0.0, gradient_cosine=True), rollouts()
    assert NAME not in trainer.step(batch).metrics
    assert trainer.step(batch).metrics[NAME] == pytest.approx(1.0, abs=1e-5)
    opposite = msgspec.structs.replace(batch, rewards=-batch.rewards)
    assert trainer.step(opposite).metrics[NAME] == pytest.approx(-1.0, abs=1e-5)
    assert NAME not in trainer.step(demonstrations()).metrics
    assert NAME in METRICS


def test_it_changes_no_bit_and_is_off_where_nobody_asks(make_either: Make, rollouts: Rollouts) -> None:
    plain, measured = make_either(rate=1e-2, minibatches=2), make_either(rate=1e-2, minibatches=2, gradient_cosine=True)
    for step in range(2):
        ours, theirs = measured.step(rollouts(step)), plain.step(rollouts(step))
        assert ours.digest == theirs.digest
        assert NAME not in theirs.metrics and -1.0 < ours.metrics[NAME] < 1.0
        assert ours.metrics["train/loss"] == theirs.metrics["train/loss"]
    assert np.isfinite(ours.metrics[NAME])


@pytest.mark.parametrize("masked", [False, True])
def test_a_last_step_without_a_gradient_takes_no_metric_from_the_others(make_either: Make, rollouts: Rollouts, masked: bool) -> None:
    """Rewards that are all equal in its groups, or no trained token at all."""
    trainer, batch = make_either(rate=0.0, gradient_cosine=True, minibatches=2), rollouts(1)
    _, last = split_groups(batch, 2)
    rewards, mask = batch.rewards.copy(), batch.loss_mask.copy()
    rewards[last] = 0.0
    if masked:
        mask &= ~np.isin(sample_of_token(batch), last)
    names = set(trainer.step(rollouts()).metrics)
    metrics = trainer.step(msgspec.structs.replace(batch, rewards=rewards, loss_mask=mask)).metrics
    assert names <= set(metrics)
    assert -1.0 < metrics[NAME] < 1.0


RATE = 1e-2


@pytest.fixture
def scaled(make_either: Make) -> Make:
    """`scaled(minibatches=..., **optimizer)`: a trainer of either backend with a constant rate."""

    def trainer(minibatches: int = 1, **optimizer: Any) -> Any:
        return make_either(minibatches=minibatches, optimizer=OptimizerConfig(learning_rate=RATE, schedule="constant", **optimizer))

    return trainer


def test_a_step_is_that_of_the_scaled_rate(scaled: Make, rollouts: Rollouts) -> None:
    trainer, linear, batch = scaled(ess_scaling="sqrt"), scaled(ess_scaling="linear"), rollouts()
    ess = rollout_ess(batch, score(trainer, batch, Role.POLICY), np.arange(batch.num_samples))
    assert 0.05 < ess < 0.95
    found = trainer.step(batch)
    assert found.metrics["train/ess_rollout"] == pytest.approx(ess, rel=1e-4)
    assert found.metrics["train/lr"] == pytest.approx(RATE * ess**0.5, rel=1e-4)
    assert linear.step(batch).metrics["train/lr"] == pytest.approx(RATE * ess, rel=1e-4)
    by_hand = scaled()
    plain = by_hand.step(batch)
    assert plain.digest != found.digest
    assert (plain.metrics["train/lr"], "train/ess_rollout" in plain.metrics) == (RATE, False)


def test_each_step_has_its_own_rate(scaled: Make, rollouts: Rollouts) -> None:
    """The first of two steps is scaled by its own rollouts, under the policy before the batch; the second under the one that came of it."""
    trainer, batch = scaled(minibatches=2, ess_scaling="sqrt"), rollouts()
    before = score(trainer, batch, Role.POLICY)
    first, second = split_groups(batch, 2)
    found = trainer.step(batch).metrics["train/ess_rollout"]
    still = (rollout_ess(batch, before, first) + rollout_ess(batch, before, second)) / 2
    assert found != pytest.approx(still, rel=1e-6)
    assert found == pytest.approx(still, rel=0.5)


def test_fresh_rollouts_keep_the_rate_and_demonstrations_too(scaled: Make, rollouts: Rollouts, demonstrations: Rollouts) -> None:
    trainer = scaled(ess_scaling="sqrt", ess_reference=0.99)
    batch = rollouts()
    fresh = msgspec.structs.replace(batch, sampler_logprobs=score(trainer, batch, Role.POLICY).astype(np.float32))
    assert trainer.step(fresh).metrics["train/lr"] == RATE
    assert "train/ess_rollout" not in scaled(ess_scaling="sqrt").step(demonstrations()).metrics


def by_autograd(directory: Path, batch: TrainBatch) -> np.ndarray:
    """[T] squared norm of the gradient of log pi by transformers' own logits, in float64, a sample at a time."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()
    found = np.zeros(batch.num_tokens)
    for first, last in zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True):
        ids = torch.from_numpy(batch.tokens[first:last].astype(np.int64))
        logits = model(input_ids=ids[None]).logits[0, :-1].detach().requires_grad_()
        temperature = torch.from_numpy(batch.temperature[first + 1 : last].astype(np.float64))[:, None]
        (logits / temperature).log_softmax(-1).gather(-1, ids[1:, None]).sum().backward()
        assert logits.grad is not None
        found[first + 1 : last] = logits.grad.square().sum(-1).numpy()
    return np.where(batch.loss_mask, found, 0.0)


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.8, "min_p": 0.02}, {"top_k": 5}])
def test_a_transformers_energies_are_its_gradients(model_dir: Path, rollouts: Rollouts, cut: dict[str, float]) -> None:
    """Over the whole vocabulary, whatever was sampled from."""
    batch = by_turn(rollouts(**cut))
    scores = prepare(make(model_dir, LossConfig(advantage="opob")), batch).scores
    assert scores.energy is not None
    assert np.where(batch.loss_mask, scores.energy, 0.0) == pytest.approx(by_autograd(model_dir, batch), abs=2e-5)


@pytest.mark.parametrize("advantage", ["opob", "optimal_token_baseline"])
def test_a_table_has_the_same_advantages_in_its_step(table_dir: Path, rollouts: Rollouts, advantage: str) -> None:
    """By the log-probs that it gives at each temperature, as a transformer's are."""
    loss = LossConfig(advantage=advantage)
    trainer = make(table_dir, loss, backend="table", rate=0.1)
    assert isinstance(trainer, TableTrainer)
    trainer.step(rollouts(1))
    batch = by_turn(rollouts(2))
    logprobs = score(trainer, batch, Role.POLICY).astype(np.float64)
    halved = score(trainer, msgspec.structs.replace(batch, temperature=batch.temperature / 2), Role.POLICY)
    energy = token_energies(logprobs, halved, batch.temperature)
    expected = token_advantages(batch, loss, logprobs=logprobs, energy=energy)
    assert np.abs(expected.advantages).max() > 0.1
    found = trainer.step(batch)
    assert found.metrics["rollout/advantages"] == pytest.approx(expected.metrics["rollout/advantages"], abs=1e-5)
    assert found.finite
