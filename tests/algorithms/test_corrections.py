"""The whole correction against a second implementation, and what holds for every configuration."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.algorithms.corrections import Correction, correct, drop_nonfinite, finite_tokens, log_linear_proximal
from streamrl.algorithms.importance import normalization
from streamrl.algorithms.policy_losses import ppo_clip
from streamrl.algorithms.sequences import Packed, Padded
from streamrl.config.loss import CorrectionConfig, RejectionConfig
from streamrl.telemetry.names import Reduction, metric
from tests.algorithms import reference_corrections as second
from tests.algorithms.reference_corrections import Sample, Token
from tests.support.float64 import t

LOGPROBS = st.floats(-4.0, 0.0).map(lambda x: round(x, 6))
BROKEN = st.sampled_from([math.nan, math.inf, -math.inf])
TOKENS = st.builds(Token, LOGPROBS, LOGPROBS, st.integers(0, 4))
ANY_TOKENS = st.one_of(TOKENS, TOKENS, TOKENS, st.builds(Token, BROKEN, LOGPROBS), st.builds(Token, LOGPROBS, BROKEN))
SAMPLES = st.lists(st.lists(ANY_TOKENS, max_size=4), min_size=1, max_size=4)
CRITERIA = st.builds(
    RejectionConfig,
    measure=st.sampled_from(["ratio", "k1", "k2", "k3"]),
    level=st.sampled_from(["token", "sequence_sum", "sequence_mean", "sequence_max"]),
    low=st.floats(-1.0, 0.6),
    high=st.floats(0.7, 4.0),
)
CONFIGS = st.builds(
    CorrectionConfig,
    kind=st.sampled_from(["none", "truncate", "clip", "mask"]),
    level=st.sampled_from(["token", "sequence", "geometric"]),
    low=st.floats(0.05, 0.95),
    high=st.floats(1.05, 4.0),
    reject=st.lists(CRITERIA, max_size=3).map(tuple),
    veto=st.sampled_from([0.0, 0.05, 0.2]),
    mask_staleness=st.integers(0, 3),
    staleness_decay=st.sampled_from([1.0, 0.9, 0.5]),
)
ON = CorrectionConfig(
    kind="mask",
    level="geometric",
    low=0.5,
    reject=(RejectionConfig(measure="k3", level="sequence_mean", high=0.1),),
    veto=1e-4,
    mask_staleness=2,
    staleness_decay=0.9,
)


def packed(samples: list[Sample], order: list[int] | None = None) -> dict[str, Any]:
    owner = [index for index, sample in enumerate(samples) for _ in sample]
    tokens = [token for sample in samples for token in sample]
    order = list(range(len(tokens))) if order is None else order
    return {
        "proximal": torch.tensor([tokens[i].log_p for i in order], dtype=torch.float64),
        "sampler": torch.tensor([tokens[i].log_q for i in order], dtype=torch.float64),
        "staleness": torch.tensor([tokens[i].age for i in order], dtype=torch.int32),
        "sequences": Packed(torch.tensor([owner[i] for i in order], dtype=torch.int64), len(samples)),
    }


def padded(samples: list[Sample]) -> dict[str, Any]:
    """One sample a row, at its right end, with rubbish around it."""
    width = max(1, *(len(sample) for sample in samples)) + 1
    rows = [[Token(math.nan, math.inf, -7)] * (width - len(sample)) + sample for sample in samples]
    mask = torch.tensor([[i >= width - len(sample) for i in range(width)] for sample in samples])
    return {
        "proximal": torch.tensor([[token.log_p for token in row] for row in rows], dtype=torch.float64),
        "sampler": torch.tensor([[token.log_q for token in row] for row in rows], dtype=torch.float64),
        "staleness": torch.tensor([[token.age for token in row] for row in rows], dtype=torch.int32),
        "sequences": Padded(mask),
    }


def away_from_bounds(samples: list[Sample], config: CorrectionConfig) -> bool:
    """Whether no value is so close to a bound that rounding decides."""
    for sample in samples:
        finite = [token for token in sample if token.finite]
        if not finite:
            continue
        values = [(value, bound) for value in second.ratios(finite, config.level) for bound in (config.low, config.high)]
        values += [(token.rho, config.veto) for token in finite]
        for one in config.reject:
            measures = second.measures(finite, one.measure, one.level)
            values += [(value, bound) for value in measures for bound in (one.low, one.high)]
        if any(abs(value - bound) < 1e-9 for value, bound in values):
            return False
    return True


@settings(deadline=None, max_examples=300)
@given(SAMPLES, CONFIGS)
def test_it_agrees_with_the_second_implementation(samples: list[Sample], config: CorrectionConfig) -> None:
    if not away_from_bounds(samples, config):
        return
    found = correct(**packed(samples), config=config)
    weights, keeps, total, count = second.correct(samples, config)
    assert found.keep.tolist() == [keep for row in keeps for keep in row]
    assert found.weights.tolist() == pytest.approx([weight for row in weights for weight in row], rel=1e-9)
    assert found.sums.tolist() == pytest.approx([total, count], rel=1e-9)


@settings(deadline=None, max_examples=100)
@given(SAMPLES, CONFIGS)
def test_packed_and_padded_agree_and_everything_is_finite(samples: list[Sample], config: CorrectionConfig) -> None:
    flat, rows = packed(samples), padded(samples)
    one, other = correct(**flat, config=config), correct(**rows, config=config)
    mask = rows["sequences"].mask
    assert other.weights[mask].tolist() == pytest.approx(one.weights.tolist())
    assert other.keep[mask].tolist() == one.keep.tolist()
    assert other.sums.tolist() == pytest.approx(one.sums.tolist())
    assert not other.keep[~mask].any()
    assert not other.weights[~mask].any()
    assert one.metrics.keys() == other.metrics.keys()
    for name, values in other.metrics.items():
        assert values[mask].tolist() == pytest.approx(one.metrics[name].tolist()), name
        assert values.isfinite().all(), name
        assert not values[~mask].any(), name


@settings(deadline=None, max_examples=100)
@given(st.lists(st.lists(TOKENS, min_size=1, max_size=4), min_size=1, max_size=4), CONFIGS)
def test_normalisation_makes_the_mean_weight_of_tokens_or_samples_1(samples: list[Sample], config: CorrectionConfig) -> None:
    free = msgspec.structs.replace(config, reject=(), veto=0.0, mask_staleness=0, staleness_decay=1.0)
    parts = [correct(**packed([sample]), config=free) for sample in samples]
    factor = normalization(torch.stack([part.sums for part in parts]).sum(0))
    scaled = [part.scaled(factor).weights for part in parts]
    counted = torch.cat(scaled if config.level == "token" else [weights[:1] for weights in scaled])
    assert counted.mean().item() == pytest.approx(1.0 if counted.any() else 0.0)


def test_neither_weights_nor_metrics_carry_a_gradient_to_the_current_policy() -> None:
    """`ratio = "current"`: the weight is of the log-probs under training, and only the loss's own ratio sends a gradient."""
    inputs = packed([[Token(-1.0, -1.3), Token(-0.5, -0.4)]])
    logprobs = inputs["proximal"].requires_grad_()
    found = correct(**inputs, config=CorrectionConfig())
    assert not found.weights.requires_grad
    assert not any(values.requires_grad for values in found.metrics.values())
    advantages = torch.tensor([1.0, -2.0], dtype=torch.float64)
    loss, _ = ppo_clip(logprobs, logprobs.detach(), advantages, clip_low=0.2, clip_high=0.2)
    (found.weights * loss).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-math.exp(0.3), 2.0 * math.exp(-0.1)])


def test_several_criteria_reject_what_any_of_them_does() -> None:
    """By hand: rho is e^0.9, e^-0.9 | e^0.1, e^0.1 | 1, e^-3; the first sample's mean is 1, the second's e^0.1."""
    samples = [[Token(-1.0, -1.9), Token(-1.0, -0.1)], [Token(-1.0, -1.1), Token(-1.0, -1.1)], [Token(-1.0, -1.0), Token(-4.0, -1.0)]]
    mean = RejectionConfig(measure="ratio", level="sequence_mean", low=0.99, high=1.01)
    token = RejectionConfig(measure="k2", level="token", high=0.5)  # l^2 / 2: 0.405, 0.405 | 0.005, 0.005 | 0, 4.5
    high, low = "train/mis_rs_mask_fraction_high", "train/mis_rs_mask_fraction_low"

    def found(*criteria: RejectionConfig) -> Correction:
        return correct(**packed(samples), config=CorrectionConfig(kind="none", reject=criteria))

    assert found(mean).keep.tolist() == [True, True, False, False, False, False]
    assert found(token).keep.tolist() == [True, True, True, True, True, False]
    assert found(token, RejectionConfig(measure="k3", level="token", high=0.005)).keep.tolist() == [False, False, False, False, True, False]
    both, turned = found(mean, token), found(token, mean)
    assert both.keep.tolist() == turned.keep.tolist() == [True, True, False, False, False, False]
    assert both.metrics[high].tolist() == turned.metrics[high].tolist() == [0, 0, 1, 1, 0, 1]
    assert both.metrics[low].tolist() == turned.metrics[low].tolist() == [0, 0, 0, 0, 1, 1]
    assert both.metrics["train/rejected_fraction"].tolist() == [0, 0, 1, 1, 1, 1]
    assert set(both.metrics) == set(found(mean).metrics)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_have_the_log_probs_dtype_and_sums_are_float64(dtype: torch.dtype) -> None:
    inputs = packed([[Token(-1.0, -1.3)]])
    found = correct(inputs["proximal"].to(dtype), inputs["sampler"].to(dtype), inputs["staleness"], inputs["sequences"], ON)
    assert found.weights.dtype == dtype
    assert {values.dtype for values in found.metrics.values()} == {dtype}
    assert found.sums.dtype == torch.float64
    assert found.scaled(2.0).weights.dtype == dtype


def test_masks_decays_and_what_is_off() -> None:
    tokens = [[Token(-1.0, -1.0, age) for age in range(4)]]
    found = correct(**packed(tokens), config=CorrectionConfig(mask_staleness=2, staleness_decay=0.5))
    assert found.weights.tolist() == [1.0, 0.5, 0.25, 0.0]
    assert found.metrics["train/stale_masked_fraction"].tolist() == [0, 0, 0, 1]
    assert found.metrics["train/staleness_weight"].tolist() == [1.0, 0.5, 0.25, 0.125]
    samples = [[Token(math.log(r), 0.0) for r in (0.2, 0.9, 1.1, 7.0)]]
    found = correct(**packed(samples), config=CorrectionConfig(kind="mask", low=0.5, high=5.0))
    assert found.weights.tolist() == pytest.approx([0, 0.9, 1.1, 0])
    assert found.metrics["train/rejected_fraction"].tolist() == [1, 0, 0, 1]
    found = correct(**packed([[Token(-1.0, -1.0, 3)]]), config=CorrectionConfig(kind="none"))
    assert set(found.metrics) == {
        "train/tis",
        "train/tis_abs",
        "train/tis_clipfrac",
        "train/rejected_fraction",
    }
    assert found.weights.tolist() == [1.0]
    samples = [[Token(-1.0, -1.4), Token(math.nan, -1.0), Token(-1.0, -1.2)]]
    found = correct(**packed(samples), config=CorrectionConfig(level="geometric"))
    assert found.weights.tolist() == pytest.approx([math.exp(0.3), 0.0, math.exp(0.3)])
    assert found.keep.tolist() == [True, False, True]
    assert found.sums.tolist() == pytest.approx([math.exp(0.3), 1])
    difference = torch.full((100_000,), 1e-5, dtype=torch.float32)
    proximal, sampler = torch.zeros_like(difference), -difference
    sequences = Packed(torch.zeros(len(difference), dtype=torch.int64), 1)
    found = correct(
        proximal, sampler, torch.zeros(len(difference), dtype=torch.int32), sequences, CorrectionConfig(level="sequence", high=9.0)
    )
    assert found.weights[0].item() == pytest.approx(math.exp(float(np.float32(1e-5)) * 100_000), rel=1e-6)


@settings(deadline=None, max_examples=50)
@given(CONFIGS)
def test_every_metric_is_declared_with_its_reduction_and_given_for_no_tokens_too(config: CorrectionConfig) -> None:
    nothing, something = correct(**packed([[]]), config=config), correct(**packed([[Token(-1.0, -1.0)]]), config=config)
    assert nothing.metrics.keys() == something.metrics.keys()
    assert {metric(name).reduction for name in something.metrics} == {Reduction.MEAN}
    assert nothing.sums.tolist() == [0.0, 0.0]


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
    mask = torch.tensor([[True, False], [True, True]])
    keep, (values,), metrics = drop_nonfinite(mask, torch.tensor([[1.0, NAN], [NAN, 2.0]], dtype=torch.float64))
    assert keep.tolist() == [[True, False], [False, True]]
    assert values.tolist() == [[1.0, 0.0], [0.0, 2.0]]
    assert metrics["train/nonfinite_tokens"].tolist() == [[0, 0], [1, 0]]
    assert metrics["train/nonfinite_tokens"].dtype == torch.float64
    mask = torch.tensor([True, False])
    assert finite_tokens(mask).tolist() == [True, False]


def test_the_log_linear_proximal_policy_by_hand() -> None:
    logprobs = torch.tensor([-0.1, -0.7, -1.3], dtype=torch.float32)
    found = log_linear_proximal(logprobs, torch.tensor([-3.3, -0.2, -9.0]), torch.tensor([0, 1, 7]), progress=0.0)
    assert found.tolist() == logprobs.tolist()
    assert log_linear_proximal(t(-1.0), t(-3.0), torch.tensor([0]), progress=0.5).tolist() == [-3.0]
    # v_behave = 4, v_prox = 7, v = 7.5: alpha = 3 / 3.5
    found = log_linear_proximal(t(-1.0), t(-4.5), torch.tensor([3]), progress=0.5)
    assert found.tolist() == pytest.approx([-4.5 + 3.0])
    # alpha = (v_prox - v_behave) / (v - v_behave) with v_prox = v - 1, for v = 9 and tokens of versions 8, 7, 5
    theta, mu = t(-1.0, -1.0, -1.0), t(-2.0, -2.0, -2.0)
    found = log_linear_proximal(theta, mu, torch.tensor([0, 1, 3]), progress=1.0)
    assert found.tolist() == pytest.approx([-2 + (8 - v) / (9 - v) for v in (8, 7, 5)])
    logprobs = t(-1.0).requires_grad_()
    assert not log_linear_proximal(logprobs, t(-2.0), torch.tensor([2]), progress=0.5).requires_grad
    found = log_linear_proximal(t(math.nan, -1.0, -math.inf), t(-1.0, -math.inf, -1.0), torch.tensor([1, 1, 1]), progress=0.5)
    assert not found.isfinite().any()
