"""What both trainers say of a token's gradient at its logits, against the gradient itself, and the estimators that ask for it."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from streamrl.algorithms.estimators import token_advantages
from streamrl.algorithms.optimal_baselines import token_energies
from streamrl.config.loss import LossConfig
from streamrl.config.registry import Role
from streamrl.config.tree import Config, OptimizerConfig, TrainerConfig
from streamrl.core.batches import TrainBatch
from streamrl.trainers.factory import make_trainer
from streamrl.trainers.table.trainer import TableTrainer
from tests.support.batches import by_turn
from tests.support.scoring import prepare, score
from tests.support.trainers import Rollouts

VOCAB = 16
OPOB = LossConfig(advantage="opob")


def by_autograd(directory: Path, batch: TrainBatch) -> np.ndarray:
    """[T] squared norm of the gradient of log pi by transformers' own logits, in float64, a sample at a time."""
    from transformers import AutoModelForCausalLM

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
    trainer = make_trainer(Config(loss=OPOB), model_dir)
    scores = prepare(trainer, batch).scores
    assert scores.energy is not None
    assert np.where(batch.loss_mask, scores.energy, 0.0) == pytest.approx(by_autograd(model_dir, batch), abs=2e-5)


@pytest.mark.parametrize("advantage", ["opob", "optimal_token_baseline"])
def test_a_table_has_the_same_advantages_in_its_step(table_dir: Path, rollouts: Rollouts, advantage: str) -> None:
    """By the log-probs that it gives at each temperature, as a transformer's are."""
    loss = LossConfig(advantage=advantage)
    options = TrainerConfig(backend="table", optimizer=OptimizerConfig(learning_rate=0.1))
    trainer = make_trainer(Config(trainer=options, loss=loss), table_dir)
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
