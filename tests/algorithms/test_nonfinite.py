"""Tokens with NaN or infinite log-probs: dropped, counted, and without any trace in values and gradients."""

from __future__ import annotations

import math

import pytest
import torch

from streamrl.algorithms.nonfinite import drop_nonfinite, finite_tokens

NAN, INF = math.nan, math.inf


def test_tokens_with_any_log_prob_that_is_not_finite_are_dropped_and_counted() -> None:
    logprobs = torch.tensor([-1.0, NAN, -INF, -2.0, -3.0], requires_grad=True)
    sampler = torch.tensor([-1.5, -1.0, -1.0, INF, -3.0], dtype=torch.float64)
    keep, (ours, theirs), metrics = drop_nonfinite(torch.ones(5, dtype=torch.bool), logprobs, sampler)
    assert keep.tolist() == [True, False, False, False, True]
    assert ours.tolist() == [-1.0, 0.0, 0.0, 0.0, -3.0]
    assert theirs.tolist() == [-1.5, 0.0, 0.0, 0.0, -3.0]
    assert metrics["train/nonfinite_tokens"].tolist() == [0, 1, 1, 1, 0]
    assert metrics["train/nonfinite_tokens"].dtype == logprobs.dtype != sampler.dtype
    ((ours - theirs).exp() * keep).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([math.exp(0.5), 0.0, 0.0, 0.0, 1.0])


def test_what_is_not_trained_is_neither_read_nor_counted() -> None:
    mask = torch.tensor([[True, False], [True, True]])
    keep, (values,), metrics = drop_nonfinite(mask, torch.tensor([[1.0, NAN], [NAN, 2.0]], dtype=torch.float64))
    assert keep.tolist() == [[True, False], [False, True]]
    assert values.tolist() == [[1.0, 0.0], [0.0, 2.0]]
    assert metrics["train/nonfinite_tokens"].tolist() == [[0, 0], [1, 0]]
    assert metrics["train/nonfinite_tokens"].dtype == torch.float64


def test_without_log_probs_the_mask_is_left() -> None:
    mask = torch.tensor([True, False])
    assert finite_tokens(mask).tolist() == [True, False]
