"""Metrics of a whole batch, from arrays that every rank holds: no torch.

What a sum over micro-batches cannot give: quantiles, effective sample sizes, means over samples. Letters: `T` tokens of the batch, `N`
samples. Only trained tokens count, and of them those whose log-probs are finite. A batch without any gives no metrics.
rho = pi / mu: probability under the trainer's policy (the proximal one) over the probability under the policy that sampled the token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from streamrl.config.loss import MAX_LOG_RATIO
from streamrl.core.batches import TrainBatch, sample_of_token

Values = npt.NDArray[np.float64]


def effective_fraction(weights: npt.NDArray[np.floating]) -> float:
    """Effective sample size over the number of samples, (sum w)^2 / (n sum w^2), in [0, 1]: 1 for equal weights, 1 / n for a single one.

    Kish's estimate. Scaling all weights leaves it as it is. No weights, or only zeros, give 0.

    Args:
        weights: any shape, finite, not negative.
    """
    top = float(np.max(weights, initial=0.0))
    if top == 0.0:
        return 0.0
    scaled = weights.astype(np.float64) / top
    return min(1.0, float(scaled.sum() ** 2 / (scaled.size * np.square(scaled).sum())))


def step_means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over those optimizer steps of a batch that have it: one without trained tokens has none of its loss."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: float(np.mean([row[name] for row in rows if name in row])) for name in names}


def ratio_metrics(batch: TrainBatch, logprobs: npt.NDArray[np.floating]) -> dict[str, float]:
    """How far the trainer's policy is from the policies that sampled the batch, before any bound on the weights.

    Quantiles of rho over tokens; effective sample sizes of rho over tokens and of its product over samples; and with l = log rho, means
    over tokens of -l (`mis_kl`) and exp(l) - 1 - l (`mis_k3_kl`), both estimates of KL(mu || pi), and of rho^2 - 1 (`mis_chi2_token`), an
    estimate of the chi-squared divergence; the same of whole samples is `mis_chi2_seq`. A sample's log-perplexity is minus the mean of its
    tokens' log-probs; `*_log_ppl` and `*_ppl` are means over samples, `mis_log_ppl_diff` is that of training minus rollout and
    `mis_ppl_ratio` the mean of its exp. Logarithms are clamped to +-20 before exp.

    Args:
        batch: of sampled tokens.
        logprobs: [T] log pi; only those of trained tokens are read.
    """
    kept = batch.loss_mask & np.isfinite(logprobs) & np.isfinite(batch.sampler_logprobs)
    if not kept.any():
        return {}
    owner = sample_of_token(batch)[kept]
    trainer, sampler = logprobs[kept].astype(np.float64), batch.sampler_logprobs[kept].astype(np.float64)
    log_ratio = trainer - sampler
    ratio = _exp(log_ratio)
    count = np.bincount(owner, minlength=batch.num_samples)
    held = count > 0

    def total(values: Values) -> Values:
        return np.bincount(owner, values, minlength=batch.num_samples).astype(np.float64)[held]

    sums, ppl, rollout_ppl = total(log_ratio), -total(trainer) / count[held], -total(sampler) / count[held]
    low, median, high = np.quantile(ratio, [0.01, 0.5, 0.99])
    return {
        "train/ratio_p1": float(low),
        "train/ratio_p50": float(median),
        "train/ratio_p99": float(high),
        "train/ratio_max": float(ratio.max()),
        "train/ess_token": effective_fraction(np.exp(log_ratio - log_ratio.max())),
        "train/ess_sequence": effective_fraction(np.exp(sums - sums.max())),
        "train/mis_kl": float(-log_ratio.mean()),
        "train/mis_k3_kl": float((ratio - 1.0 - log_ratio).mean()),
        "train/mis_chi2_token": float(np.square(ratio).mean() - 1.0),
        "train/mis_chi2_seq": float(np.square(_exp(sums)).mean() - 1.0),
        "train/mis_training_log_ppl": float(ppl.mean()),
        "train/mis_training_ppl": float(_exp(ppl).mean()),
        "train/mis_rollout_log_ppl": float(rollout_ppl.mean()),
        "train/mis_rollout_ppl": float(_exp(rollout_ppl).mean()),
        "train/mis_log_ppl_diff": float((ppl - rollout_ppl).mean()),
        "train/mis_log_ppl_abs_diff": float(np.abs(ppl - rollout_ppl).mean()),
        "train/mis_log_ppl_diff_max": float((ppl - rollout_ppl).max()),
        "train/mis_ppl_ratio": float(_exp(ppl - rollout_ppl).mean()),
    }


def weight_metrics(batch: TrainBatch, weights: npt.NDArray[np.floating], *, factor: float = 1.0) -> dict[str, float]:
    """The importance weights that the losses are multiplied by.

    Args:
        batch: the whole batch.
        weights: [T], after bounds, rejection (0 there), decay and normalisation; only those of trained tokens are read.
        factor: what normalisation multiplied them by.
    """
    final = weights[batch.loss_mask]
    if not final.size:
        return {}
    return {
        "train/ess_weights": effective_fraction(final),
        "train/mis_is_ratio_mean_final": float(final.mean(dtype=np.float64)),
        "train/mis_is_ratio_min_final": float(final.min()),
        "train/mis_is_ratio_max_final": float(final.max()),
        "train/mis_batch_norm_factor": factor,
    }


def advantage_spread(advantages: Values) -> dict[str, float]:
    """Standard deviation, least and greatest of advantages; no metrics where there are none.

    Args:
        advantages: of trained tokens, one each.
    """
    if not advantages.size:
        return {}
    return {
        "rollout/advantages_std": float(advantages.std()),
        "rollout/advantages_min": float(advantages.min()),
        "rollout/advantages_max": float(advantages.max()),
    }


def staleness_metrics(batch: TrainBatch) -> dict[str, float]:
    """Mean, quantiles and maximum of the trained tokens' ages in versions, and of the samples', which are as old as their oldest token."""
    mask = batch.loss_mask
    if not mask.any():
        return {}
    ages = batch.staleness[mask]
    oldest = np.full(batch.num_samples, -1, np.int64)
    np.maximum.at(oldest, sample_of_token(batch)[mask], ages)
    samples = oldest[oldest >= 0]
    median, p95, p99 = np.percentile(ages, [50, 95, 99])
    return {
        "staleness/mean": float(ages.mean()),
        "staleness/p50": float(median),
        "staleness/p95": float(p95),
        "staleness/p99": float(p99),
        "staleness/max": float(ages.max()),
        "staleness/sample_mean": float(samples.mean()),
        "staleness/sample_p50": float(np.percentile(samples, 50)),
        "staleness/sample_p95": float(np.percentile(samples, 95)),
        "staleness/sample_max": float(samples.max()),
    }


def length_metrics(batch: TrainBatch) -> dict[str, float]:
    """Lengths of the samples in tokens.

    `response_len/*` counts trained tokens, `response_lengths` all from the first trained one on (what tools answered included),
    `total_lengths` the prompt too.
    """
    if batch.num_samples == 0:
        return {}
    trained = np.bincount(sample_of_token(batch)[batch.loss_mask], minlength=batch.num_samples)
    first = batch.offsets[1:].copy()
    np.minimum.at(first, sample_of_token(batch)[batch.loss_mask], np.flatnonzero(batch.loss_mask))
    return {
        "rollout/response_len/mean": float(trained.mean()),
        "rollout/response_len/median": float(np.median(trained)),
        "rollout/response_len/max": float(trained.max()),
        "rollout/response_len/min": float(trained.min()),
        "rollout/response_lengths": float((batch.offsets[1:] - first).mean()),
        "rollout/total_lengths": float(batch.lengths.mean()),
    }


def _exp(logarithm: Values) -> Values:
    return np.exp(np.clip(logarithm, -MAX_LOG_RATIO, MAX_LOG_RATIO))
