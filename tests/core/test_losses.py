"""Losses and importance weights: golden numbers, closed-form gradients, float64 autograd."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from streamrl.core.importance import token_tis
from streamrl.core.losses import policy_gradient, ppo_clip, sft


def t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_ppo_clip_golden() -> None:
    loss, metrics = ppo_clip(t(1.5, 0.5, 2, 0.9).log(), t(1, 1, 1, 1).log(), t(1, -1, -1, 1), clip_low=0.2, clip_high=0.28)
    assert loss.tolist() == pytest.approx([-1.28, 0.8, 2.0, -0.9])
    assert metrics["train/pg_clipfrac"].tolist() == [1, 1, 0, 0]
    assert metrics["train/ois"].tolist() == pytest.approx([1.5, 0.5, 2, 0.9])
    assert metrics["train/ppo_kl"].tolist() == pytest.approx([-math.log(1.5), math.log(2), -math.log(2), -math.log(0.9)])


def test_ppo_gradient_is_minus_ratio_times_advantage_where_not_clipped() -> None:
    logprobs = t(1.5, 0.5, 2, 0.9).log().requires_grad_()
    ppo_clip(logprobs, t(0, 0, 0, 0), t(1, -1, -1, 1), clip_low=0.2, clip_high=0.28)[0].sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0, 0, 2, -0.9])


def test_on_policy_the_gradient_is_that_of_reinforce() -> None:
    logprobs = t(-1, -2, -3).requires_grad_()
    ppo_clip(logprobs, logprobs.detach(), t(2, -1, 0), clip_low=0.2, clip_high=0.28)[0].sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-2, 1, 0]


def test_tis_golden() -> None:
    weights, metrics = token_tis(t(1.5, 0.1, -2.5), t(0, 0, 0), cap=2.0)
    assert weights.tolist() == pytest.approx([2.0, 1.1052, 0.0821], abs=1e-4)
    assert metrics["train/tis_clipfrac"].tolist() == [1, 0, 0]
    assert metrics["train/tis"].tolist() == pytest.approx([math.exp(1.5), math.exp(0.1), math.exp(-2.5)])
    assert metrics["train/train_rollout_logprob_abs_diff"].tolist() == pytest.approx([1.5, 0.1, 2.5])


def test_tis_floor_off_and_overflow() -> None:
    assert token_tis(t(-3), t(0), cap=2.0, floor=0.5)[0].tolist() == [0.5]
    weights, metrics = token_tis(t(3), t(0), cap=0.0)
    assert weights.tolist() == [1.0]
    assert metrics["train/tis_clipfrac"].tolist() == [0.0]
    assert token_tis(t(500), t(0), cap=1e12)[0].tolist() == pytest.approx([math.exp(20)])


def test_policy_gradient_multiplies_a_constant_weight() -> None:
    logprobs = t(-1.0, -0.2).requires_grad_()
    old, mu, advantages = t(-1.1, -0.2), t(-1.5, -3.0), t(1.0, -2.0)
    loss, metrics = policy_gradient(logprobs, old, mu, advantages, clip_low=0.2, clip_high=0.28, tis_cap=2.0, tis_floor=0.0)
    loss.sum().backward()
    want = [-math.exp(0.4) * math.exp(0.1), 2.0 * 2.0]
    assert loss.tolist() == pytest.approx(want)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(want)
    assert metrics["train/pg_loss"].tolist() == loss.tolist()
    assert not any(value.requires_grad for value in metrics.values())


@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize("ratio", [0.5, 0.95, 1.1, 1.6])
def test_gradient_agrees_with_finite_differences(ratio: float, advantage: float) -> None:
    def value(logprobs: Tensor) -> Tensor:
        return policy_gradient(logprobs, t(0), t(0.3), t(advantage), clip_low=0.2, clip_high=0.28, tis_cap=2.0, tis_floor=0.0)[0]

    assert torch.autograd.gradcheck(value, (t(math.log(ratio)).requires_grad_(),))


def test_sft_is_the_negative_log_likelihood() -> None:
    assert sft(t(-1, -2))[0].tolist() == [1, 2]
