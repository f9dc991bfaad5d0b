"""A loss with slime's signature, written as its users write theirs, does what the same loss does here."""

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from streamrl.config.loss import CorrectionConfig, KLConfig, LossConfig
from streamrl.errors import ConfigError
from tests.support import trainers
from tests.support.errors import raises
from tests.support.trainers import Rollouts

THEIRS = """
import torch


def response_log_probs(args, batch, logits):
    found, end = [], 0
    for tokens, total, response in zip(batch["unconcat_tokens"], batch["total_lengths"], batch["response_lengths"]):
        end += total
        rows = logits[0, end - response - 1 : end - 1] / args.rollout_temperature
        found.append(torch.log_softmax(rows, dim=-1).gather(-1, tokens[-response:, None]).squeeze(-1))
    return found


def clipped(args, batch, logits, sum_of_sample_mean):
    log_probs = torch.cat(response_log_probs(args, batch, logits))
    old = torch.cat(batch["log_probs"])
    sampler = torch.cat(batch["rollout_log_probs"])
    advantages = torch.cat(batch["advantages"])
    ratio = (log_probs - old).exp()
    surrogate = torch.max(-ratio * advantages, -ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip_high) * advantages)
    weights = (old - sampler).exp().clamp(args.tis_clip_low, args.tis_clip)
    pg_loss = sum_of_sample_mean(surrogate * weights)
    loss = pg_loss
    metrics = {"pg_loss": pg_loss.clone().detach(), "custom/ratio": sum_of_sample_mean(ratio).item()}
    if args.use_kl_loss:
        r = log_probs - torch.cat(batch["ref_log_probs"])
        kl = sum_of_sample_mean((-r).exp() - 1 + r)
        loss = loss + args.kl_loss_coef * kl
        metrics["kl_loss"] = kl.clone().detach()
    return loss, metrics


def looked(args, batch, logits, sum_of_sample_mean):
    assert args.rollout_temperature == 1.0
    assert logits.shape[:2] == batch["tokens"].shape
    assert batch["tokens"].shape[1] == sum(batch["total_lengths"])
    for name in ("loss_masks", "advantages", "log_probs", "rollout_log_probs"):
        assert [len(one) for one in batch[name]] == batch["response_lengths"], name
    masks = torch.cat(batch["loss_masks"])
    assert 0 < masks.sum() < len(masks)
    one = sum_of_sample_mean(torch.where(masks > 0, 1.0, float("nan")))
    return logits.sum() * 0, {"rollouts": one, "rewards": sum(batch["rewards"])}


def vector(args, batch, logits, sum_of_sample_mean):
    return logits[0, :, 0], {}


def words(args, batch, logits, sum_of_sample_mean):
    return logits.sum(), {"what": "words"}
"""


@pytest.fixture
def theirs(tmp_path: Path) -> str:
    (tmp_path / "theirs.py").write_text(THEIRS)
    return f"{tmp_path}/theirs.py"


make = partial(trainers.make, minibatches=2)


@pytest.mark.parametrize("micro_tokens", [8, 16384])
@pytest.mark.parametrize("reduction", ["rollout_mean", "token_mean"])
def test_the_same_loss_gives_the_same_steps(model_dir: Path, rollouts: Rollouts, theirs: str, reduction: Any, micro_tokens: int) -> None:
    shared: dict[str, Any] = {"reduction": reduction, "kl": KLConfig(loss_coef=0.1, estimator="k3")}
    shared["correction"] = CorrectionConfig(kind="clip", low=0.5, high=1.5)
    ours = make(model_dir, LossConfig(**shared))
    other = make(model_dir, LossConfig(slime_loss=f"{theirs}:clipped", **shared), micro_tokens=micro_tokens)
    for step in range(3):
        batch = rollouts(step, temperature=0.7)
        a, b = ours.step(batch).metrics, other.step(batch).metrics
        for name in ("train/loss", "train/pg_loss", "train/kl_loss", "train/grad_norm", "rollout/log_probs", "train/ess_token"):
            assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-5), (step, name)
        assert b["custom/ratio"] == pytest.approx(a["train/ois"], rel=1e-4)


def test_what_it_is_given(model_dir: Path, rollouts: Rollouts, theirs: str) -> None:
    trainer = make(model_dir, LossConfig(slime_loss=f"{theirs}:looked"), minibatches=1)
    batch = rollouts()
    mask = batch.loss_mask.copy()
    mask[batch.offsets[1:][::2] - 2] = False  # what a tool said, in the middle of a response
    mask[batch.offsets[1:][1::3] - 1] = False  # and at an end
    metrics = trainer.step(msgspec.structs.replace(batch, loss_mask=mask)).metrics
    trained = np.unique(np.repeat(np.arange(12), batch.lengths)[mask])
    assert len(trained) < 12
    assert metrics["train/rollouts"] == pytest.approx(len(trained) / 12)
    assert not any("is_ratio" in name or "ess_weights" in name for name in metrics), "the weights, if any, are its own"
    assert metrics["train/rewards"] == pytest.approx(batch.rewards[trained].sum() / 12)
    batch = rollouts()
    broken = batch.sampler_logprobs.copy()
    broken[np.flatnonzero(batch.loss_mask)[:2]] = np.nan
    result = make(model_dir, LossConfig(slime_loss=f"{theirs}:clipped")).step(msgspec.structs.replace(batch, sampler_logprobs=broken))
    assert result.metrics["train/nonfinite_tokens"] == 2
    assert np.isfinite(result.metrics["train/loss"])


def test_what_is_no_loss_is_refused_but_for_warm_ups(model_dir: Path, demonstrations: Rollouts, theirs: str, rollouts: Rollouts) -> None:
    one = make(model_dir, LossConfig(slime_loss=f"{theirs}:vector")).step(demonstrations())
    assert one == make(model_dir, LossConfig()).step(demonstrations())
    with raises(ConfigError, key="loss.slime_loss", name="cliped"):
        make(model_dir, LossConfig(slime_loss=f"{theirs}:cliped"))
    with raises(ConfigError, key="loss.slime_loss", function=f"{theirs}:vector"):
        make(model_dir, LossConfig(slime_loss=f"{theirs}:vector")).step(rollouts())
    with raises(ConfigError, function=f"{theirs}:words", metric="what"):
        make(model_dir, LossConfig(slime_loss=f"{theirs}:words")).step(rollouts())
