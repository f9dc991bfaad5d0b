"""KL estimators: golden numbers, what they are in expectation, and the gradients of a second implementation."""

import math
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from streamrl.algorithms.kl import kl_estimate, kl_loss
from streamrl.config.loss import KLEstimator
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


@given(st.floats(-30, 30))
def test_all_but_k1_are_never_negative_and_all_are_zero_at_equality(log_ratio: float) -> None:
    for estimator in ESTIMATORS:
        assert kl_estimate(t(0.0), estimator).item() == 0
        if not estimator.startswith("k1"):
            assert kl_estimate(t(log_ratio), estimator).item() >= -1e-12


def _distributions() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits, reference_logits, old_logits = torch.randn(3, 6, dtype=torch.float64, generator=generator)
    return logits.requires_grad_(), reference_logits.log_softmax(-1), old_logits.log_softmax(-1)


def _gradient(value: Tensor, logits: Tensor) -> list[float]:
    return torch.autograd.grad(value, logits)[0].tolist()


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_in_expectation_over_the_policy_k1_and_k3_are_the_kl(estimator: KLEstimator) -> None:
    logits, ref, _ = _distributions()
    logprobs = logits.log_softmax(-1).detach()
    exact = (logprobs.exp() * (logprobs - ref)).sum()
    assert (logprobs.exp() * kl_estimate(logprobs - ref, estimator)).sum().item() == pytest.approx(exact.item())


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_gives_the_gradient_of_the_kl_from_tokens_of_an_older_policy(estimator: KLEstimator) -> None:
    logits, ref, old = _distributions()
    logprobs = logits.log_softmax(-1)
    want = _gradient((logprobs.exp() * (logprobs - ref)).sum(), logits)
    logprobs = logits.log_softmax(-1)
    loss, _ = kl_loss(logprobs, ref, old, estimator=estimator, unbiased=True)
    assert _gradient((old.exp() * loss).sum(), logits) == pytest.approx(want)


def test_the_plain_forms_have_the_expected_gradients_that_the_docstring_says() -> None:
    logits, ref, _ = _distributions()
    logprobs = logits.log_softmax(-1)
    here = logprobs.detach()
    k1, _ = kl_loss(logprobs, ref, here, estimator="k1", unbiased=False)
    assert _gradient((here.exp() * k1).sum(), logits) == pytest.approx([0.0] * 6, abs=1e-15)
    logprobs = logits.log_softmax(-1)
    reverse = _gradient((ref.exp() * (ref - logprobs)).sum(), logits)
    logprobs = logits.log_softmax(-1)
    k3, _ = kl_loss(logprobs, ref, here, estimator="k3", unbiased=False)
    assert _gradient((here.exp() * k3).sum(), logits) == pytest.approx(reverse)


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
