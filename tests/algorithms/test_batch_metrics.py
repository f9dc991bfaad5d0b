"""Metrics of whole batches: closed forms by hand, what is left out, and that every name is declared."""

import math
from collections.abc import Callable

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from streamrl.algorithms import batch_metrics
from streamrl.algorithms.batch_metrics import effective_fraction, ratio_metrics
from streamrl.core.batches import TrainBatch
from streamrl.telemetry.names import Reduction, metric

MakeBatch = Callable[..., TrainBatch]
SAMPLER = [[-1.0, -2.0], [-0.5, -3.0, -1.0], [-1.0]]
MASKS = [[True, True], [True, False, True], [False]]
LOG_RHO = {0: [0.5, -0.25], 1: [0.1, 0.3]}
"""By sample, of its trained tokens; the third sample trains none."""


@pytest.fixture
def batch(make_batch: MakeBatch) -> TrainBatch:
    answers = [
        {"prompt": [1], "answer": [2] * len(mu), "mu": mu, "mask": mask, "task": 0, "rollout": i}
        for i, (mu, mask) in enumerate(zip(SAMPLER, MASKS, strict=True))
    ]
    made = make_batch(answers)
    return msgspec.structs.replace(made, staleness=np.array([9, 0, 1, 9, 4, 9, 2, 9, 9], np.int32))


def scored(batch: TrainBatch) -> npt.NDArray[np.float64]:
    """The trainer's log-probs; NaN where no token is trained."""
    logprobs = np.full(batch.num_tokens, np.nan)
    logprobs[batch.loss_mask] = batch.sampler_logprobs[batch.loss_mask] + np.concatenate(list(LOG_RHO.values()))
    return logprobs


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def kish(weights: list[float]) -> float:
    return sum(weights) ** 2 / len(weights) / sum(w * w for w in weights)


def test_ratios_by_hand(batch: TrainBatch) -> None:
    found = ratio_metrics(batch, scored(batch))
    logs = [0.5, -0.25, 0.1, 0.3]
    rho = [math.exp(x) for x in logs]
    products = [math.exp(0.25), math.exp(0.4)]
    trained = [[-0.5, -2.25], [-0.4, -0.7]]
    sampled = [[-1.0, -2.0], [-0.5, -1.0]]
    ppl, rollout_ppl = [-mean(s) for s in trained], [-mean(s) for s in sampled]
    difference = [a - b for a, b in zip(ppl, rollout_ppl, strict=True)]
    wanted = {
        "train/ratio_p1": np.quantile(rho, 0.01),
        "train/ratio_p50": (math.exp(0.1) + math.exp(0.3)) / 2,
        "train/ratio_p99": np.quantile(rho, 0.99),
        "train/ratio_max": math.exp(0.5),
        "train/ess_token": kish(rho),
        "train/ess_sequence": kish(products),
        "train/mis_kl": -mean(logs),
        "train/mis_k3_kl": mean([r - 1 - math.log(r) for r in rho]),
        "train/mis_chi2_token": mean([r**2 for r in rho]) - 1,
        "train/mis_chi2_seq": mean([r**2 for r in products]) - 1,
        "train/mis_training_log_ppl": mean(ppl),
        "train/mis_training_ppl": mean([math.exp(x) for x in ppl]),
        "train/mis_rollout_log_ppl": mean(rollout_ppl),
        "train/mis_rollout_ppl": mean([math.exp(x) for x in rollout_ppl]),
        "train/mis_log_ppl_diff": mean(difference),
        "train/mis_log_ppl_abs_diff": mean([abs(x) for x in difference]),
        "train/mis_log_ppl_diff_max": max(difference),
        "train/mis_ppl_ratio": mean([math.exp(x) for x in difference]),
    }
    assert difference == pytest.approx([-0.125, -0.2])
    assert found == pytest.approx(wanted)


def test_tokens_that_are_not_finite_are_left_out_and_extremes_stay_finite(batch: TrainBatch) -> None:
    logprobs = scored(batch)
    logprobs[1] = np.nan
    assert ratio_metrics(batch, logprobs)["train/mis_kl"] == pytest.approx(-(-0.25 + 0.1 + 0.3) / 3)
    sampler = batch.sampler_logprobs.copy()
    sampler[2] = -np.inf
    broken = msgspec.structs.replace(batch, sampler_logprobs=sampler)
    assert ratio_metrics(broken, logprobs)["train/mis_kl"] == pytest.approx(-0.2)
    assert ratio_metrics(broken, logprobs)["train/ess_sequence"] == pytest.approx(1.0)
    logprobs = scored(batch)
    logprobs[1], logprobs[2] = 900.0, -900.0
    found = ratio_metrics(batch, logprobs)
    assert all(math.isfinite(value) for value in found.values())
    assert found["train/ratio_max"] == pytest.approx(math.exp(20))
    assert found["train/ess_token"] == pytest.approx(1 / 4)


def test_quantiles_and_effective_sizes_by_hand(make_batch: MakeBatch) -> None:
    batch = make_batch([{"prompt": [1], "answer": [2]}, {"prompt": [1], "answer": [2, 2]}])
    batch = msgspec.structs.replace(batch, staleness=np.array([9, 0, 9, 3, 1], np.int32))
    assert batch_metrics.staleness_metrics(batch)["staleness/sample_mean"] == 1.5
    found = ratio_metrics(batch, np.array([0.0, -0.4, 0.0, -0.1, -0.1]))
    assert found["train/mis_training_log_ppl"] == pytest.approx(0.25)
    assert found["train/mis_chi2_seq"] == pytest.approx((math.exp(-0.8) + math.exp(-0.4)) / 2 - 1)
    ratios = 1.0 + np.arange(101) / 100
    batch = make_batch([{"prompt": [1], "answer": [2] * 101}])
    found = ratio_metrics(batch, np.concatenate([[0.0], np.log(ratios)]))
    assert (found["train/ratio_p1"], found["train/ratio_p50"], found["train/ratio_p99"]) == pytest.approx((1.01, 1.5, 1.99))
    batch = make_batch([{"prompt": [1], "answer": [2, 2]} for _ in range(3)])
    log_rho = [0.0, 0.5, 0.5, 0.0, 0.25, 0.0, 0.0, -1.0, -1.5]
    assert ratio_metrics(batch, np.array(log_rho))["train/ess_sequence"] == pytest.approx(kish([math.exp(x) for x in (1.0, 0.25, -2.5)]))
    assert ratio_metrics(batch, np.array(log_rho) * 1000)["train/ess_sequence"] == pytest.approx(1 / 3)


def test_weights_that_were_used_and_ages_of_tokens_and_of_samples(batch: TrainBatch) -> None:
    weights = np.full(batch.num_tokens, np.nan, np.float32)
    weights[batch.loss_mask] = [2.0, 1.0, 0.0, 1.0]
    assert batch_metrics.weight_metrics(batch, weights, factor=0.75) == pytest.approx(
        {
            "train/ess_weights": 16 / (4 * 6),
            "train/mis_is_ratio_mean_final": 1.0,
            "train/mis_is_ratio_min_final": 0.0,
            "train/mis_is_ratio_max_final": 2.0,
            "train/mis_batch_norm_factor": 0.75,
        }
    )
    assert batch_metrics.weight_metrics(batch, weights)["train/mis_batch_norm_factor"] == 1.0
    tokens, samples = [0, 1, 4, 2], [1, 4]
    assert batch_metrics.staleness_metrics(batch) == pytest.approx(
        {
            "staleness/mean": 1.75,
            "staleness/p50": 1.5,
            "staleness/p95": np.percentile(tokens, 95),
            "staleness/p99": np.percentile(tokens, 99),
            "staleness/max": 4.0,
            "staleness/sample_mean": 2.5,
            "staleness/sample_p50": 2.5,
            "staleness/sample_p95": np.percentile(samples, 95),
            "staleness/sample_max": 4.0,
        }
    )


def test_lengths_and_what_trained_no_token(make_batch: MakeBatch) -> None:
    batch = make_batch(
        [
            {"prompt": [1, 1], "answer": [2, 2, 2, 2], "mask": [False, True, False, True]},
            {"prompt": [1], "answer": [2, 2, 2, 2, 2]},
            {"prompt": [1], "answer": [2], "mask": [False]},
        ]
    )
    assert batch_metrics.length_metrics(batch) == pytest.approx(
        {
            "rollout/response_len/mean": 7 / 3,
            "rollout/response_len/median": 2.0,
            "rollout/response_len/max": 5.0,
            "rollout/response_len/min": 0.0,
            "rollout/response_lengths": (3 + 5 + 0) / 3,
            "rollout/total_lengths": (6 + 6 + 2) / 3,
        }
    )
    assert batch_metrics.length_metrics(make_batch([{"prompt": [1], "answer": [2]}]))["rollout/total_lengths"] == 2.0
    nothing = np.zeros(0, np.int64)
    drawn = {name: getattr(batch, name)[:0] for name in ("temperature", "top_p", "top_k")}
    empty = msgspec.structs.replace(batch, offsets=np.zeros(1, np.int64), tokens=nothing, loss_mask=nothing.astype(np.bool_), **drawn)
    assert batch_metrics.length_metrics(empty) == {}
    batch = make_batch([{"prompt": [1], "answer": [2], "mask": [False]}])
    nothing = np.zeros(batch.num_tokens)
    assert ratio_metrics(batch, nothing) == batch_metrics.weight_metrics(batch, nothing) == batch_metrics.staleness_metrics(batch) == {}


def test_every_name_is_declared_and_greatest_values_fold_as_such(batch: TrainBatch) -> None:
    logprobs = scored(batch)
    of_scores = (ratio_metrics(batch, logprobs), batch_metrics.weight_metrics(batch, logprobs))
    names = {name for one in (*of_scores, batch_metrics.staleness_metrics(batch), batch_metrics.length_metrics(batch)) for name in one}
    greatest = {name for name in names if metric(name).reduction is Reduction.MAX}
    assert greatest == {
        "train/ratio_max",
        "train/mis_log_ppl_diff_max",
        "train/mis_is_ratio_max_final",
        "staleness/max",
        "staleness/sample_max",
        "rollout/response_len/max",
    }
    assert {metric(name).reduction for name in names - greatest} == {Reduction.MEAN}


def test_the_effective_fraction_at_its_ends_and_means_over_steps() -> None:
    assert effective_fraction(np.full(7, 0.3)) == pytest.approx(1.0)
    assert effective_fraction(np.array([0.0, 5.0, 0.0, 0.0])) == pytest.approx(0.25)
    assert effective_fraction(np.array([3.0, 1.0])) == pytest.approx(0.8)
    assert effective_fraction(np.zeros(3)) == 0.0
    assert effective_fraction(1.0 - np.array([3e-9, 0.0, 3e-9, 2e-9, 3e-9])) == 1.0  # rounded, the quotient is above 1
    assert effective_fraction(np.zeros(0)) == 0.0
    assert effective_fraction(np.array([1e-200, 1e-200])) == pytest.approx(1.0)
    assert batch_metrics.step_means([{"a": 1.0, "b": 4.0}, {"a": 2.0}]) == {"a": 1.5, "b": 4.0}
