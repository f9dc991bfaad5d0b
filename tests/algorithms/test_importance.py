"""Importance weights: golden numbers, every kind and level, bounds, and no gradient."""

import math

import pytest
import torch
from torch import Tensor

from streamrl.algorithms.importance import Kind, Level, importance_ratio, importance_weights, normalization
from streamrl.algorithms.sequences import Packed, Padded
from tests.support.float64 import t

GOLDEN = (1.5, 0.1, -2.5)
KINDS: tuple[Kind, ...] = ("none", "truncate", "clip", "mask")
LEVELS: tuple[Level, ...] = ("token", "sequence", "geometric")


def one(length: int) -> Packed:
    return Packed(torch.zeros(length, dtype=torch.int64), 1)


def weigh(log_ratio: Tensor, kind: Kind, low: float, high: float, level: Level = "token") -> tuple[list[float], dict[str, list[float]]]:
    weights, metrics = importance_weights(log_ratio, one(len(log_ratio)), kind=kind, level=level, low=low, high=high)
    return weights.tolist(), {name.removeprefix("train/"): values.tolist() for name, values in metrics.items()}


def test_each_kind_by_hand() -> None:
    weights, metrics = weigh(t(*GOLDEN), "truncate", 0.0, 2.0)
    assert weights == pytest.approx([2.0, 1.1052, 0.0821], abs=1e-4)
    assert metrics["tis"] == pytest.approx([math.exp(x) for x in GOLDEN])
    assert metrics["tis_abs"] == pytest.approx([abs(math.exp(x) - 1) for x in GOLDEN])
    assert metrics["tis_clipfrac"] == metrics["mis_tis_truncate_fraction"] == [1, 0, 0]
    weights, metrics = weigh(t(*GOLDEN), "mask", 0.5, 2.0)
    assert weights == pytest.approx([0.0, 1.1052, 0.0], abs=1e-4)
    assert metrics["mis_tis_mask_fraction_high"] == [1, 0, 0]
    assert metrics["mis_tis_mask_fraction_low"] == [0, 0, 1]
    assert metrics["tis_clipfrac"] == [1, 0, 1]
    weights, metrics = weigh(t(*GOLDEN), "clip", 0.5, 2.0)
    assert weights == pytest.approx([2.0, 1.1052, 0.5], abs=1e-4)
    assert metrics["mis_tis_clip_fraction_high"] == [1, 0, 0]
    assert metrics["mis_tis_clip_fraction_low"] == [0, 0, 1]
    assert metrics["tis_clipfrac"] == [1, 0, 1]
    weights, metrics = weigh(t(-2.5), "truncate", 0.5, 2.0)
    assert weights == pytest.approx([math.exp(-2.5)])
    assert metrics["tis_clipfrac"] == [0]
    weights, metrics = weigh(t(*GOLDEN), "none", 0.5, 2.0)
    assert weights == [1.0, 1.0, 1.0]
    assert metrics["tis_clipfrac"] == [0, 0, 0]
    assert metrics["tis"] == pytest.approx([math.exp(x) for x in GOLDEN])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_padding_is_never_read(kind: Kind, level: Level) -> None:
    nan = math.nan
    padded = torch.tensor([[0.3, nan, -0.2], [nan, nan, 0.7], [math.inf, nan, -math.inf]], dtype=torch.float64)
    mask = torch.tensor([[True, False, True], [False, False, True], [False, False, False]])
    weights, metrics = importance_weights(padded, Padded(mask), kind=kind, level=level, low=0.9, high=1.2)
    flat, flat_metrics = importance_weights(
        t(0.3, -0.2, 0.7), Packed(torch.tensor([0, 0, 1]), 3), kind=kind, level=level, low=0.9, high=1.2
    )
    assert weights[mask].tolist() == pytest.approx(flat.tolist())
    assert weights[~mask].tolist() == [0.0] * 6
    assert metrics.keys() == flat_metrics.keys()
    for name, values in metrics.items():
        assert values[mask].tolist() == pytest.approx(flat_metrics[name].tolist()), name
        assert values[~mask].tolist() == [0.0] * 6, name


def test_bounds_are_within_aggregates_are_clamped_before_exp_and_ratios_outside_the_mask_are_1() -> None:
    for kind in KINDS:
        weights, metrics = weigh(t(0.0), kind, 1.0, 1.0)
        assert (weights, metrics["tis_clipfrac"]) == ([1.0], [0]), kind
    for level in LEVELS:
        for size in (500.0, -500.0):
            assert importance_ratio(t(size), one(1), level).tolist() == pytest.approx([math.exp(math.copysign(20, size))]), level
        found = importance_ratio(torch.tensor([[0.2, math.nan, 0.2]]), Padded(torch.tensor([[True, False, True]])), level)
        assert found[0, 1].item() == 1.0
        assert found[0, 0].item() == pytest.approx(math.exp(0.4 if level == "sequence" else 0.2)), level


def test_weights_carry_no_gradient_and_no_tokens_have_the_same_metrics() -> None:
    log_ratio = t(0.3, -0.2).requires_grad_()
    assert not any(importance_ratio(log_ratio, one(2), level).requires_grad for level in LEVELS)
    for kind in KINDS:
        for level in LEVELS:
            weights, metrics = importance_weights(log_ratio, one(2), kind=kind, level=level, low=0.5, high=2.0)
            assert not weights.requires_grad
            assert not any(values.requires_grad for values in metrics.values())
    for level in LEVELS:
        weights, metrics = importance_weights(t(), Packed(torch.zeros(0, dtype=torch.int64), 0), kind="mask", level=level, low=0.5, high=2)
        assert weights.shape == (0,)
        assert len(metrics) == 5


def test_the_factor_is_the_number_by_the_sum_and_1_where_nothing_was_weighed() -> None:
    found = [normalization(t(*sums)) for sums in ((6.0, 3.0), (1.0, 4.0), (0.0, 4.0), (0.0, 0.0))]
    assert found == [0.5, 4.0, 1.0, 1.0]
