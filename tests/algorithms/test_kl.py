"""KL estimators: golden numbers, expectations, the gradients of a second implementation; and their coefficient, batch by batch."""

import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from streamrl.algorithms.kl import kl_estimate, kl_loss
from streamrl.algorithms.kl_coefficient import adapted, coefficient, decayed, measured_kl, with_factor
from streamrl.config.loss import KLConfig, KLEstimator, LossConfig
from tests.algorithms import reference_policy_losses as reference
from tests.algorithms.policy_cases import packed, padded, random_sequences, reference_result, weights_for
from tests.support.float64 import gradient, t

ESTIMATORS: tuple[KLEstimator, ...] = get_args(KLEstimator)


def test_estimates_by_hand() -> None:
    log_ratio = t(0.5, -1.0, 0.0)
    assert kl_estimate(log_ratio, "k1").tolist() == [0.5, -1.0, 0.0]
    assert kl_estimate(log_ratio, "abs").tolist() == [0.5, 1.0, 0.0]
    assert kl_estimate(log_ratio, "k2").tolist() == [0.125, 0.5, 0.0]
    for estimator in ("k3", "low_var_kl"):
        assert kl_estimate(log_ratio, estimator).tolist() == pytest.approx([0.106531, 0.718282, 0.0], abs=1e-6)
    log_ratio = t(-2.0, -5.0, 15.0).requires_grad_()
    estimate = kl_estimate(log_ratio, "low_var_kl")
    assert estimate.tolist() == pytest.approx([math.exp(2) - 3, 10.0, 10.0])
    assert gradient(estimate, log_ratio).tolist() == pytest.approx([1 - math.exp(2), 0.0, 0.0])
    log_ratio = t(-500.0, 500.0).requires_grad_()
    estimate = kl_estimate(log_ratio, "k3")
    assert estimate.tolist() == pytest.approx([math.exp(20) - 21, 499.0])
    assert gradient(estimate, log_ratio).tolist() == pytest.approx([0.0, 1.0])


def _distributions() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits, reference_logits, old_logits = torch.randn(3, 6, dtype=torch.float64, generator=generator)
    return logits.requires_grad_(), reference_logits.log_softmax(-1), old_logits.log_softmax(-1)


def _gradient(value: Tensor, logits: Tensor) -> list[float]:
    return torch.autograd.grad(value, logits)[0].tolist()


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_gives_the_gradient_of_the_kl_from_tokens_of_an_older_policy(estimator: KLEstimator) -> None:
    logits, ref, old = _distributions()
    logprobs = logits.log_softmax(-1)
    want = _gradient((logprobs.exp() * (logprobs - ref)).sum(), logits)
    logprobs = logits.log_softmax(-1)
    loss, _ = kl_loss(logprobs, ref, old, estimator=estimator, unbiased=True)
    assert _gradient((old.exp() * loss).sum(), logits) == pytest.approx(want)


@pytest.mark.parametrize("estimator", ["k2", "k1+", "k3+"])
def test_in_expectation_over_the_policy_these_have_the_gradient_of_the_kl(estimator: KLEstimator) -> None:
    logits, ref, _ = _distributions()
    logprobs = logits.log_softmax(-1)
    want = _gradient((logprobs.exp() * (logprobs - ref)).sum(), logits)
    logprobs = logits.log_softmax(-1)
    loss, _ = kl_loss(logprobs, ref, logprobs.detach(), estimator=estimator, unbiased=False)
    assert _gradient((logprobs.detach().exp() * loss).sum(), logits) == pytest.approx(want)
    if estimator != "k2":
        plain = kl_estimate(logprobs - ref, "k1" if estimator == "k1+" else "k3")
        assert loss.tolist() == plain.tolist()


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_value_and_gradient_are_those_of_the_second_implementation(estimator: KLEstimator, unbiased: bool) -> None:
    for seed in range(6):
        sequences = random_sequences(seed, spread=1.5)
        weights = weights_for(sequences)
        values, gradient = reference_result(sequences, reference.kl(sequences, estimator, unbiased), weights)
        for layout in (packed(sequences), padded(sequences)):
            loss, metrics = kl_loss(layout.logprobs, layout.ref, layout.old, estimator=estimator, unbiased=unbiased)
            assert layout.flat(loss) == pytest.approx(values, rel=1e-10, abs=1e-12), seed
            assert layout.flat(metrics["train/kl_loss"]) == layout.flat(loss)
            assert not metrics["train/kl_loss"].requires_grad
            if not layout.padded:
                assert layout.gradient(loss, weights) == pytest.approx(gradient, rel=1e-10, abs=1e-12), seed


def test_neither_reference_nor_anchor_gets_a_gradient_and_far_ratios_stay_finite() -> None:
    logprobs, ref, old = (
        t(-1.0, -1e-3, -800.0).requires_grad_(),
        t(-2.0, -1.0, -799.0).requires_grad_(),
        t(-1.0, -900.0, -1.0).requires_grad_(),
    )
    loss, _ = kl_loss(logprobs, ref, old, estimator="k1", unbiased=True)
    loss.sum().backward()
    assert ref.grad is None and old.grad is None
    assert loss.tolist() == pytest.approx([1.0, 0.999 * math.exp(20), -math.exp(-20)], abs=0)


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
