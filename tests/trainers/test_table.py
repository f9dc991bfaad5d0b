"""The table's gradients against torch's autograd in float64, and its notion of a response position."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from streamrl.algorithms import policy_losses
from streamrl.algorithms.advantages import grpo
from streamrl.algorithms.corrections import correct
from streamrl.algorithms.logprobs import token_logprobs
from streamrl.algorithms.policy import PolicyTokens, policy_loss
from streamrl.algorithms.reductions import token_weights
from streamrl.algorithms.sequences import Packed
from streamrl.config.loss import CorrectionConfig
from streamrl.config.registry import Role
from streamrl.config.tree import Config, LossConfig, OptimizerConfig, TrainerConfig
from streamrl.core.batches import sample_of_token
from streamrl.errors import ConfigError, TrainingError
from streamrl.trainers.drawn import drawn
from streamrl.trainers.factory import make_trainer
from streamrl.trainers.table import losses as table_losses
from streamrl.trainers.table.trainer import TableTrainer, response_positions
from tests.support.batches import by_turn
from tests.support.errors import raises
from tests.support.scoring import score
from tests.support.trainers import Rollouts

VOCAB = 16


def make_table(directory: Path, **loss: Any) -> Any:
    optimizer = OptimizerConfig(learning_rate=0.1, clip_norm=0.0, weight_decay=0.01)
    return make_trainer(Config(trainer=TrainerConfig(backend="table", optimizer=optimizer), loss=LossConfig(**loss)), directory)


CORRECTIONS = [CorrectionConfig(kind="none"), CorrectionConfig(high=1.5)]
CORRECTIONS += [CorrectionConfig(kind=kind, low=0.3, high=1.5) for kind in ("clip", "mask")]


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("policy", ["ppo", "cispo"])
@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda c: c.kind)
def test_losses_and_derivatives_equal_torchs(advantage: float, policy: str, correction: CorrectionConfig) -> None:
    rng = np.random.default_rng(0)
    logprobs, old, mu = (-1 + rng.standard_normal(200) * scale for scale in (0.4, 0.4, 1.0))
    advantages = np.full(200, advantage)
    config = LossConfig(policy=policy, correction=correction)
    value, slope, weights, metrics = table_losses.policy_gradient(logprobs, old, mu, advantages, config)
    leaf = torch.tensor(logprobs, requires_grad=True)
    proximal, sampler, ages = torch.tensor(old), torch.tensor(mu), torch.zeros(200, dtype=torch.int64)
    tokens = PolicyTokens(leaf, proximal, sampler, torch.tensor(advantages), ages, Packed(ages, 1))
    surrogate, named = policy_loss(tokens, config)
    found = correct(proximal, sampler, ages, tokens.sequences, correction)
    expected = surrogate * found.weights
    expected.sum().backward()
    assert leaf.grad is not None
    for ours, theirs in ((value, expected.detach()), (slope, leaf.grad), (weights, found.weights)):
        assert ours == pytest.approx(theirs.numpy())
    assert 0 < metrics["train/pg_clipfrac"].mean() < 1
    distance = (proximal - sampler).abs()
    named = {"train/pg_loss": expected.detach(), "train/train_rollout_logprob_abs_diff": distance, **named, **found.metrics}
    assert set(metrics) == set(named)
    for name, of_token in metrics.items():
        assert of_token == pytest.approx(named[name].numpy()), name


@pytest.mark.parametrize("kind", ["sft", "rl"])
def test_a_step_is_that_of_torchs_adamw_on_autograds_gradient(table_dir: Path, rollouts: Rollouts, kind: Any) -> None:
    sampling: dict[str, Any] = {"top_p": 0.95, "top_k": 12, "min_p": 0.4, "logit_bias": {3: 1.5, 7: -2.0}}
    batches = [msgspec.structs.replace(by_turn(rollouts(step, **sampling)), kind=kind) for step in range(3)]
    trainer = make_table(table_dir)
    logits = torch.zeros(3, VOCAB, VOCAB, dtype=torch.float64, requires_grad=True)
    config = Config()
    adam = torch.optim.AdamW([logits], lr=0.1 if kind == "rl" else config.warmup.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    for batch in batches:
        target = np.flatnonzero(batch.loss_mask)
        sample = sample_of_token(batch)[target]
        position = np.minimum(response_positions(batch)[target], 2)
        rows = logits[torch.from_numpy(position), torch.from_numpy(batch.tokens[target - 1].astype(np.int64))]
        how = drawn(batch, SimpleNamespace(target=target), torch.device("cpu"))  # type: ignore[arg-type]
        assert how.cut and how.logit_bias is not None
        logprobs, _ = token_logprobs(
            rows,
            torch.from_numpy(batch.tokens[target].astype(np.int64)),
            lambda states: states,
            vocab_size=VOCAB,
            temperature_M=torch.from_numpy(batch.temperature[target]),
            logit_bias=how.logit_bias,
            **how.cut,
        )
        weights = torch.from_numpy(token_weights(batch, np.arange(batch.num_samples), "rollout_mean")[target])
        loss = policy_losses.sft(logprobs)[0]
        if kind == "rl":
            advantages = torch.from_numpy(grpo(batch.rewards, batch.tasks, batch.rollouts)[0][sample])
            mu = torch.from_numpy(batch.sampler_logprobs[target].astype(np.float64))
            # One step a batch: the ratio is 1, and its derivative is the log-prob's.
            loss = -(logprobs - logprobs.detach()).exp() * advantages * (logprobs.detach() - mu).exp().clamp(max=2.0)
        adam.zero_grad()
        (loss * weights).sum().backward()
        adam.step()
        found = trainer.step(batch)
        assert found.metrics["train/loss"] == pytest.approx(float((loss * weights).sum().detach()))
        for group in adam.param_groups:  # run.steps = 100: the rate falls from one batch to the next
            group["lr"] = 0.1 * (1 - 0.7 * (batch.stage_step + 1) / 99) if kind == "rl" else group["lr"]
    (shard,) = trainer.shards()
    # Where a gradient is 0 up to rounding Adam still takes a step of full size; there is none in float32 and float64 alike.
    assert shard.data.view(np.float32) == pytest.approx(logits.detach().numpy().ravel(), abs=2e-5)


def test_positions_count_within_each_run_of_sampled_tokens(make_batch: Rollouts) -> None:
    batch = make_batch(
        [
            {"prompt": [1, 2], "answer": [3, 4, 5, 6, 7], "mask": [1, 1, 0, 1, 1], "mu": [-1, -1, 0, -1, -1]},
            {"prompt": [1], "answer": [3, 4, 5], "mask": [0, 0, 1], "mu": [-1, -1, -1]},
            {"prompt": [1, 1, 1], "answer": [3], "mask": [1], "mu": [0]},
        ]
    )
    assert response_positions(batch).tolist() == [0, 0, 0, 1, 0, 0, 1, 0, 0, 1, 2, 0, 0, 0, 0]
    batch = make_batch([{"prompt": [1], "answer": [3, 4, 5], "mask": [0, 0, 1], "mu": [0, 0, -1]}])
    aged = msgspec.structs.replace(batch, staleness=np.array([0, 3, 3, 1], np.int32))
    assert response_positions(aged).tolist() == [0, 0, 1, 2]


def test_the_first_answer_token_is_scored_at_position_zero(table_dir: Path, make_batch: Rollouts) -> None:
    trainer = make_table(table_dir)
    batch = make_batch([{"prompt": [1, 2], "answer": [3, 4]}], kind="sft")
    for _ in range(5):
        trainer.step(batch)
    (shard,) = trainer.shards()
    changed = np.abs(shard.data.view(np.float32).reshape(3, VOCAB, VOCAB)).max(-1)
    assert [tuple(i) for i in np.argwhere(changed > 1e-3).tolist()] == [(0, 2), (1, 3)]
    assert score(trainer, batch, Role.POLICY)[2] == pytest.approx(-np.log(VOCAB), abs=0.1)


def test_directories_without_a_table_and_more_ranks_are_refused(tmp_path: Path, table_dir: Path) -> None:
    with raises(ConfigError, path=str(tmp_path / "table.json")):
        make_table(tmp_path)
    (tmp_path / "table.json").write_text('{"vocab": 4, "max_position": 2, "eos": 0}')
    np.save(tmp_path / "logits.npy", np.zeros((2, 4, 5), np.float32))
    with raises(ConfigError, expected=(2, 4, 4)):
        make_table(tmp_path)
    with raises(TrainingError, key="trainer.ranks", got=2):
        TableTrainer(table_dir, trainer=TrainerConfig(ranks=2), loss=LossConfig(), learning_rate=lambda _: 0.1)
