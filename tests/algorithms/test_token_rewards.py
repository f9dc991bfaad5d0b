"""Rewards of tokens and estimates of KL: golden numbers and closed forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from streamrl.algorithms.kl import kl_estimate
from streamrl.algorithms.returns import discounted_returns
from streamrl.algorithms.token_rewards import token_kl, token_rewards
from streamrl.config.loss import KLEstimator

R = np.array([0.5, -1.0, 0.0])


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", [0.5, -1, 0]),
        ("k2", [0.125, 0.5, 0]),
        ("k3", [0.106531, 0.718282, 0]),
        ("low_var_kl", [0.106531, 0.718282, 0]),
    ],
)
def test_kl_golden(estimator: KLEstimator, expected: list[float]) -> None:
    assert token_kl(R, estimator) == pytest.approx(expected, abs=1e-6)


def test_kl_bounds() -> None:
    assert token_kl(np.array([-3.0, -30.0]), "low_var_kl").tolist() == [10, 10]
    assert token_kl(np.array([-30.0, 30.0]), "k3") == pytest.approx([np.exp(20.0) - 21, np.exp(-30.0) + 29])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "low_var_kl"])
def test_a_penalty_in_the_reward_is_the_one_in_the_loss(estimator: KLEstimator) -> None:
    r = np.concatenate([np.linspace(-25, 25, 41), [1e-6, -0.3]])
    assert token_kl(r, estimator) == pytest.approx(kl_estimate(torch.from_numpy(r), estimator).numpy(), rel=1e-9, abs=1e-12)


def test_k3_keeps_its_digits_near_zero() -> None:
    assert token_kl(np.array([1e-9]), "k3")[0] <= 1e-17


def test_golden_of_reinforce_plus_plus() -> None:
    mask = np.array([True, True, False, True])
    rewards = token_rewards(np.array([1.0]), np.array([0, 4]), mask, kl=np.array([0.1, 0.2, 0.3, 0.4]), kl_coef=0.1)
    assert rewards == pytest.approx([-0.01, -0.02, 0, 0.96])
    assert discounted_returns(rewards, np.array([0, 4]), gamma=0.9) == pytest.approx([0.6718, 0.7576, 0.8640, 0.9600], abs=5e-5)


def test_the_reward_is_at_each_samples_last_trained_token() -> None:
    mask = np.array([False, True, True, False, False, False, True, True, False, True])
    offsets = np.array([0, 4, 4, 6, 9, 10])
    got = token_rewards(np.array([1.0, 2, 4, 8, 16]), offsets, mask, kl=np.where(mask, 1.0, np.nan), kl_coef=0.5)
    assert got.tolist() == [0, -0.5, 0.5, 0, 0, 0, -0.5, 7.5, 0, 15.5]


def test_without_a_penalty() -> None:
    assert token_rewards(np.array([3.0]), np.array([0, 2]), np.array([True, True]), kl=None, kl_coef=1.0).tolist() == [0, 3]
