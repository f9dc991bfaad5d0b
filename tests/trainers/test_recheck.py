"""Rounding told from drift: samples scored again with the very weights that sampled them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from streamrl.config.registry import Role
from streamrl.config.tree import Config, OptimizerConfig, TasksConfig, TrainerConfig
from streamrl.core.batches import TrainBatch
from streamrl.trainers.factory import make_trainer
from streamrl.trainers.torch.recheck import SAMPLER_ERROR, single_age
from tests.support.scoring import score
from tests.support.trainers import Rollouts

MEAN, MAX = "train/same_weights_logprob_abs_diff", "train/same_weights_logprob_abs_diff_max"


def make(directory: Path, **trainer: Any) -> Any:
    options = {"optimizer": OptimizerConfig(learning_rate=0.02), "check_logprobs": 5, **trainer}
    return make_trainer(Config(trainer=TrainerConfig(**options), tasks=TasksConfig(max_staleness=2)), directory)


def sampled(batch: TrainBatch, trainer: Any) -> TrainBatch:
    """The batch as if `trainer`, as it is now, had sampled its trained tokens."""
    return replace(batch, sampler_logprobs=np.where(batch.loss_mask, score(trainer, batch, Role.POLICY), 0.0).astype(np.float32))


def aged(batch: TrainBatch, age: int) -> TrainBatch:
    return replace(batch, staleness=np.where(batch.loss_mask, age, 0).astype(np.int32))


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 0.05)])
@pytest.mark.parametrize("age", [0, 1, 2])
def test_the_drift_is_left_out_whatever_the_age(model_dir: Path, rollouts: Rollouts, dtype: str, bound: float, age: int) -> None:
    trainer = make(model_dir, dtype=dtype)
    batches: list[TrainBatch] = []
    for step in range(3):
        batches.append(sampled(rollouts(step + 10), trainer))
        if step < 2:
            trainer.step(rollouts(step))
    # Sampled by version 2 - age, trained from version 2.
    old = aged(replace(batches[2 - age], version=rollouts(2).version), age)
    found = trainer.step(old).metrics
    assert found[MEAN] <= found[MAX] < bound
    if age:
        assert found["train/train_rollout_logprob_abs_diff_max"] > 10 * found[MAX]


@pytest.mark.parametrize("wrong", [False, True])
def test_float32_tells_rounding_from_a_sampler_with_other_weights(model_dir: Path, rollouts: Rollouts, wrong: bool) -> None:
    trainer = make(model_dir, dtype="bfloat16")
    batch = sampled(rollouts(10), trainer)
    noise = np.random.default_rng(0).choice([-0.02, 0.02], len(batch.tokens)).astype(np.float32)
    batch = replace(batch, sampler_logprobs=np.where(batch.loss_mask, batch.sampler_logprobs + noise, 0.0).astype(np.float32))
    if wrong:
        for step in range(2):
            trainer.step(rollouts(step))
        batch = replace(batch, version=rollouts(2).version)
    found = trainer.step(batch).metrics
    assert found[MEAN] <= found[MAX.replace("max", "p99")] <= found[MAX]
    assert found["train/same_weights_furthest_logprob"] in batch.sampler_logprobs[batch.loss_mask]
    sampler, trainers = found["train/float32_sampler_abs_diff_max"], found["train/float32_trainer_abs_diff_max"]
    assert 0 < trainers < 0.05
    assert (sampler > 4 * trainers + 0.05) == wrong


def test_it_changes_no_bit_and_a_wrong_version_shows(model_dir: Path, rollouts: Rollouts) -> None:
    plain, checked = make(model_dir, check_logprobs=0), make(model_dir)
    for step in range(4):
        batch = aged(rollouts(step), min(step, 2))
        one, other = plain.step(batch), checked.step(batch)
        assert one.digest == other.digest
        # Without it there are numbers only where the newest weights sampled, and of a version that is kept now and then: 0.
        assert (MEAN in one.metrics) == (step < 2)
        assert MEAN in other.metrics
    trainer = make(model_dir)
    batch = sampled(rollouts(10), trainer)
    for step in range(2):
        trainer.step(rollouts(step))
    assert trainer.step(aged(replace(batch, version=rollouts(2).version), 1)).metrics[MAX] > 0.05


def test_a_run_whose_samples_are_always_old_is_measured_now_and_then(model_dir: Path, rollouts: Rollouts) -> None:
    """Versions 0, 16 and 32 are, once each; nobody has asked for it."""
    trainer = make(model_dir, check_logprobs=0, optimizer=OptimizerConfig(learning_rate=1e-3))
    before = [sampled(rollouts(0), trainer)]
    measured: dict[int, float] = {}
    for step in range(35):
        old = before[max(0, step - 2)]
        # A fault of 0.25 nats begins behind the first look.
        lied = replace(old, sampler_logprobs=np.where(old.loss_mask, old.sampler_logprobs - 0.25 * (step > 20), 0.0).astype(np.float32))
        batch = aged(replace(lied, version=rollouts(step).version), min(step, 2) or 1)
        found = trainer.step(replace(batch, engines=("engine-0-a",) * batch.num_samples)).metrics
        if MEAN in found:
            assert found[f"{MEAN}/engine-0"] == found[MEAN]
            measured[step] = found[MEAN]
        before.append(sampled(rollouts(step + 1), trainer))
    assert list(measured) == [1, 18, 34]
    assert measured[18] < 1e-5 and measured[34] == pytest.approx(0.25, abs=1e-5)


def test_versions_that_are_not_kept_give_no_number(model_dir: Path, rollouts: Rollouts, tmp_path: Path) -> None:
    trainer = make(model_dir)
    assert MEAN not in trainer.step(aged(rollouts(3), 1)).metrics
    saved = trainer.save(tmp_path / "at", b"", version=rollouts(4).version)
    trainer.step(aged(rollouts(4), 1))
    trainer.step(aged(rollouts(5), 2))
    saved.result()
    trainer.load(tmp_path / "at")
    # Back at version 4: what was kept of 5 is not mistaken for it, 3 and 4 are still known.
    batch = sampled(rollouts(4), trainer)
    assert trainer.step(aged(batch, 0)).metrics[MAX] < 1e-5


def test_samples_of_several_versions_have_no_age_of_their_own(rollouts: Rollouts) -> None:
    batch = aged(rollouts(0), 2)
    ages, mask = batch.staleness.copy(), batch.loss_mask.copy()
    ages[np.flatnonzero(mask)[0]] = 1
    mask[batch.offsets[-2] :] = False
    found = single_age(replace(batch, staleness=ages, loss_mask=mask))
    assert found[0] == found[-1] == -1 and (found[1:-1] == 2).all()


def test_a_float32_copy_that_does_not_fit_is_left_out_and_said(model_dir: Path, rollouts: Rollouts) -> None:
    trainer = make(model_dir, dtype="bfloat16")
    free = [1 << 20]
    trainer._recheck._free_bytes = lambda: free[0]
    found = [trainer.step(aged(sampled(rollouts(step), trainer), 0)) for step in range(2)]
    assert all(SAMPLER_ERROR not in one.metrics for one in found)
    assert sum("not compared in float32" in text for one in found for text in one.notices) == 1
    free[0] = 1 << 40
    assert SAMPLER_ERROR in trainer.step(aged(sampled(rollouts(2), trainer), 0)).metrics
