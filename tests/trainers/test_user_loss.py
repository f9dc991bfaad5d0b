"""Losses of the user's that change nothing: an error with their name, or a mark on the batch."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from streamrl.config.loss import LossConfig
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
"""By arguments and name what a function gives that does nothing else."""
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
