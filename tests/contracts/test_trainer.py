"""What every trainer owes its caller, on both adapters: the table in numpy and a Qwen3 in torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest

from streamrl.config.loss import CorrectionConfig
from streamrl.config.registry import Role
from streamrl.config.tree import Config, LossConfig, OptimizerConfig, RunConfig, TrainerConfig, WarmupConfig
from streamrl.core.batches import TrainBatch
from streamrl.errors import CheckpointDamaged, TrainingError, WeightsDiverged
from streamrl.models.directories import SEAL_FILE
from streamrl.schemas.versions import Version
from streamrl.tensors.digest import combine, tensor_digest
from streamrl.trainers.factory import make_trainer
from streamrl.trainers.protocol import Trainer
from streamrl.trainers.table.trainer import TableTrainer
from tests.support.errors import raises
from tests.support.scoring import score

VOCAB, EOS = 16, 1
GROUP = 4
MakeTrainer = Callable[..., Trainer]


def make_batch(kind: Literal["sft", "rl"], rows: list[tuple[int, int]], stage_step: int = 0, **changes: Any) -> TrainBatch:
    """Samples `prompt token, answer token, EOS` in groups of four; an answer is rewarded when it is the prompt + 1."""
    batch = TrainBatch.from_lists(
        [[2, prompt] for prompt, _ in rows],
        [[answer, EOS] for _, answer in rows],
        sampler_logprobs=[[-2.5, -2.5]] * len(rows),
        rewards=[float(answer == prompt + 1) for prompt, answer in rows],
        tasks=[number // GROUP for number in range(len(rows))],
        kind=kind,
        version=Version(0, stage_step),
        stage_step=stage_step,
    )
    return msgspec.structs.replace(batch, **changes)


def demonstrations(step: int = 0) -> TrainBatch:
    return make_batch("sft", [(prompt, prompt + 1) for prompt in range(3, 11)], step)


def rollouts(step: int = 0, **changes: Any) -> TrainBatch:
    """For each prompt, one right answer and three wrong ones; wrong ones differ from step to step."""
    rng = np.random.default_rng(step)
    rows = [(prompt, prompt + 1 if k == 0 else int(rng.integers(3, prompt + 1))) for prompt in range(4, 12) for k in range(GROUP)]
    return make_batch("rl", rows, step, **changes)


@pytest.fixture(params=["table", "torch"])
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MakeTrainer:
    backend: Literal["table", "torch"] = request.param
    directory = tmp_path_factory.mktemp(backend)
    if backend == "table":
        (directory / "table.json").write_text(json.dumps({"vocab": VOCAB, "max_position": 3, "eos": EOS}))
    else:
        write_qwen3(directory)

    def build(loss: LossConfig | None = None, **changes: Any) -> Trainer:
        rate = 0.1 if backend == "table" else 0.01
        trainer = msgspec.structs.replace(TrainerConfig(backend=backend, optimizer=OptimizerConfig(learning_rate=rate)), **changes)
        run, warmup = RunConfig(steps=20, numerics="bitwise"), WarmupConfig(learning_rate=rate)
        return make_trainer(Config(run=run, warmup=warmup, trainer=trainer, loss=loss or LossConfig()), directory)

    return build


def write_qwen3(directory: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3ForCausalLM(
            Qwen3Config(vocab_size=VOCAB, **sizes, intermediate_size=64, tie_word_embeddings=True, max_position_embeddings=64)
        ).save_pretrained(directory)


def digest_of(trainer: Trainer) -> str:
    itemsize = {"float32": 4, "bfloat16": 2}
    return combine({shard.name: tensor_digest(shard.host(), itemsize[shard.dtype]) for shard in trainer.shards()})


def test_a_step_changes_the_parameters_and_says_their_digest(make: MakeTrainer) -> None:
    trainer = make()
    before = digest_of(trainer)
    result = trainer.step(rollouts())
    assert result.finite
    assert result.digest == digest_of(trainer) != before


@pytest.mark.parametrize("minibatches", [1, 3])
def test_it_says_how_far_the_sampler_was_away(make: MakeTrainer, minibatches: int) -> None:
    trainer = make(minibatches=minibatches)
    ages = np.zeros((8 * GROUP, 4), np.int32)
    ages[::2, 2] = 1  # a swap in the middle of every second sample: its last token is of age 0, but not from one version's weights
    names = ("engine-0-1f", "engine-1-2e", "engine-0-3d", "engine-1-4c")
    batch = rollouts(staleness=ages.reshape(-1), engines=tuple(names[n % 4] for n in range(8 * GROUP)))
    distance = np.abs(score(trainer, batch, Role.POLICY) - batch.sampler_logprobs)
    fresh = distance.reshape(-1, 4)[1::2, 2:]
    found = trainer.step(batch).metrics
    assert found["train/train_rollout_logprob_abs_diff_max"] == pytest.approx(distance[batch.loss_mask].max(), abs=1e-5)
    assert found["train/same_weights_logprob_abs_diff"] == pytest.approx(fresh.mean(), abs=1e-5)
    assert found["train/same_weights_logprob_abs_diff_max"] == pytest.approx(fresh.max(), abs=1e-5)
    by_engine = {name: value for name, value in found.items() if "abs_diff/" in name}
    assert by_engine == {"train/same_weights_logprob_abs_diff/engine-1": pytest.approx(fresh.mean(), abs=1e-5)}
    old = trainer.step(rollouts(2, staleness=np.ones(16 * 8, np.int32))).metrics  # of version 1, which is not kept
    assert "train/train_rollout_logprob_abs_diff_max" in old
    assert "train/same_weights_logprob_abs_diff" not in old
    assert not any("same_weights" in name or name.endswith("diff_max") for name in trainer.step(demonstrations()).metrics)


def test_shards_are_whole_named_snapshots(make: MakeTrainer) -> None:
    trainer = make()
    shards = list(trainer.shards())
    assert len({shard.name for shard in shards}) == len(shards)
    kept = [shard.host().copy() for shard in shards]
    for shard in shards:
        assert shard.shape == shard.global_shape
        assert shard.host().dtype == np.uint8
        assert shard.data.nbytes == 4 * int(np.prod(shard.shape))
    later = trainer.shards()
    trainer.step(rollouts())
    assert all(np.array_equal(shard.host(), old) for shard, old in zip(shards, kept, strict=True))
    assert all(np.array_equal(shard.host(), old) for shard, old in zip(later, kept, strict=True))


def test_equal_batches_from_equal_states_give_equal_bits(make: MakeTrainer) -> None:
    one, two = make(), make()
    for step in range(3):
        assert one.step(demonstrations(step)) == two.step(demonstrations(step))
    for step in range(3):
        assert one.step(rollouts(step)) == two.step(rollouts(step))


@pytest.mark.parametrize("minibatches", [1, 3])
def test_a_restored_trainer_goes_on_with_the_same_bits(make: MakeTrainer, tmp_path: Path, minibatches: int) -> None:
    trainer = make(minibatches=minibatches)
    trainer.save(tmp_path / "before", b"", version=Version()).result()
    first = trainer.step(demonstrations())
    trainer.step(rollouts(0))
    trainer.step(rollouts(1))
    saved = trainer.save(tmp_path / "at", b"state \x00 of the loop", version=Version(0, 3))
    want = [trainer.step(batch) for batch in (rollouts(2), rollouts(3), demonstrations(1), rollouts(4))]
    saved.result()
    other = make(minibatches=minibatches)
    assert other.load(tmp_path / "at") == b"state \x00 of the loop"
    assert [other.step(batch) for batch in (rollouts(2), rollouts(3), demonstrations(1), rollouts(4))] == want
    assert other.load(tmp_path / "before") == b""
    assert other.step(demonstrations()) == first


def test_another_kind_of_batch_begins_with_fresh_moments(make: MakeTrainer) -> None:
    warmed = make()
    warmed.step(demonstrations())
    result = warmed.step(rollouts())
    # The first Adam step is the sign of the gradient times the rate, so a fresh trainer moves as far and a warm one would not.
    start = make()
    start.step(demonstrations())
    pairs = zip(warmed.shards(), start.shards(), strict=True)
    moved = max(float(np.abs(a.host().view(np.float32) - b.host().view(np.float32)).max()) for a, b in pairs)
    assert moved == pytest.approx(result.metrics["train/lr"], rel=1e-3)


def test_demonstrations_become_probable(make: MakeTrainer) -> None:
    trainer = make()
    results = [trainer.step(demonstrations(step)) for step in range(150)]
    first, last = results[0].metrics, results[-1].metrics
    assert first["train/answer_probability"] == pytest.approx(VOCAB**-2, rel=0.3)
    assert last["train/answer_probability"] > 0.9
    assert last["train/loss"] < 0.1 < first["train/loss"]


def test_rewarded_answers_become_probable(make: MakeTrainer) -> None:
    trainer = make(loss=LossConfig(correction=CorrectionConfig(kind="none")))
    batch = rollouts()
    rewarded = np.flatnonzero(np.repeat(batch.rewards > 0, 4) & batch.loss_mask)[::2]
    punished = np.flatnonzero(np.repeat(batch.rewards == 0, 4) & batch.loss_mask)[::2]
    before = score(trainer, batch, Role.POLICY)
    for step in range(20):
        trainer.step(rollouts(step))
    after = score(trainer, batch, Role.POLICY)
    assert after[rewarded].mean() > before[rewarded].mean() + 0.5
    assert after[punished].mean() < before[punished].mean() - 0.5


def test_scores_are_log_probs_of_next_tokens(make: MakeTrainer) -> None:
    trainer = make()
    batch = rollouts()
    scores = score(trainer, batch, Role.POLICY)
    assert scores.dtype == np.float32
    assert (scores[batch.offsets[:-1]] == 0).all()
    # The same prompt with every possible answer: the probabilities of the answers sum to 1.
    every = make_batch("rl", [(5, answer) for answer in range(VOCAB)])
    assert np.exp(score(trainer, every, Role.POLICY)[2::4]).sum() == pytest.approx(1, abs=1e-5)
    cold = msgspec.structs.replace(
        every, temperature=np.full(every.num_tokens, 0.5, np.float32), top_k=np.full(every.num_tokens, 3, np.int32)
    )
    assert np.exp(score(trainer, cold, Role.POLICY)[2::4]).sum() >= 1


def test_micro_batches_change_nothing_but_rounding(make: MakeTrainer) -> None:
    whole, cut = make(), make(micro_tokens=17)
    batch = rollouts()
    assert np.abs(score(whole, batch, Role.POLICY) - score(cut, batch, Role.POLICY)).max() < 1e-5
    one, two = whole.step(batch).metrics, cut.step(batch).metrics
    assert one == pytest.approx(two, rel=1e-4, abs=1e-6)


def test_metrics_of_the_first_step_are_on_policy(make: MakeTrainer) -> None:
    trainer = make()
    batch = rollouts()
    scores = score(trainer, batch, Role.POLICY)
    metrics = trainer.step(msgspec.structs.replace(batch, sampler_logprobs=np.where(batch.loss_mask, scores, 0))).metrics
    assert metrics["train/ppo_kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["train/pg_clipfrac"] == 0
    assert metrics["train/tis"] == pytest.approx(1, abs=1e-5)
    assert metrics["train/train_rollout_logprob_abs_diff"] == pytest.approx(0, abs=1e-5)
    assert metrics["rollout/raw_reward"] == 0.25
    assert metrics["train/entropy_loss"] == pytest.approx(np.log(VOCAB), abs=0.2)
    named = {"train/loss", "train/pg_loss", "train/tis_abs", "train/tis_clipfrac", "train/ois", "train/grad_norm", "train/lr"}
    assert named <= set(metrics)
    later = make(minibatches=4).step(rollouts()).metrics
    assert later["train/ppo_kl"] != 0 and later["train/ois"] != 1, "later minibatches are off policy"


def test_the_distance_to_the_sampler_is_measured_though_the_sampler_is_the_proximal_policy(make: MakeTrainer) -> None:
    trainer = make(loss=LossConfig(proximal="sampler", correction=CorrectionConfig(kind="none")))
    batch = rollouts()
    distance = np.abs(score(trainer, batch, Role.POLICY) - batch.sampler_logprobs)[batch.loss_mask]
    metrics = trainer.step(batch).metrics
    assert metrics["train/train_rollout_logprob_abs_diff"] == pytest.approx(distance.mean(), abs=1e-5)
    assert metrics["train/train_rollout_logprob_abs_diff"] > 0.01


def test_a_gradient_that_is_not_finite_changes_nothing(make: MakeTrainer, tmp_path: Path) -> None:
    # Finite by itself, but its square is not: in the table's float64, or in torch's float32.
    huge = "1e200" if isinstance(make(), TableTrainer) else "1e25"
    (tmp_path / "mine.py").write_text(
        f"def advantages(batch, arrays):\n    return batch.loss_mask * ({huge} if batch.stage_step == 1 else 1.0)\n"
    )
    loss = LossConfig(advantage=f"{tmp_path}/mine.py:advantages")
    trainer, spared = make(loss=loss), make(loss=loss)
    trainer.step(rollouts())
    spared.step(rollouts())
    before = digest_of(trainer)
    with np.errstate(over="ignore"):
        result = trainer.step(rollouts(1))
    assert not result.finite
    assert result.digest == before
    assert trainer.step(rollouts(2)).digest == spared.step(rollouts(2)).digest


def test_tokens_without_a_finite_log_prob_are_dropped_and_counted(make: MakeTrainer) -> None:
    batch = rollouts()
    broken = batch.sampler_logprobs.copy()
    bad = np.flatnonzero(batch.loss_mask)[3:8]
    broken[bad] = [np.nan, np.inf, -np.inf, np.nan, np.nan]
    one, two = make(minibatches=2), make(minibatches=2, loss=LossConfig(reduction="token_mean"))
    result = one.step(msgspec.structs.replace(batch, sampler_logprobs=broken))
    assert result.finite
    assert result.metrics["train/nonfinite_tokens"] == 5
    assert all(np.isfinite(value) for value in result.metrics.values())
    assert make().step(batch).metrics["train/nonfinite_tokens"] == 0
    # The others count for no more than they did: their weights are those of the whole batch.
    whole = two.step(msgspec.structs.replace(batch, sampler_logprobs=broken)).metrics["train/entropy_loss"]
    assert whole < make(minibatches=2).step(batch).metrics["train/entropy_loss"]
    none = np.where(batch.loss_mask, np.nan, batch.sampler_logprobs).astype(np.float32)
    assert not make().step(msgspec.structs.replace(batch, sampler_logprobs=none)).finite
    assert make().step(msgspec.structs.replace(batch, loss_mask=np.zeros_like(batch.loss_mask))).finite


def test_batches_that_cannot_be_trained_are_refused(make: MakeTrainer) -> None:
    trainer = make()
    before = digest_of(trainer)
    with raises(TrainingError, task=0, rollout=0):
        trainer.step(rollouts(rewards=np.full(32, np.nan)))
    with raises(TrainingError, field="loss_mask"):
        trainer.step(rollouts(loss_mask=np.ones(128, np.bool_)))
    with raises(TrainingError, num_samples=0):
        trainer.step(make_batch("rl", []))
    assert digest_of(trainer) == before


def test_a_save_that_fails_leaves_the_former_checkpoint(make: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make()
    trainer.save(tmp_path / "at", b"old", version=Version()).result()
    trainer.step(rollouts())

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with raises(TrainingError, path=str(tmp_path / "at")):
            trainer.save(tmp_path / "at", b"new", version=Version(0, 1)).result()
        with raises(TrainingError, path=str(tmp_path / "other")):
            trainer.save(tmp_path / "other", b"new", version=Version(0, 1)).result()
    assert [path.name for path in tmp_path.iterdir()] == ["at"]
    assert trainer.load(tmp_path / "at") == b"old"


def test_missing_and_damaged_checkpoints_are_refused(make: MakeTrainer, tmp_path: Path) -> None:
    """One bit in any file is found: in optimizer and random state too, which have no digest of their own."""
    trainer, at = make(), tmp_path / "at"
    with pytest.raises(CheckpointDamaged):
        trainer.load(tmp_path / "nowhere")
    trainer.save(at, b"extra", version=Version(), beside={"more": b"of the caller's"}).result()
    assert (at / "more").read_bytes() == b"of the caller's"
    for path in [path for path in at.iterdir() if path.name != SEAL_FILE]:
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(CheckpointDamaged) as caught:
            trainer.load(at)
        assert path.name in caught.value.values["problem"]
        path.write_bytes(whole)
    assert trainer.load(at) == b"extra"
    largest = max(at.iterdir(), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-200])
    with pytest.raises(CheckpointDamaged):
        trainer.load(at)
    (at / SEAL_FILE).unlink()  # one of an earlier build has none
    with pytest.raises(CheckpointDamaged):
        trainer.load(at)


def test_an_exported_policy_is_a_model_directory_with_the_same_parameters(make: MakeTrainer, tmp_path: Path) -> None:
    trainer = make()
    trainer.step(rollouts())
    trainer.export(tmp_path / "export")
    backend: Any = "table" if (tmp_path / "export" / "table.json").exists() else "torch"
    other = make_trainer(Config(trainer=TrainerConfig(backend=backend)), tmp_path / "export")
    assert digest_of(other) == digest_of(trainer)


def test_an_update_that_gives_infinite_parameters_is_said(make: MakeTrainer) -> None:
    trainer = make(optimizer=OptimizerConfig(learning_rate=1e60))
    with pytest.raises(WeightsDiverged, match="the weights diverged"):
        for step in range(3):
            trainer.step(rollouts(step))
