"""The critic: learned returns, its own steps at the beginning, checkpoints, and what a replay sees of it."""

from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from streamrl.config.loss import CorrectionConfig, CriticConfig, LossConfig
from streamrl.config.registry import Role
from streamrl.config.tree import Config
from streamrl.errors import CheckpointDamaged, ConfigError, TrainingError
from streamrl.schemas.versions import Version
from streamrl.trainers.checkpoints import SEAL_FILE
from streamrl.trainers.factory import make_trainer
from tests.support import trainers
from tests.support.errors import raises
from tests.support.scoring import score
from tests.support.trainers import Models, Rollouts


def make(directory: Path, *, critic: CriticConfig | None = None, **settings: Any) -> Any:
    loss = LossConfig(advantage="ppo", critic=critic or CriticConfig(learning_rate=1e-3), correction=CorrectionConfig(level="sequence"))
    return trainers.make(directory, loss, **settings)


def test_it_begins_at_zero_and_learns_the_returns_which_leaves_no_advantage(model_dir: Path, rollouts: Rollouts) -> None:
    trainer = make(model_dir, critic=CriticConfig(learning_rate=3e-3, clip=0.0))
    batch = rollouts()
    assert (score(trainer, batch, Role.VALUE) == 0).all()
    metrics = [trainer.step(batch).metrics for _ in range(26)]
    # Rewards of 0 and 1, a third of them 1; with gamma = lambda = 1 every token's return is its rollout's reward.
    assert metrics[0]["train/value_loss"] == pytest.approx(np.mean(batch.rewards), abs=1e-6)
    # What cannot be known at an answer's first token, which all rollouts of a prompt share, stays: 2/9 there.
    assert metrics[-1]["train/value_loss"] < 0.1
    returns = np.repeat(batch.rewards, batch.lengths)
    assert np.abs(score(trainer, batch, Role.VALUE) - returns)[batch.loss_mask].mean() < 0.25
    assert abs(metrics[-1]["rollout/advantages"]) < 0.2 * abs(metrics[0]["rollout/advantages"])


def test_it_begins_at_zero_while_another_thread_loads_a_model(model_dir: Path, rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.init, "zeros_", lambda tensor: tensor)  # as transformers does meanwhile
    assert (score(make(model_dir), rollouts(), Role.VALUE) == 0).all()


@pytest.mark.parametrize("targets", ["gae", "vtrace"])
def test_its_first_batches_are_its_own(model_dir: Path, rollouts: Rollouts, targets: Any) -> None:
    trainer = make(model_dir, critic=CriticConfig(only_steps=2, targets=targets), minibatches=2)
    untouched = make_trainer(Config(), model_dir)
    results = [trainer.step(rollouts(step)) for step in range(4)]
    assert results[0].digest == results[1].digest
    assert len({result.digest for result in results}) == 3
    assert [result.metrics["train/lr"] > 0 for result in results] == [False, False, True, True]
    assert [result.metrics["train/grad_norm"] > 0 for result in results] == [False, False, True, True]
    assert all(result.metrics["train/value_grad_norm"] > 0 for result in results)
    assert len({result.metrics["train/value_norm"] for result in results}) == 4
    assert results[0].digest == untouched.digest()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_restored_critic_goes_on_with_the_same_bits(make_model: Models, rollouts: Rollouts, tmp_path: Path, dtype: Any) -> None:
    directory = make_model(dtype)
    trainer = make(directory, dtype=dtype, minibatches=2)
    for step in range(2):
        trainer.step(rollouts(step))
    trainer.save(tmp_path / "at", b"", version=Version(0, 2)).result()
    want = [trainer.step(rollouts(step)) for step in range(2, 5)]
    other = make(directory, dtype=dtype, minibatches=2)
    other.step(rollouts(9))
    other.load(tmp_path / "at")
    assert [other.step(rollouts(step)) for step in range(2, 5)] == want
    assert want[0].metrics["train/value_norm"] != want[1].metrics["train/value_norm"]
    assert {shard.name for shard in trainer.shards()} == {shard.name for shard in make_trainer(Config(), directory).shards()}


def test_spoiled_and_missing_critics_are_refused(model_dir: Path, make_model: Models, tmp_path: Path) -> None:
    trainer = make(model_dir)
    trainer.save(tmp_path / "at", b"", version=Version()).result()
    (tmp_path / "at" / SEAL_FILE).unlink()
    critic = tmp_path / "at" / "critic.safetensors"
    tensors = load_file(critic)
    save_file({name: value + (name == "value_head.bias") for name, value in tensors.items()}, critic)
    with raises(TrainingError, what="a critic", path=str(tmp_path / "at"), got=ANY):
        trainer.load(tmp_path / "at")
    critic.unlink()
    with raises(CheckpointDamaged, path=str(tmp_path / "at")):
        trainer.load(tmp_path / "at")
    make_trainer(Config(), model_dir).save(tmp_path / "without", b"", version=Version()).result()
    with raises(TrainingError, what="a critic", path=str(tmp_path / "without")):
        trainer.load(tmp_path / "without")
    wider = CriticConfig(path=str(make_model(intermediate_size=48)))
    make(model_dir, critic=wider).save(tmp_path / "wider", b"", version=Version()).result()
    with raises(TrainingError, what="a critic", path=str(tmp_path / "wider"), parameter=ANY):
        trainer.load(tmp_path / "wider")
    assert make_trainer(Config(), model_dir).load(tmp_path / "wider") == b""


def test_its_body_may_be_another_models(model_dir: Path, make_model: Models, rollouts: Rollouts, tmp_path: Path) -> None:
    wide = make_model(hidden_size=48, tie_word_embeddings=False)
    trainer = make(model_dir, critic=CriticConfig(path=str(wide), learning_rate=1e-3))
    assert trainer.step(rollouts()).finite
    assert score(trainer, rollouts(), Role.VALUE).any()
    with raises(ConfigError, key="loss.critic.path", path=str(tmp_path / "gone")):
        make(model_dir, critic=CriticConfig(path=str(tmp_path / "gone")))
    with raises(ConfigError, key="loss.critic.path", path=str(tmp_path)):
        make(model_dir, critic=CriticConfig(path=str(tmp_path)))


def test_what_is_not_finite_and_demonstrations_leave_it_alone(model_dir: Path, rollouts: Rollouts, demonstrations: Rollouts) -> None:
    trainer = make(model_dir)
    trainer.step(rollouts())
    before = score(trainer, rollouts(), Role.VALUE)
    metrics = trainer.step(demonstrations()).metrics
    assert not any(name.startswith("train/value") for name in metrics)
    assert np.array_equal(score(trainer, rollouts(), Role.VALUE), before)
    trainer = make(model_dir, critic=CriticConfig(clip=0.0))
    result = trainer.step(rollouts(reward=1e30))
    assert not result.finite
    assert (score(trainer, rollouts(), Role.VALUE) == 0).all()
