"""The critic's loss."""

import itertools
import random

import pytest
import torch

from streamrl.algorithms.policy_losses import sft, value_loss
from tests.algorithms import reference_policy_losses as reference
from tests.support.float64 import gradient, t


def test_by_hand() -> None:
    values = t(1.0, 1.0, 0.0, 1.5).requires_grad_()
    # Moved towards R beyond the clip; moved away from R; within the clip; moved towards R, past it by more than the clipped one is short.
    loss, metrics = value_loss(values, t(0.0, 0.0, 0.1, 0.0), t(2.0, -1.0, 1.0, 0.3), clip=0.2)
    assert loss.tolist() == pytest.approx([1.8**2, 4.0, 1.0, 1.44])
    assert metrics["train/value_clipfrac"].tolist() == [1, 0, 0, 0]
    assert gradient(loss, values).tolist() == pytest.approx([0.0, 4.0, -2.0, 2.4])
    # old + (values - old) has other last bits than values in float32: nothing is clipped at 1e3, whatever they are.
    generator = torch.Generator().manual_seed(0)
    values, old, returns = torch.randn(3, 4096, generator=generator)
    assert (old + (values - old) != values).any()
    loss, metrics = value_loss(values, old, returns, clip=1e3)
    assert not metrics["train/value_clipfrac"].any()
    assert torch.equal(loss, (values - returns).square())
    values = t(3.0, -1.0).requires_grad_()
    loss, metrics = value_loss(values, t(0.0, 0.0), t(1.0, 1.0), clip=0.0)
    assert loss.tolist() == [4.0, 4.0]
    assert metrics["train/value_clipfrac"].tolist() == [0, 0]
    assert gradient(loss, values).tolist() == [4.0, -4.0]
    values = t(1.5).requires_grad_()
    loss, metrics = value_loss(values, t(0.0), t(1.0), clip=0.5)
    assert loss.tolist() == [0.25]
    assert metrics["train/value_clipfrac"].tolist() == [0]
    assert gradient(loss, values).tolist() == [1.0]


def test_value_and_gradient_around_both_bounds() -> None:
    """Where V has not gone beyond the clip both terms are one, and either's gradient is right."""
    old = 0.3
    for case in itertools.product((0.0, 0.2, 1.0), (-1e-6, 1e-6, -0.3, 0.3, 0.0), (-1.0, 0.0, 1.0), (-2.0, 0.05, 0.4, 3.0)):
        clip, offset, side, target = case
        leaf = torch.tensor(old + side * (clip + offset), dtype=torch.float64, requires_grad=True)
        want = reference.value(leaf, old, target, clip)
        values = leaf.detach()[None].requires_grad_()
        loss, metrics = value_loss(values, t(old), t(target), clip=clip)
        assert loss.tolist() == pytest.approx([want.item()], rel=1e-12), case
        assert gradient(loss, values).tolist() == pytest.approx([gradient(want, leaf).item()], rel=1e-9, abs=1e-12), case
        assert not metrics["train/value_clipfrac"].requires_grad
    generator = random.Random(0)
    rows = [tuple(generator.gauss(0, 1) for _ in range(3)) for _ in range(250)]
    leaves = [torch.tensor(new, dtype=torch.float64, requires_grad=True) for new, _, _ in rows]
    wants = [reference.value(leaf, before, target, 0.2) for leaf, (_, before, target) in zip(leaves, rows, strict=True)]
    columns = torch.tensor(rows, dtype=torch.float64)
    values, old_values = columns[:, 0].clone().requires_grad_(), columns[:, 1].clone().requires_grad_()
    loss, _ = value_loss(values, old_values, columns[:, 2], clip=0.2)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([want.item() for want in wants])
    slopes = [gradient(want, leaf).item() for want, leaf in zip(wants, leaves, strict=True)]
    assert values.grad is not None and values.grad.tolist() == pytest.approx(slopes)
    assert old_values.grad is None


def test_beyond_huber_the_error_counts_linearly_and_sft_is_the_negative_log_likelihood() -> None:
    """With d = 1: squares of 0.5 and 1, then 2 * 3 - 1 = 5 in place of 9; the slope stays at 2."""
    values = t(0.5, 1.0, 3.0, -3.0).requires_grad_()
    loss, _ = value_loss(values, torch.zeros(4), torch.zeros(4, dtype=torch.float64), clip=0.0, huber=1.0)
    assert loss.tolist() == [0.25, 1.0, 5.0, 5.0]
    assert gradient(loss, values).tolist() == [1.0, 2.0, 2.0, -2.0]
    theirs = torch.nn.functional.huber_loss(values.detach(), torch.zeros(4, dtype=torch.float64), reduction="none", delta=1.0)
    assert loss.tolist() == pytest.approx((2 * theirs).tolist())
    clipped, metrics = value_loss(t(3.0), t(0.0), t(4.0), clip=0.5, huber=1.0)  # max(|3 - 4|, |0.5 - 4|), the second linear
    assert (clipped.item(), metrics["train/value_clipfrac"].item()) == (6.0, 1.0)
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    loss, metrics = sft(logprobs)
    assert loss.tolist() == [1, 2]
    assert metrics == {}
    assert gradient(loss, logprobs).tolist() == [-1, -1]
