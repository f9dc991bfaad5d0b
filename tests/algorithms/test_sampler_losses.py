"""Losses whose ratio is against the sampler: what is at a bound, and what is far. `test_policy_losses` has their values and gradients."""

import math
from typing import Any

import pytest
import torch

from streamrl.algorithms.sampler_losses import aipo, binary_divergence, dppo, vespo
from streamrl.algorithms.sequences import Packed, Padded
from tests.support.float64 import gradient, t

VESPO = {"c1_positive": 2.0, "c2_positive": 3.0, "c1_negative": 3.0, "c2_negative": 2.0}


def clipped(*tensors: torch.Tensor, **settings: Any) -> list[float]:
    """Which tokens DPPO leaves out, without a KL term."""
    return dppo(*tensors, **settings, kl=0.0)[1]["train/pg_clipfrac"].tolist()


def test_binary_divergences_are_those_of_torch_and_bound_the_whole_ones_from_below() -> None:
    torch.manual_seed(0)
    policy, sampler = (torch.randn(20, 7, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    pi, mu = policy[:, 0].exp(), sampler[:, 0].exp()
    two = torch.stack([pi, 1 - pi], -1).log(), torch.stack([mu, 1 - mu], -1)
    kl = binary_divergence(policy[:, 0], sampler[:, 0], "kl")
    assert kl.tolist() == pytest.approx(torch.nn.functional.kl_div(*two, reduction="none").sum(-1).tolist())
    assert (kl <= torch.nn.functional.kl_div(policy, sampler.exp(), reduction="none").sum(-1) + 1e-12).all()
    tv = binary_divergence(policy[:, 0], sampler[:, 0], "tv")
    assert (tv <= (policy.exp() - sampler.exp()).abs().sum(-1) / 2 + 1e-12).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_binary_kl_where_one_token_is_all_there_is(dtype: torch.dtype) -> None:
    """1 - p is exact near p = 1, and no place is NaN: log-probs of exactly 0, just above it by rounding, and of what cannot be."""
    near = torch.tensor([-1e-6, 0.0, 0.0, -1e-6, 1e-7, -200.0], dtype=dtype)
    before = torch.tensor([-2e-6, 0.0, -0.5, 0.0, 1e-7, -200.0], dtype=dtype)
    kl = binary_divergence(near, before, "kl").tolist()
    assert kl[0] == pytest.approx(2e-6 * math.log(2.0) - 1e-6, rel=2e-1)
    assert kl[1] == 0.0
    assert kl[2] == math.inf
    assert kl[3] == pytest.approx(1e-6, rel=1e-3)
    assert abs(kl[4]) < 1e-12
    assert kl[5] == pytest.approx(0.0, abs=1e-12)
    assert binary_divergence(near, before, "tv").isfinite().all()
    above = torch.tensor([1e-6], dtype=dtype)
    assert binary_divergence(above, torch.tensor([-0.5], dtype=dtype), "kl").tolist() == [math.inf]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_vespo_of_far_sequences_is_bounded(dtype: torch.dtype) -> None:
    logprobs = torch.tensor([-1.0, -500.0, -1.0], dtype=dtype)
    loss, metrics = vespo(
        logprobs, torch.tensor([-500.0, -1.0, -6.0], dtype=dtype), torch.ones(3, dtype=dtype), Packed(torch.arange(3), 3), **VESPO
    )
    assert loss.tolist() == [0, 0, pytest.approx(0.0, abs=1e-100)]
    assert metrics["train/vespo_weight"].tolist() == loss.tolist()  # of log-probs of -1
    assert metrics["train/ois"].isfinite().all()


def test_what_is_at_its_bound_is_kept() -> None:
    assert aipo(t(-1.0), t(-1.0), t(1.0), cap=1.0)[1]["train/pg_clipfrac"].tolist() == [0]
    logprobs = t(-1.0, -1.0).requires_grad_()
    loss, metrics = dppo(logprobs, logprobs.detach(), t(1.5, -1.5), bound=0.0, kl=0.0)
    assert gradient(loss, logprobs).tolist() == [-1.5, 1.5]
    assert metrics["train/pg_clipfrac"].tolist() == [0, 0]
    advantages = t(0.0, 0.0, 1e-6, -1e-6)
    assert clipped(t(0.9, 0.1, 0.9, 0.1).log(), t(0.1, 0.9, 0.1, 0.9).log(), advantages, bound=0.2) == [0, 0, 1, 1]
    logprobs, mu, advantages = t(0.75, 0.25).log(), t(0.5, 0.5).log(), t(1, -1)
    assert clipped(t(0.45).log(), t(0.5).log(), t(-1), bound=0.2) == [0]
    up, down = binary_divergence(logprobs, mu, "tv").tolist()
    assert clipped(logprobs, mu, advantages, bound=up, bound_low=down) == [0, 0]
    logprobs = t(0.75).log().requires_grad_()
    loss, _ = dppo(logprobs, t(0.5).log(), t(1), bound=0.2, kl=0.1)
    assert loss.tolist() == pytest.approx([0.1 * math.log(1.5) ** 2])
    assert torch.autograd.grad(loss.sum(), logprobs)[0].tolist() == pytest.approx([0.2 * math.log(1.5)])


def test_vespo_reads_nothing_outside_the_mask_and_weighs_without_an_advantage_as_with_a_negative_one() -> None:
    nan = math.nan
    mask = torch.tensor([[True, False], [True, True]])
    logprobs = torch.tensor([[-1.0, nan], [-2.0, -0.5]], dtype=torch.float64)
    mu = torch.tensor([[-1.5, nan], [-2.5, -0.5]], dtype=torch.float64)
    loss, metrics = vespo(logprobs, mu, torch.tensor([[0.0, nan], [-1.0, 1.0]], dtype=torch.float64), Padded(mask), **VESPO)
    whole = math.exp(0.5)
    negative, positive = whole**3 * math.exp(2 * (1 - whole)), whole**2 * math.exp(3 * (1 - whole))
    assert metrics["train/vespo_weight"][mask].tolist() == pytest.approx([negative, negative, positive])
    assert loss.tolist() == [[0, 0], [pytest.approx(-2.0 * negative), pytest.approx(0.5 * positive)]]
    assert metrics["train/ppo_kl"].tolist() == [[-0.5, 0], [-0.5, 0]]
