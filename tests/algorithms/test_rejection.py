"""Rejection and veto: closed forms of every measure and level, both bounds, whole samples."""

import math

import pytest
import torch

from streamrl.algorithms.rejection import Level, Measure, accept, veto
from streamrl.algorithms.sequences import Packed, Padded
from tests.support.float64 import t

LEVELS: tuple[Level, ...] = ("token", "sequence_sum", "sequence_mean", "sequence_max")
MEASURES: tuple[Measure, ...] = ("ratio", "k1", "k2", "k3")
LOG_RATIO = (0.5, -1.0, 0.2)
SAMPLES = torch.tensor([0, 0, 1])


def k3(x: float) -> float:
    return math.exp(x) - 1 - x


WANTED: dict[tuple[Measure, Level], list[float]] = {
    ("ratio", "token"): [math.exp(0.5), math.exp(-1.0), math.exp(0.2)],
    ("ratio", "sequence_sum"): [math.exp(-0.5), math.exp(-0.5), math.exp(0.2)],
    ("ratio", "sequence_mean"): [math.exp(-0.25), math.exp(-0.25), math.exp(0.2)],
    ("ratio", "sequence_max"): [math.exp(0.5), math.exp(0.5), math.exp(0.2)],
    ("k1", "token"): [-0.5, 1.0, -0.2],
    ("k1", "sequence_sum"): [0.5, 0.5, -0.2],
    ("k1", "sequence_mean"): [0.25, 0.25, -0.2],
    ("k1", "sequence_max"): [1.0, 1.0, -0.2],
    ("k2", "token"): [0.125, 0.5, 0.02],
    ("k2", "sequence_sum"): [0.625, 0.625, 0.02],
    ("k2", "sequence_mean"): [0.3125, 0.3125, 0.02],
    ("k2", "sequence_max"): [0.5, 0.5, 0.02],
    ("k3", "token"): [k3(0.5), k3(-1.0), k3(0.2)],
    ("k3", "sequence_sum"): [k3(0.5) + k3(-1.0)] * 2 + [k3(0.2)],
    ("k3", "sequence_mean"): [(k3(0.5) + k3(-1.0)) / 2] * 2 + [k3(0.2)],
    ("k3", "sequence_max"): [k3(-1.0)] * 2 + [k3(0.2)],
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("measure", MEASURES)
def test_each_measure_at_each_level_meets_its_bounds(measure: Measure, level: Level) -> None:
    """Every value in turn just within and just beyond either bound."""
    values = WANTED[measure, level]
    two_sided = measure in ("ratio", "k1")
    for edge in values:
        for nudge in (-1e-9, 1e-9):
            keep, metrics = accept(t(*LOG_RATIO), Packed(SAMPLES, 2), measure=measure, level=level, low=-9.0, high=edge + nudge)
            assert keep.tolist() == [value <= edge + nudge for value in values]
            assert metrics["train/mis_rs_mask_fraction_high"].tolist() == [float(value > edge + nudge) for value in values]
            assert not metrics["train/mis_rs_mask_fraction_low"].any()
            keep, metrics = accept(t(*LOG_RATIO), Packed(SAMPLES, 2), measure=measure, level=level, low=edge + nudge, high=9.0)
            assert keep.tolist() == [not two_sided or value >= edge + nudge for value in values]
            assert metrics["train/mis_rs_mask_fraction_low"].tolist() == [float(two_sided and value < edge + nudge) for value in values]
            assert not metrics["train/mis_rs_mask_fraction_high"].any()


@pytest.mark.parametrize("measure", MEASURES)
def test_extreme_ratios_stay_finite(measure: Measure) -> None:
    for level in LEVELS:
        keep, _ = accept(t(800.0, -800.0), Packed(SAMPLES[:2], 1), measure=measure, level=level, low=-1e30, high=1e30)
        assert keep.all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("measure", MEASURES)
def test_padding_is_never_read(measure: Measure, level: Level) -> None:
    nan = math.nan
    mask = torch.tensor([[False, True, True], [True, False, False], [False, False, False]])
    values = torch.tensor([[nan, 0.5, -1.0], [0.2, math.inf, nan], [nan, nan, nan]], dtype=torch.float64)
    middle = sorted(WANTED[measure, level])[1]
    padded, metrics = accept(values, Padded(mask), measure=measure, level=level, low=-9.0, high=middle - 1e-9)
    packed, wanted = accept(t(*LOG_RATIO), Packed(SAMPLES, 2), measure=measure, level=level, low=-9.0, high=middle - 1e-9)
    assert padded[mask].tolist() == packed.tolist()
    assert not padded[~mask].any()
    for name, found in metrics.items():
        assert found[mask].tolist() == wanted[name].tolist()
        assert not found[~mask].any()


def test_a_veto_takes_the_whole_sample_and_no_other() -> None:
    log_ratio = t(math.log(0.9e-4), 0.0, math.log(1.1e-4), 0.0)
    keep, metrics = veto(log_ratio, Packed(torch.tensor([0, 0, 1, 1]), 2), least=1e-4)
    assert keep.tolist() == [False, False, True, True]
    assert metrics["train/mis_rs_catastrophic_token_fraction"].tolist() == [1, 0, 0, 0]
    assert metrics["train/mis_rs_catastrophic_seq_fraction"].tolist() == [1, 1, 0, 0]
    mask = torch.tensor([[True, False], [True, True]])
    keep, metrics = veto(torch.tensor([[0.0, -99.0], [0.0, -0.1]]), Padded(mask), least=1.0)
    assert keep.tolist() == [[True, False], [False, False]]
    assert metrics["train/mis_rs_catastrophic_token_fraction"].tolist() == [[0, 0], [0, 1]]
    assert metrics["train/mis_rs_catastrophic_seq_fraction"].tolist() == [[0, 0], [1, 1]]


def test_the_bounds_themselves_are_within_and_nothing_carries_a_gradient() -> None:
    for measure in MEASURES:
        value = 1.0 if measure == "ratio" else 0.0
        keep, _ = accept(t(0.0), Packed(SAMPLES[:1], 1), measure=measure, level="token", low=value, high=value)
        assert keep.tolist() == [True]
    log_ratio = t(*LOG_RATIO).requires_grad_()
    _, metrics = accept(log_ratio, Packed(SAMPLES, 2), measure="k3", level="sequence_sum", low=0.0, high=0.1)
    _, more = veto(log_ratio, Packed(SAMPLES, 2), least=0.1)
    assert not any(values.requires_grad for values in (metrics | more).values())
