"""The KL's coefficient, batch by batch."""

import math

import pytest

from streamrl.algorithms.kl_coefficient import adapted, coefficient, decayed, measured_kl, with_factor
from streamrl.config.loss import KLConfig, LossConfig


def test_it_falls_in_equal_parts_or_is_adapted_by_the_clipped_relative_error() -> None:
    kl = KLConfig(loss_coef=0.1, decay_steps=4, final_fraction=0.2)
    assert [decayed(kl, step) for step in (0, 1, 2, 3, 4, 5, 100)] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])
    assert decayed(KLConfig(loss_coef=0.1, decay_steps=1), 1) == 0.0
    assert decayed(KLConfig(loss_coef=0.1), 7) == 1.0
    # e = clip((KL - target) / target, -0.2, 0.2), beta' = beta (1 + K e): arXiv 1909.08593.
    kl = KLConfig(loss_coef=0.1, target=0.5, gain=0.1)
    for measured, error in ((0.5, 0.0), (0.55, 0.1), (0.45, -0.1), (0.6, 0.2), (5.0, 0.2), (0.4, -0.2), (0.0, -0.2), (-3.0, -0.2)):
        assert adapted(kl, 3.0, measured) == pytest.approx(3.0 * (1 + 0.1 * error))
    assert adapted(KLConfig(loss_coef=0.1, target=0.5, gain=1.0), 3.0, 0.55) == pytest.approx(3.3)
    assert adapted(KLConfig(loss_coef=0.1), 3.0, 5.0) == 1.0
    kl = KLConfig(loss_coef=0.1, target=0.5, gain=1.0)
    up = down = 1.0
    for _ in range(200):
        up, down = adapted(kl, up, 9.0), adapted(kl, down, 0.0)
    assert (up, down) == (1e6, 1e-6)
    for nothing in (math.nan, math.inf):
        assert adapted(kl, 2.0, nothing) == 2.0


def test_both_coefficients_are_multiplied_and_what_moves_is_a_metric() -> None:
    loss = LossConfig(kl=KLConfig(loss_coef=0.1, reward_coef=0.2, estimator="k3", decay_steps=5))
    found = with_factor(loss, 0.5)
    assert (found.kl.loss_coef, found.kl.reward_coef, found.kl.estimator) == (0.05, 0.1, "k3")
    assert with_factor(loss, 1.0) is loss
    metrics = {"rollout/kl": 1.0, "train/kl_loss": 2.0}
    assert measured_kl(KLConfig(reward_coef=0.1), metrics, 0.25) == 1.0
    assert measured_kl(KLConfig(loss_coef=0.1), metrics, 1.0) == 2.0
    assert measured_kl(KLConfig(loss_coef=0.1), metrics, 0.25) == 8.0
    assert math.isnan(measured_kl(KLConfig(loss_coef=0.1), {}, 1.0))
    assert math.isnan(measured_kl(KLConfig(loss_coef=0.1), metrics, 0.0))
    assert coefficient(LossConfig(kl=KLConfig(loss_coef=0.1))) == {}
    assert coefficient(LossConfig(kl=KLConfig(loss_coef=0.1, target=0.2))) == {"train/kl_coef": 0.1}
    assert coefficient(LossConfig(kl=KLConfig(reward_coef=0.3, decay_steps=2))) == {"train/kl_coef": 0.3}
    assert coefficient(LossConfig(kl=KLConfig(decay_steps=2))) == {"train/kl_coef": 0.0}
