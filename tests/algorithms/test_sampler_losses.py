"""Losses whose ratio is against the sampler: values by hand. `test_policy_losses` holds them to the second implementation, too."""

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


def test_aipo_caps_from_above_only() -> None:
    logprobs = t(-1.0, -1.0, -1.0).requires_grad_()
    sampler = logprobs.detach() - t(9.0, 0.01, 2.0).log()
    loss, metrics = aipo(logprobs, sampler, t(1, 1, -1), cap=4.0)
    assert gradient(loss, logprobs).tolist() == pytest.approx([-4.0, -0.01, 2.0])
    assert loss.tolist() == pytest.approx([4.0, 0.01, -2.0])
    assert metrics["train/pg_clipfrac"].tolist() == [1, 0, 0]
    assert metrics["train/ois"].tolist() == pytest.approx([9.0, 0.01, 2.0])
    assert metrics["train/ppo_kl"].tolist() == pytest.approx([-math.log(9.0), -math.log(0.01), -math.log(2.0)])
    assert aipo(t(-1.0), t(-1.0), t(1.0), cap=1.0)[1]["train/pg_clipfrac"].tolist() == [0]


def test_dppo_masks_by_probability_not_by_ratio() -> None:
    pi, mu = t(0.10, 0.75, 0.45, 0.45, 0.75), t(0.01, 0.50, 0.70, 0.70, 0.50)
    logprobs = pi.log().requires_grad_()
    advantages = t(1, 1, -1, 1, -1)
    loss, metrics = dppo(logprobs, mu.log(), advantages, bound=0.2, kl=0.0)
    # Ten times as likely, yet kept; moved on by 0.25, left out both ways; moved by 0.25 against its advantage, kept.
    assert metrics["train/pg_clipfrac"].tolist() == [0, 1, 1, 0, 0]
    want = [-10.0, 0.0, 0.0, -0.45 / 0.70, 1.5]
    assert loss.tolist() == pytest.approx(want)
    assert gradient(loss, logprobs).tolist() == pytest.approx(want)
    assert metrics["train/ois"].tolist() == pytest.approx((pi / mu).tolist())
    assert metrics["train/ppo_kl"].tolist() == pytest.approx((mu / pi).log().tolist())


def test_dppo_with_two_bounds_takes_the_one_of_the_way_a_token_went_and_symmetric_the_distance() -> None:
    pi, mu = t(0.75, 0.65, 0.45, 0.55), t(0.50, 0.50, 0.70, 0.65)
    assert clipped(pi.log(), mu.log(), t(1, 1, -1, -1), bound=0.2, bound_low=0.05) == [1, 0, 1, 1]
    assert clipped(pi.log(), mu.log(), t(1, 1, -1, -1), bound=0.1, bound_low=0.2) == [1, 1, 1, 0]
    pi, mu = t(0.75, 0.75, 0.75, 0.45, 0.45, 0.51), t(0.50, 0.50, 0.50, 0.70, 0.70, 0.50)
    advantages = t(1, -1, 0, -1, 1, 1)
    assert clipped(pi.log(), mu.log(), advantages, bound=0.2, symmetric=True) == [1, 1, 1, 1, 1, 0]
    assert clipped(pi.log(), mu.log(), advantages, bound=0.2) == [1, 0, 0, 1, 0, 0]


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


def test_dppo_by_kl_keeps_what_is_at_its_bound() -> None:
    pi, mu, advantages = t(0.4, 0.1), t(0.2, 0.3), t(1, -1)
    up = 0.2 * math.log(0.2 / 0.4) + 0.8 * math.log(0.8 / 0.6)
    down = 0.3 * math.log(0.3 / 0.1) + 0.7 * math.log(0.7 / 0.9)
    for factor, want in ((1 + 1e-9, [0, 0]), (1 - 1e-9, [1, 1])):
        settings: dict[str, Any] = {"bound": up * factor, "bound_low": down * factor, "kl": 0.0}
        assert dppo(pi.log(), mu.log(), advantages, divergence="kl", **settings)[1]["train/pg_clipfrac"].tolist() == want
        assert not dppo(pi.log(), mu.log(), -advantages, divergence="kl", **settings)[1]["train/pg_clipfrac"].any()


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


def test_vespo_weighs_a_sequence_by_the_product_of_its_ratios() -> None:
    """W = 0.5 2 = 1 for two tokens that moved apart: weight 1. The single token of the other sequence has W = 2."""
    logprobs = t(math.log(0.5), math.log(0.4), -1.0).requires_grad_()
    mu = t(0.0, math.log(0.2), -1.0 - math.log(2.0))
    sequences = Packed(torch.tensor([0, 0, 1]), 2)
    for sign, c1, c2 in ((1.0, 2.0, 3.0), (-1.0, 3.0, 2.0)):
        loss, metrics = vespo(logprobs, mu, t(sign, sign, sign), sequences, **VESPO)
        weight = 2.0**c1 * math.exp(-c2)
        assert metrics["train/vespo_weight"].tolist() == pytest.approx([1.0, 1.0, weight])
        assert metrics["train/ois"].tolist() == pytest.approx([1.0, 1.0, 2.0])
        (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
        assert gradient.tolist() == pytest.approx([-sign, -sign, -sign * weight])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_vespo_of_far_sequences_is_bounded(dtype: torch.dtype) -> None:
    logprobs = torch.tensor([-1.0, -500.0, -1.0], dtype=dtype)
    loss, metrics = vespo(
        logprobs, torch.tensor([-500.0, -1.0, -6.0], dtype=dtype), torch.ones(3, dtype=dtype), Packed(torch.arange(3), 3), **VESPO
    )
    assert loss.tolist() == [0, 0, pytest.approx(0.0, abs=1e-100)]
    assert metrics["train/vespo_weight"].tolist() == loss.tolist()  # of log-probs of -1
    assert metrics["train/ois"].isfinite().all()


def test_dppo_keeps_what_is_at_its_bound() -> None:
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
