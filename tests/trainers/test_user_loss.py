"""Losses of the user's: what they change, an error with their name or a mark on the batch; and those with slime's signature."""

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from streamrl.config.loss import CorrectionConfig, KLConfig, LossConfig
from streamrl.core.batches import TrainBatch
from streamrl.errors import ConfigError, StreamRLError, TrainingError
from streamrl.trainers.protocol import StepResult
from tests.support.errors import raises
from tests.support.trainers import Rollouts, make

RETURNS = {
    "tokens, loss": {
        "good": "plain(tokens), {}",
        "zero": "0 * tokens.logprobs, {}",
        "far_clipped": "-(tokens.logprobs - tokens.proximal + 9).exp().clamp(0.8, 1.2) * tokens.advantages, {}",
        "nan": "plain(tokens) * float('nan'), {}",
        "nan_slope": "plain(tokens) + 0 * (tokens.logprobs - tokens.logprobs.detach()).sqrt(), {}",
        "detached": "plain(tokens).detach(), {}",
        "anew": "torch.zeros_like(tokens.logprobs, requires_grad=True) + 1, {}",
        "number": "1.0, {}",
        "alone": "plain(tokens)",
        "metric": "plain(tokens), {'train/mine': 1.0}",
        "raises": "plain(tokens) + tokens.nothing, {}",
        "leaves": "sys.exit(0)",
        "disk": "open('/nowhere/at/all')",
    },
    "batch, arrays": {
        "advantages_of_zero": "np.zeros(batch.num_tokens)",
        "advantages_raise": "batch.rewards[len(batch.rewards)]",
        "short": "batch.rewards",
    },
    "args, batch, logits, sum_of_sample_mean": {
        "theirs": "logits.float().logsumexp(-1).sum(), {}",
        "theirs_zero": "logits.sum() * 0, {}",
        "theirs_nan": "logits.sum() * float('nan'), {}",
        "theirs_detached": "logits.detach().sum(), {}",
        "theirs_anew": "torch.ones(1, requires_grad=True) * 5, {}",
        "theirs_raises": "{}['loss']",
    },
}
"""Functions that only return a value, by their arguments and names."""
OTHERS = """
import sys
import numpy as np
import torch

calls = 0

def plain(tokens):
    return -(tokens.logprobs - tokens.proximal).exp() * tokens.advantages

def mostly_nan(tokens, loss):
    global calls
    calls += 1
    return plain(tokens) * (1.0 if calls % 8 == 0 else float("nan")), {}

def no_grad(tokens, loss):
    with torch.no_grad():
        return plain(tokens), {}

def leaves_it_off(tokens, loss):
    found = plain(tokens)
    torch.set_grad_enabled(False)
    return found, {}

def turns_it_off(tokens, loss):
    torch.set_grad_enabled(False)
    return plain(tokens), {}

def writes(tokens, loss):
    tokens.sampler.copy_(tokens.proximal)
    return plain(tokens), {}

def advantages_written(batch, arrays):
    batch.sampler_logprobs[:] = 0
    return batch.rewards[0] * arrays.mask

def advantages_of_less(batch, arrays):
    arrays.mask[::2] = False
    return np.ones(batch.num_tokens)

def theirs_writes(args, batch, logits, sum_of_sample_mean):
    for values in (*batch["rollout_log_probs"], *batch["advantages"], *batch["loss_masks"]):
        values.zero_()
    return logits.float().logsumexp(-1).sum(), {}

def theirs_turns_it_off(args, batch, logits, sum_of_sample_mean):
    torch.set_grad_enabled(False)
    return logits.sum(), {}

"""
CODE = OTHERS + "".join(
    f"def {name}({given}):\n    return {value}\n\n" for given, named in RETURNS.items() for name, value in named.items()
)


class Trains:
    def __init__(self, model_dir: Path, folder: Path, rollouts: Rollouts) -> None:
        (folder / "mine.py").write_text(CODE)
        self._model_dir, self._folder, self._rollouts = model_dir, folder, rollouts

    def name(self, function: str) -> str:
        return f"{self._folder}/mine.py:{function}"

    def step(self, key: str, function: str, batch: TrainBatch | None = None, **trainer: Any) -> tuple[StepResult, bool]:
        """Train one batch; returns what the step gives, and whether it has changed the policy."""
        loss = msgspec.structs.replace(LossConfig(), **{key: self.name(function)})
        made = make(self._model_dir, loss, rate=1e-2, **trainer)
        before = made.digest()
        result = made.step(batch or self._rollouts(0))
        return result, result.digest != before


@pytest.fixture
def trains(model_dir: Path, rollouts: Rollouts, tmp_path: Path) -> Trains:
    return Trains(model_dir, tmp_path, rollouts)


@pytest.mark.parametrize(
    ("key", "function", "finite", "gradient", "changes"),
    [
        ("policy", "good", True, "some", True),
        ("policy", "leaves_it_off", True, "some", True),
        ("policy", "zero", True, "none", False),
        ("policy", "far_clipped", True, "zero", False),
        ("policy", "nan", False, "some", False),
        ("policy", "nan_slope", False, "some", False),
        ("policy", "mostly_nan", False, "some", False),
        ("advantage", "advantages_of_zero", True, "none", False),
        ("slime_loss", "theirs", True, "some", True),
        ("slime_loss", "theirs_zero", True, "none", False),
        ("slime_loss", "theirs_nan", False, "some", False),
    ],
)
def test_a_batch_says_what_the_loss_gave_it(trains: Trains, key: str, function: str, finite: bool, gradient: str, changes: bool) -> None:
    result, changed = trains.step(key, function, micro_tokens=16)
    assert (result.finite, result.gradient, changed) == (finite, gradient, changes)
    # A loss of the user's is named where it is why.
    assert (trains.name(function) in result.fault) == (not finite or gradient == "none")


@pytest.mark.parametrize(
    ("key", "function", "kind"),
    [
        *(("policy", name, ConfigError) for name in ("detached", "no_grad", "turns_it_off", "anew", "number", "alone", "metric")),
        *(("policy", name, ConfigError) for name in ("writes", "raises", "leaves")),
        ("policy", "disk", TrainingError),
        *(("advantage", name, ConfigError) for name in ("advantages_raise", "short", "advantages_written", "advantages_of_less")),
        *(("slime_loss", f"theirs_{name}", ConfigError) for name in ("detached", "anew", "turns_it_off", "raises")),
    ],
)
def test_what_will_fail_again_is_an_error_with_its_name(trains: Trains, key: str, function: str, kind: type[StreamRLError]) -> None:
    """A `ConfigError` is not restarted; what may pass is a `TrainingError`."""
    with raises(kind, key=f"loss.{key}", function=trains.name(function)) as caught:
        trains.step(key, function)
    assert type(caught.value) is kind
    if "raise" in function or function in ("leaves", "disk"):
        assert "mine.py:" in caught.value.message.partition("failed")[2]


def test_nothing_is_due_where_advantages_are_all_zero(trains: Trains, rollouts: Rollouts) -> None:
    batch = rollouts(0)
    equal = msgspec.structs.replace(batch, rewards=np.ones_like(batch.rewards))
    for key, function in (("policy", "zero"), ("advantage", "advantages_of_zero"), ("slime_loss", "theirs_zero")):
        result, _ = trains.step(key, function, equal)
        assert (result.gradient, result.fault.partition(",")[0]) == ("zero", "all its advantages are 0")


def test_what_a_loss_writes_to_stays_out_of_the_batch(trains: Trains, rollouts: Rollouts) -> None:
    batch, same = rollouts(0), rollouts(0)
    trains.step("slime_loss", "theirs_writes", batch, minibatches=2)
    assert all(np.array_equal(getattr(batch, name), getattr(same, name)) for name in ("sampler_logprobs", "loss_mask", "rewards"))


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


in_two = partial(make, minibatches=2)


@pytest.mark.parametrize("micro_tokens", [8, 16384])
@pytest.mark.parametrize("reduction", ["rollout_mean", "token_mean"])
def test_the_same_loss_gives_the_same_steps(model_dir: Path, rollouts: Rollouts, theirs: str, reduction: Any, micro_tokens: int) -> None:
    shared: dict[str, Any] = {"reduction": reduction, "kl": KLConfig(loss_coef=0.1, estimator="k3")}
    shared["correction"] = CorrectionConfig(kind="clip", low=0.5, high=1.5)
    ours = in_two(model_dir, LossConfig(**shared))
    other = in_two(model_dir, LossConfig(slime_loss=f"{theirs}:clipped", **shared), micro_tokens=micro_tokens)
    for step in range(3):
        batch = rollouts(step, temperature=0.7)
        a, b = ours.step(batch).metrics, other.step(batch).metrics
        for name in ("train/loss", "train/pg_loss", "train/kl_loss", "train/grad_norm", "rollout/log_probs", "train/ess_token"):
            assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-5), (step, name)
        assert b["custom/ratio"] == pytest.approx(a["train/ois"], rel=1e-4)


def test_what_it_is_given(model_dir: Path, rollouts: Rollouts, theirs: str) -> None:
    trainer = in_two(model_dir, LossConfig(slime_loss=f"{theirs}:looked"), minibatches=1)
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
    result = in_two(model_dir, LossConfig(slime_loss=f"{theirs}:clipped")).step(msgspec.structs.replace(batch, sampler_logprobs=broken))
    assert result.metrics["train/nonfinite_tokens"] == 2
    assert np.isfinite(result.metrics["train/loss"])


def test_what_is_no_loss_is_refused_but_for_warm_ups(model_dir: Path, demonstrations: Rollouts, theirs: str, rollouts: Rollouts) -> None:
    one = in_two(model_dir, LossConfig(slime_loss=f"{theirs}:vector")).step(demonstrations())
    assert one == in_two(model_dir, LossConfig()).step(demonstrations())
    with raises(ConfigError, key="loss.slime_loss", name="cliped"):
        in_two(model_dir, LossConfig(slime_loss=f"{theirs}:cliped"))
    with raises(ConfigError, key="loss.slime_loss", function=f"{theirs}:vector"):
        in_two(model_dir, LossConfig(slime_loss=f"{theirs}:vector")).step(rollouts())
    with raises(ConfigError, function=f"{theirs}:words", metric="what"):
        in_two(model_dir, LossConfig(slime_loss=f"{theirs}:words")).step(rollouts())
