"""Models that are looked at: the reference of a KL, in loss and reward, and the teacher of a distillation."""

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import Qwen3ForCausalLM

from streamrl.config.loss import CorrectionConfig, DistillationConfig, KLConfig, LossConfig
from streamrl.config.registry import Role
from streamrl.errors import CheckpointDamaged, ConfigError, TrainingError
from streamrl.schemas.versions import Version
from streamrl.trainers.torch import causal_lm
from tests.support import trainers
from tests.support.errors import raises
from tests.support.scoring import score
from tests.support.trainers import Models, Rollouts

make = partial(trainers.make, rate=3e-3)


@pytest.fixture(scope="module")
def other_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with other weights."""
    model = Qwen3ForCausalLM.from_pretrained(model_dir)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    path = tmp_path_factory.mktemp("other")
    model.save_pretrained(path)
    return path


UNBIASED = [(estimator, True) for estimator in ("k1", "k2", "k3", "low_var_kl")]
PLAIN = [(estimator, False) for estimator in ("k1", "k2", "k3", "low_var_kl", "abs", "k1+", "k3+")]


def test_a_kl_in_the_loss_begins_at_zero_and_holds_the_policy(model_dir: Path, rollouts: Rollouts) -> None:
    batch, free = rollouts(), make(model_dir)
    reference = score(free, batch, Role.POLICY)
    for _ in range(7):
        free.step(batch)

    def moved(trainer: Any) -> float:
        return np.abs(score(trainer, batch, Role.POLICY) - reference)[batch.loss_mask].mean()

    for case in UNBIASED + PLAIN:
        estimator, unbiased = case
        trainer = make(model_dir, LossConfig(kl=KLConfig(loss_coef=3.0, estimator=estimator, unbiased=unbiased)))  # type: ignore[arg-type]
        assert np.array_equal(score(trainer, batch, Role.REFERENCE), reference), case
        results = [trainer.step(batch).metrics for _ in range(7)]
        first, last = results[0], results[-1]
        assert first["train/kl_loss"] == pytest.approx(0.0, abs=1e-6), case
        assert abs(last["train/kl_loss"]) > 1e-5, case
        assert np.array_equal(score(trainer, batch, Role.REFERENCE), reference), f"it is frozen: {case}"
        assert last["rollout/ref_log_probs"] == pytest.approx(first["rollout/ref_log_probs"], abs=1e-6), case
        # k1's gradient is that of the log-prob: no hold at all without the ratio.
        assert case == ("k1", False) or moved(trainer) < moved(free), case


def test_an_adapted_coefficient_follows_the_kl_and_is_saved(model_dir: Path, other_dir: Path, rollouts: Rollouts, tmp_path: Path) -> None:
    """Each batch's coefficient is the last one's moved by the last one's KL; who goes on from a checkpoint goes on with it."""
    kl = KLConfig(loss_coef=0.2, estimator="k3+", reference=str(other_dir), target=0.01, gain=0.5)
    trainer = make(model_dir, LossConfig(kl=kl))
    results: list[Any] = []
    for step in range(4):
        if step == 2:
            trainer.save(tmp_path / "at", b"", version=Version(0, 2)).result()
        results.append(trainer.step(rollouts(step)))
    metrics = [result.metrics for result in results]
    assert metrics[0]["train/kl_coef"] == 0.2
    for before, after in pairwise(metrics):
        error = min(max(before["train/kl_loss"] / 0.01 - 1.0, -0.2), 0.2)
        assert after["train/kl_coef"] == pytest.approx(before["train/kl_coef"] * (1 + 0.5 * error))
    assert metrics[3]["train/kl_coef"] != 0.2
    again = make(model_dir, LossConfig(kl=kl))
    again.load(tmp_path / "at")
    assert [again.step(rollouts(step)) for step in (2, 3)] == results[2:]


def test_a_coefficient_is_adapted_to_nats_a_token(model_dir: Path, other_dir: Path, rollouts: Rollouts, tmp_path: Path) -> None:
    """A sum over `constant_length` is a tenth of a mean over tokens, or less; what it is held against is not."""
    kl = KLConfig(loss_coef=1e-9, estimator="k3+", reference=str(other_dir), gain=1.0)
    mean = make(model_dir, LossConfig(kl=kl, reduction="token_mean")).step(rollouts()).metrics["train/kl_loss"]
    assert mean > 0
    kl = replace(kl, target=mean / 1.05)
    trainer = make(model_dir, LossConfig(kl=kl, reduction="constant_length", constant_length=1000))
    assert trainer.step(rollouts()).metrics["train/kl_loss"] < mean / 10
    assert trainer.step(rollouts(1)).metrics["train/kl_coef"] == pytest.approx(1.05e-9, rel=1e-3)
    # From the first batch on: a branch of a run whose coefficient had moved may leave the target out, or let it fall instead.
    kl = KLConfig(loss_coef=0.2, estimator="k3+", reference=str(other_dir), target=1e-4, gain=1.0)
    trainer = make(model_dir, LossConfig(kl=kl))
    trainer.step(rollouts())
    trainer.save(tmp_path / "at", b"", version=Version(0, 1)).result()
    kl = replace(kl, target=0.0, gain=KLConfig().gain, decay_steps=10)
    branch = make(model_dir, LossConfig(kl=kl))
    branch.load(tmp_path / "at")
    assert [branch.step(rollouts(step)).metrics["train/kl_coef"] for step in (1, 2)] == pytest.approx([0.18, 0.16])


@pytest.mark.parametrize("where", ["loss_coef", "reward_coef"])
def test_a_coefficient_that_came_to_nothing_needs_no_reference(model_dir: Path, other_dir: Path, rollouts: Rollouts, where: str) -> None:
    kl = KLConfig(**{where: 0.2}, estimator="k2", reference=str(other_dir), decay_steps=2)  # type: ignore[arg-type]
    trainer = make(model_dir, LossConfig(advantage="reinforce_plus_plus", kl=kl))
    results = [trainer.step(rollouts(step)) for step in range(4)]
    assert [result.metrics["train/kl_coef"] for result in results] == pytest.approx([0.2, 0.1, 0.0, 0.0])
    assert ["perf/ref_log_probs_time" in result.times for result in results] == [True, True, False, False]


def test_distillation_draws_the_policy_to_its_teacher(model_dir: Path, other_dir: Path, rollouts: Rollouts, tmp_path: Path) -> None:
    (tmp_path / "nothing.py").write_text("def advantages(batch, arrays):\n    return batch.loss_mask * 0.0\n")
    teach = DistillationConfig(coef=1.0, teacher=str(other_dir))
    loss = LossConfig(advantage=f"{tmp_path}/nothing.py:advantages", distillation=teach, correction=CorrectionConfig(kind="none"))
    trainer = make(model_dir, loss)
    batch = rollouts()
    teacher = score(trainer, batch, Role.TEACHER)

    def distance() -> float:
        return float(np.abs(score(trainer, batch, Role.POLICY) - teacher)[batch.loss_mask].mean())

    before = distance()
    found = [trainer.step(batch).metrics["train/opd_reverse_kl"] for _ in range(10)]
    assert abs(found[-1]) < abs(found[0])
    assert distance() < 0.8 * before
    kl = KLConfig(reward_coef=0.1, reference=str(other_dir))
    trainer = make(model_dir, LossConfig(advantage="reinforce_plus_plus", kl=kl))
    batch = rollouts()
    policy, reference = score(trainer, batch, Role.POLICY), score(trainer, batch, Role.REFERENCE)
    bounds = zip(batch.offsets[:-1], batch.offsets[1:], strict=True)
    per_rollout = [(policy - reference)[a:b][batch.loss_mask[a:b]].mean() for a, b in bounds]
    assert trainer.step(batch).metrics["rollout/kl"] == pytest.approx(np.mean(per_rollout), abs=1e-5)


def test_a_reference_is_renewed_after_every_so_many_batches(model_dir: Path, rollouts: Rollouts, tmp_path: Path) -> None:
    teach = DistillationConfig(coef=0.1, teacher=str(model_dir))
    loss = LossConfig(kl=KLConfig(loss_coef=0.5, estimator="k2", reference_every=2), distillation=teach)
    trainer, probe = make(model_dir, loss), rollouts(99)
    initial, teacher = trainer.digest(), score(trainer, probe, Role.TEACHER)
    results: list[Any] = []
    for step in range(5):
        if step == 3:
            trainer.save(tmp_path / "at", b"", version=Version(0, 3)).result()
        policy = score(trainer, probe, Role.POLICY)
        results.append(trainer.step(rollouts(step)))
        assert step not in (2, 4) or np.array_equal(score(trainer, probe, Role.REFERENCE), policy)
    digests = [result.digest for result in results]
    assert [result.reference for result in results] == [initial, initial, digests[1], digests[1], digests[3]]
    assert np.array_equal(score(trainer, probe, Role.TEACHER), teacher), "it has the reference's directory, and stays as it was"
    held = make(model_dir, LossConfig(kl=KLConfig(loss_coef=0.5, estimator="k2"), distillation=teach))
    others = [held.step(rollouts(step)) for step in range(5)]
    assert [other.digest == ours for other, ours in zip(others, digests, strict=True)] == [True, True, False, False, False]
    assert {other.reference for other in others} == {""}
    again = make(model_dir, loss)
    again.load(tmp_path / "at")
    assert [again.step(rollouts(step)) for step in (3, 4)] == results[3:]


def test_a_damaged_reference_is_not_restored(model_dir: Path, rollouts: Rollouts, tmp_path: Path) -> None:
    loss = LossConfig(kl=KLConfig(loss_coef=0.5, estimator="k2", reference_every=1))
    trainer = make(model_dir, loss)
    for step in range(2):
        trainer.step(rollouts(step))
    trainer.save(tmp_path / "at", b"", version=Version(0, 2)).result()
    file = tmp_path / "at" / "reference.safetensors"
    (tmp_path / "at" / "files.json").unlink()  # so that the digest in it has to tell
    whole = file.read_bytes()
    file.write_bytes(whole[:-8] + bytes(8))
    with pytest.raises(CheckpointDamaged, match="a reference"):
        make(model_dir, loss).load(tmp_path / "at")
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointDamaged):
        make(model_dir, loss).load(tmp_path / "at")


def test_one_directory_loads_once_warm_ups_renew_none(model_dir: Path, monkeypatch: pytest.MonkeyPatch, demonstrations: Rollouts) -> None:
    loaded, load = list[Path](), causal_lm._load
    monkeypatch.setattr(causal_lm, "_load", lambda path, *given: (loaded.append(path), load(path, *given))[1])
    teach = DistillationConfig(coef=0.1, teacher=str(model_dir))
    make(model_dir, LossConfig(kl=KLConfig(loss_coef=0.1), distillation=teach))
    assert len(loaded) == 2, "the policy, and the two that are frozen"
    make(model_dir)
    assert len(loaded) == 3
    trainer = make(model_dir, LossConfig(kl=KLConfig(loss_coef=0.5, estimator="k2", reference_every=1)))
    initial = trainer.digest()
    assert [trainer.step(demonstrations(step)).reference for step in range(3)] == [initial] * 3


def test_models_that_cannot_be_looked_at_are_refused(model_dir: Path, make_model: Models, tmp_path: Path, rollouts: Rollouts) -> None:
    def refused(kl: KLConfig = KLConfig(), teacher: Path | None = None, **values: Any) -> str:  # noqa: B008
        distillation = DistillationConfig(coef=0.1, teacher=str(teacher)) if teacher else DistillationConfig()
        with raises(ConfigError, **values) as caught:
            make(model_dir, LossConfig(kl=kl, distillation=distillation))
        return caught.value.hint

    gone = str(tmp_path / "gone")
    assert "loss.kl.reference" in refused(KLConfig(loss_coef=0.1, reference=gone), key="loss.kl.reference", path=gone)
    refused(teacher=tmp_path, key="loss.distillation.teacher", path=str(tmp_path))
    refused(teacher=make_model(vocab_size=24), key="loss.distillation.teacher", expected=16, got=24)
    wider = KLConfig(loss_coef=0.5, reference=str(make_model(intermediate_size=48)), reference_every=2)
    refused(wider, key="loss.kl.reference_every")
    with raises(TrainingError, role="value"):
        score(make(model_dir, LossConfig(kl=KLConfig(loss_coef=0.1))), rollouts(), Role.VALUE)
