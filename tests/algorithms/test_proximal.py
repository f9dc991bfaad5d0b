"""The log-linear proximal policy: its ends, its published form, and what it may not do."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamrl.algorithms.proximal import log_linear_proximal


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_at_the_first_step_it_is_the_policy_itself_at_every_age() -> None:
    logprobs = torch.tensor([-0.1, -0.7, -1.3], dtype=torch.float32)
    found = log_linear_proximal(logprobs, torch.tensor([-3.3, -0.2, -9.0]), torch.tensor([0, 1, 7]), progress=0.0)
    assert found.tolist() == logprobs.tolist()


def test_later_a_token_that_the_version_trained_from_sampled_has_its_samplers_log_prob() -> None:
    assert log_linear_proximal(t(-1.0), t(-3.0), torch.tensor([0]), progress=0.5).tolist() == [-3.0]


def test_the_policy_has_gone_a_part_of_a_version_beyond() -> None:
    # v_behave = 4, v_prox = 7, v = 7.5: alpha = 3 / 3.5
    found = log_linear_proximal(t(-1.0), t(-4.5), torch.tensor([3]), progress=0.5)
    assert found.tolist() == pytest.approx([-4.5 + 3.0])


def test_with_a_whole_version_it_is_the_published_form() -> None:
    # alpha = (v_prox - v_behave) / (v - v_behave) with v_prox = v - 1, for v = 9 and tokens of versions 8, 7, 5
    theta, mu = t(-1.0, -1.0, -1.0), t(-2.0, -2.0, -2.0)
    found = log_linear_proximal(theta, mu, torch.tensor([0, 1, 3]), progress=1.0)
    assert found.tolist() == pytest.approx([-2 + (8 - v) / (9 - v) for v in (8, 7, 5)])


def test_it_carries_no_gradient() -> None:
    logprobs = t(-1.0).requires_grad_()
    assert not log_linear_proximal(logprobs, t(-2.0), torch.tensor([2]), progress=0.5).requires_grad


def test_what_is_not_finite_stays_so() -> None:
    found = log_linear_proximal(t(math.nan, -1.0, -math.inf), t(-1.0, -math.inf, -1.0), torch.tensor([1, 1, 1]), progress=0.5)
    assert not found.isfinite().any()


@given(st.floats(-9, 0), st.floats(-9, 0), st.integers(0, 50), st.floats(0, 1))
def test_it_lies_between_sampler_and_policy(theta: float, mu: float, age: int, progress: float) -> None:
    found = log_linear_proximal(t(theta), t(mu), torch.tensor([age]), progress=progress).item()
    assert min(theta, mu) - 1e-12 <= found <= max(theta, mu) + 1e-12
