"""Losses of the user's that change nothing: an error with their name, or a mark on the batch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from streamrl.config.loss import LossConfig
from streamrl.config.tree import Config, OptimizerConfig, TrainerConfig
from streamrl.core.batches import TrainBatch
from streamrl.errors import ConfigError, StreamRLError, TrainingError
from streamrl.trainers.factory import make_trainer
from streamrl.trainers.protocol import StepResult
from tests.support.errors import raises

Rollouts = Callable[..., TrainBatch]

CODE = """
import sys
import numpy as np
import torch

calls = 0

def plain(tokens):
    return -(tokens.logprobs - tokens.proximal).exp() * tokens.advantages

def good(tokens, loss):
    return plain(tokens), {}

def zero(tokens, loss):
    return 0 * tokens.logprobs, {}

def far_clipped(tokens, loss):
    return -(tokens.logprobs - tokens.proximal + 9).exp().clamp(0.8, 1.2) * tokens.advantages, {}

def nan(tokens, loss):
    return plain(tokens) * float("nan"), {}

def nan_slope(tokens, loss):
    return plain(tokens) + 0 * (tokens.logprobs - tokens.logprobs.detach()).sqrt(), {}

def mostly_nan(tokens, loss):
    global calls
    calls += 1
    return plain(tokens) * (1.0 if calls % 8 == 0 else float("nan")), {}

def detached(tokens, loss):
    return plain(tokens).detach(), {}

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

def anew(tokens, loss):
    return torch.zeros_like(tokens.logprobs, requires_grad=True) + 1, {}

def writes(tokens, loss):
    tokens.sampler.copy_(tokens.proximal)
    return plain(tokens), {}

def number(tokens, loss):
    return 1.0, {}

def alone(tokens, loss):
    return plain(tokens)

def metric(tokens, loss):
    return plain(tokens), {"train/mine": 1.0}

def raises(tokens, loss):
    return plain(tokens) + tokens.nothing, {}

def leaves(tokens, loss):
    sys.exit(0)

def disk(tokens, loss):
    open("/nowhere/at/all")

def advantages_of_zero(batch, arrays):
    return np.zeros(batch.num_tokens)

def advantages_raise(batch, arrays):
    return batch.rewards[len(batch.rewards)]

def advantages_written(batch, arrays):
    batch.sampler_logprobs[:] = 0
    return batch.rewards[0] * arrays.mask

def advantages_of_less(batch, arrays):
    arrays.mask[::2] = False
    return np.ones(batch.num_tokens)

def short(batch, arrays):
    return batch.rewards

def theirs(args, batch, logits, sum_of_sample_mean):
    return logits.float().logsumexp(-1).sum(), {}

def theirs_writes(args, batch, logits, sum_of_sample_mean):
    for values in (*batch["rollout_log_probs"], *batch["advantages"], *batch["loss_masks"]):
        values.zero_()
    return logits.float().logsumexp(-1).sum(), {}

def theirs_zero(args, batch, logits, sum_of_sample_mean):
    return logits.sum() * 0, {}

def theirs_nan(args, batch, logits, sum_of_sample_mean):
    return logits.sum() * float("nan"), {}

def theirs_detached(args, batch, logits, sum_of_sample_mean):
    return logits.detach().sum(), {}

def theirs_anew(args, batch, logits, sum_of_sample_mean):
    return torch.ones(1, requires_grad=True) * 5, {}

def theirs_turns_it_off(args, batch, logits, sum_of_sample_mean):
    torch.set_grad_enabled(False)
    return logits.sum(), {}

def theirs_raises(args, batch, logits, sum_of_sample_mean):
    return {}["loss"]
"""


class Trains:
    def __init__(self, model_dir: Path, folder: Path, rollouts: Rollouts) -> None:
        (folder / "mine.py").write_text(CODE)
        self._model_dir, self._folder, self._rollouts = model_dir, folder, rollouts

    def name(self, function: str) -> str:
        return f"{self._folder}/mine.py:{function}"

    def step(self, key: str, function: str, batch: TrainBatch | None = None, **trainer: Any) -> tuple[StepResult, bool]:
        """Train one batch; returns what the step gives, and whether it has changed the policy."""
        loss = msgspec.structs.replace(LossConfig(), **{key: self.name(function)})
        options: dict[str, Any] = {"optimizer": OptimizerConfig(learning_rate=1e-2), **trainer}
        made = make_trainer(Config(trainer=TrainerConfig(**options), loss=loss), self._model_dir)
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
        *(("policy", name, ConfigError) for name in ("detached", "no_grad", "turns_it_off", "anew", "number", "alone")),
        *(("policy", name, ConfigError) for name in ("metric", "writes")),
        *(("policy", name, ConfigError) for name in ("raises", "leaves")),
        ("policy", "disk", TrainingError),
        *(("advantage", name, ConfigError) for name in ("advantages_raise", "short", "advantages_written", "advantages_of_less")),
        *(("slime_loss", f"theirs_{name}", ConfigError) for name in ("detached", "anew", "turns_it_off", "raises")),
    ],
)
def test_what_is_certain_to_fail_again_is_an_error_with_the_function_s_name(
    trains: Trains, key: str, function: str, kind: type[StreamRLError]
) -> None:
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
