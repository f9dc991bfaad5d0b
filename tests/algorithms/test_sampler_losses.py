"""Losses whose ratio is against the sampler: values by hand. `test_policy_losses` holds them to the second implementation, too."""

from __future__ import annotations

import math

import pytest
import torch

from streamrl.algorithms.sampler_losses import aipo, dppo
from tests.algorithms.policy_pairs import t


def test_aipo_caps_from_above_only() -> None:
    logprobs = t(-1.0, -1.0, -1.0).requires_grad_()
    sampler = logprobs.detach() - t(9.0, 0.01, 2.0).log()
    loss, metrics = aipo(logprobs, sampler, t(1, 1, -1), cap=4.0)
    loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-4.0, -0.01, 2.0])
    assert loss.tolist() == pytest.approx([4.0, 0.01, -2.0])
    assert metrics["train/pg_clipfrac"].tolist() == [1, 0, 0]
    assert metrics["train/ois"].tolist() == pytest.approx([9.0, 0.01, 2.0])
    assert metrics["train/ppo_kl"].tolist() == pytest.approx([-math.log(9.0), -math.log(0.01), -math.log(2.0)])


def test_aipo_counts_nothing_as_clipped_at_the_cap_itself() -> None:
    assert aipo(t(-1.0), t(-1.0), t(1.0), cap=1.0)[1]["train/pg_clipfrac"].tolist() == [0]


def test_dppo_masks_by_probability_not_by_ratio() -> None:
    pi, mu = t(0.10, 0.75, 0.45, 0.45, 0.75), t(0.01, 0.50, 0.70, 0.70, 0.50)
    logprobs = pi.log().requires_grad_()
    advantages = t(1, 1, -1, 1, -1)
    loss, metrics = dppo(logprobs, mu.log(), advantages, bound=0.2, kl=0.0)
    loss.sum().backward()
    # Ten times as likely, yet kept; moved on by 0.25, left out both ways; moved by 0.25 against its advantage, kept.
    assert metrics["train/pg_clipfrac"].tolist() == [0, 1, 1, 0, 0]
    want = [-10.0, 0.0, 0.0, -0.45 / 0.70, 1.5]
    assert loss.tolist() == pytest.approx(want)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(want)
    assert metrics["train/ois"].tolist() == pytest.approx((pi / mu).tolist())
    assert metrics["train/ppo_kl"].tolist() == pytest.approx((mu / pi).log().tolist())


def test_dppo_leaves_out_nothing_at_the_bound_itself_or_without_an_advantage() -> None:
    logprobs = t(-1.0, -1.0).requires_grad_()
    loss, metrics = dppo(logprobs, logprobs.detach(), t(1.5, -1.5), bound=0.0, kl=0.0)
    loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-1.5, 1.5]
    assert metrics["train/pg_clipfrac"].tolist() == [0, 0]
    advantages = t(0.0, 0.0, 1e-6, -1e-6)
    _, metrics = dppo(t(0.9, 0.1, 0.9, 0.1).log(), t(0.1, 0.9, 0.1, 0.9).log(), advantages, bound=0.2, kl=0.0)
    assert metrics["train/pg_clipfrac"].tolist() == [0, 0, 1, 1]


def test_dppo_pulls_back_tokens_that_it_leaves_out() -> None:
    logprobs = t(0.75).log().requires_grad_()
    loss, _ = dppo(logprobs, t(0.5).log(), t(1), bound=0.2, kl=0.1)
    assert loss.tolist() == pytest.approx([0.1 * math.log(1.5) ** 2])
    assert torch.autograd.grad(loss.sum(), logprobs)[0].tolist() == pytest.approx([0.2 * math.log(1.5)])
