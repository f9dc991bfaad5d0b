"""The critic: learned returns, its first steps, checkpoints, what a replay sees; and what a truncated answer's return goes on with."""

from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import ANY

import numpy as np
import numpy.typing as npt
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from streamrl.config.loss import CorrectionConfig, CriticConfig, LossConfig
from streamrl.config.registry import Role
from streamrl.config.tree import Config
from streamrl.core.batches import STATUS_CODES, TrainBatch
from streamrl.errors import CheckpointDamaged, ConfigError, TrainingError
from streamrl.models.directories import SEAL_FILE
from streamrl.schemas.samples import Status
from streamrl.schemas.versions import Version
from streamrl.trainers.factory import make_trainer
from streamrl.trainers.protocol import StepResult
from streamrl.trainers.ranks.local import open_trainer
from tests.support import meshes, trainers
from tests.support import reference_returns as reference
from tests.support.errors import raises
from tests.support.meshes import Mesh, batch, slow, soak
from tests.support.scoring import prepare, prepared, score
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
    results = [trainer.step(rollouts(step)) for step in range(4)]
    assert results[0].digest == results[1].digest == make_trainer(Config(), model_dir).digest()
    assert len({result.digest for result in results}) == 3
    for name in ("train/lr", "train/grad_norm"):
        assert [result.metrics[name] > 0 for result in results] == [False, False, True, True], name
    assert all(result.metrics["train/value_grad_norm"] > 0 for result in results)
    assert len({result.metrics["train/value_norm"] for result in results}) == 4


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
    for path in (str(tmp_path / "gone"), str(tmp_path)):
        with raises(ConfigError, key="loss.critic.path", path=path):
            make(model_dir, critic=CriticConfig(path=path))


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


CUT = STATUS_CODES[Status.TRUNCATED]
STEPS = 3


def cut_batch(step: int, *, all_over: bool = False) -> TrainBatch:
    """Every second answer was cut."""
    given = batch(step)
    return given if all_over else replace(given, status=np.where(np.arange(given.num_samples) % 2 == 0, CUT, 0).astype(np.int8))


def config(mesh: Mesh, *, bootstraps: bool = True) -> Config:
    critic = CriticConfig(learning_rate=3e-2, clip=0.0)
    loss = LossConfig(advantage="ppo", gamma=0.9, gae_lambda=0.8, critic=critic, bootstrap_truncated=bootstraps)
    return meshes.config(loss, **{"backend": "torch", **mesh})


class Seen(NamedTuple):
    objectives: list[Any]
    results: list[StepResult]


def cut_run(trainer: Any, **how: Any) -> Seen:
    return Seen(prepared(trainer), [trainer.step(cut_batch(step, **how)) for step in range(STEPS)])


def behind(trainer: Any, given: TrainBatch) -> npt.NDArray[np.float32]:
    """[N] V behind each sample: of another token that is put there, whichever it is."""
    ends = given.offsets[1:]
    own = {name: np.split(getattr(given, name), ends[:-1]) for name in ("tokens", "loss_mask")}
    longer = TrainBatch.from_lists(
        [tokens[:1].tolist() for tokens in own["tokens"]],
        [[*tokens[1:].tolist(), 11] for tokens in own["tokens"]],
        tasks=given.tasks.tolist(),
    )
    return score(trainer, longer, Role.VALUE)[longer.offsets[1:] - 1]


def test_the_value_behind_the_last_token_takes_the_place_of_nothing(model_dir: Path) -> None:
    trainer: Any = make_trainer(config({}), model_dir)
    cut_run(trainer)
    given = cut_batch(7)
    values, after = score(trainer, given, Role.VALUE), behind(trainer, given)
    objective = prepare(trainer, given)
    cut = given.status == CUT
    assert objective.scores.ends == pytest.approx(np.where(cut, after, 0.0), abs=1e-5) and np.abs(after[cut]).min() > 1e-3
    assert objective.scores.values[given.loss_mask] == pytest.approx(values[given.loss_mask], abs=1e-5)
    for sample, (first, end) in enumerate(zip(given.offsets[:-1], given.offsets[1:], strict=True)):
        tokens = [t for t in range(first, end) if given.loss_mask[t]]
        steps = [(t, given.rewards[sample] if t == tokens[-1] else 0.0, float(values[t]), 1.0) for t in tokens]
        # As if there were one step more with nothing to learn: see tests/algorithms/test_returns.py.
        last = float(after[sample]) if cut[sample] else 0.0
        expected = reference.gae([*steps, (int(end), last, last, 1.0)], 0.9, 0.8)[:-1]
        assert objective.advantages[tokens] == pytest.approx(expected, abs=1e-5)
        assert objective.returns[tokens] == pytest.approx([a + s[2] for a, s in zip(expected, steps, strict=True)], abs=1e-5)


def test_where_nothing_was_cut_not_a_bit_changes(model_dir: Path) -> None:
    on, off = (cut_run(make_trainer(config({}, bootstraps=one), model_dir), all_over=True).results for one in (True, False))
    assert on == off
    cut, ignored = (cut_run(make_trainer(config({}, bootstraps=one), model_dir)).results for one in (True, False))
    assert cut[0] == ignored[0], "the critic begins at 0"
    assert cut[-1].digest != ignored[-1].digest


MEGATRON: Mesh = {"backend": "megatron", "ranks": 2}
MESHES = [
    slow({"ranks": 2}),
    slow({**MEGATRON, "pipeline": 2}),
    *map(soak, ({"ranks": 2, "shards": 2}, {**MEGATRON, "tensor": 2}, {**MEGATRON, "context": 2})),
]


@pytest.mark.process
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_meshes_see_the_same_values(make_model: Models, mesh: Mesh) -> None:
    directory = make_model(vocab_size=19, num_attention_heads=4, num_key_value_heads=2)
    alone = cut_run(make_trainer(config({}), directory))
    with open_trainer(config(mesh), directory) as trainer:
        found = cut_run(trainer)
    for step, (ours, theirs) in enumerate(zip(found.objectives, alone.objectives, strict=True)):
        assert ours.scores.ends == pytest.approx(theirs.scores.ends, abs=1e-4), step
        assert ours.returns == pytest.approx(theirs.returns, abs=1e-4), step
    assert np.abs(alone.objectives[-1].scores.ends).max() > 1e-2
