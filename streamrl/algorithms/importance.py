"""Importance weights: what corrects for tokens that an older policy, or another implementation of it, sampled.

rho_t = pi(y_t) / mu(y_t), where mu is the policy that sampled the token and pi the proximal or the current policy of the trainer.
Natural logarithms; tensors are shaped as the tokens of their `Sequences`, float32 or float64; nothing here carries a gradient.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from streamrl.algorithms.sequences import Sequences, mean
from streamrl.config.loss import MAX_LOG_RATIO

Kind = Literal["none", "truncate", "clip", "mask"]
Level = Literal["token", "sequence", "geometric"]


def ratio_of(log_ratio: Tensor) -> Tensor:
    """The ratio of a log-ratio: exp, after clamping to +-20."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def importance_ratio(log_ratio: Tensor, sequences: Sequences, level: Level) -> Tensor:
    """The ratio that a token is weighted by, before any bound; 1 outside the mask.

    token: rho_t. sequence: prod_t rho_t = exp(sum_t log rho_t) over a sample's trained tokens, the unbiased weight of the whole sample.
    geometric: exp(mean_t log rho_t), which does not grow with the length. Ratios are aggregated as logarithms and clamped after that.

    Args:
        log_ratio: log pi - log mu; what stands outside the mask is never read.
        sequences: which tokens are trained, and of which sample.
        level: which of the three.
    """
    with torch.no_grad():
        found = log_ratio
        if level == "sequence":
            found = sequences.spread(sequences.sum(found))
        elif level == "geometric":
            found = sequences.spread(mean(sequences, found))
        return ratio_of(found).masked_fill(~sequences.mask, 1.0)


def importance_weights(
    log_ratio: Tensor, sequences: Sequences, *, kind: Kind, level: Level, low: float, high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Bounded importance weights.

    truncate: w = min(rho, high) (arXiv 1802.01561, for PPO with a proximal policy arXiv 2505.24298). clip: w = clamp(rho, low, high).
    mask: w = rho where low <= rho <= high, else 0: a token that far from its sampler teaches nothing, but stays in the denominator.
    none: w = 1, with the ratio still measured.

    Args:
        log_ratio: log pi - log mu; what stands outside the mask is never read.
        sequences: which tokens are trained, and of which sample.
        kind: which bound.
        level: whose ratio, see `importance_ratio`.
        low: lower bound of `clip` and `mask`.
        high: upper bound.

    Returns:
        Weights, 0 outside the mask, and per-token metrics: `train/tis` (the ratio before any bound), `train/tis_abs` (its distance from
        1), `train/tis_clipfrac` (1 where the bound changed it), by kind its parts below and above the bounds as
        `train/mis_tis_truncate_fraction` and `train/mis_tis_{clip,mask}_fraction_{low,high}`.
    """
    with torch.no_grad():
        ratio = importance_ratio(log_ratio, sequences, level)
        below, above = (ratio < low).to(ratio.dtype), (ratio > high).to(ratio.dtype)
        parts: dict[str, Tensor] = {}
        if kind == "truncate":
            weights, below = ratio.clamp(max=high), torch.zeros_like(ratio)
            parts["train/mis_tis_truncate_fraction"] = above
        elif kind == "clip":
            weights = ratio.clamp(low, high)
            parts |= {"train/mis_tis_clip_fraction_low": below, "train/mis_tis_clip_fraction_high": above}
        elif kind == "mask":
            weights = ratio * (1.0 - below) * (1.0 - above)
            parts |= {"train/mis_tis_mask_fraction_low": below, "train/mis_tis_mask_fraction_high": above}
        else:
            weights, below, above = torch.ones_like(ratio), torch.zeros_like(ratio), torch.zeros_like(ratio)
        outside = ~sequences.mask
        metrics = {
            "train/tis": ratio,
            "train/tis_abs": (ratio - 1.0).abs(),
            "train/tis_clipfrac": below + above,
            **parts,
        }
        return weights.masked_fill(outside, 0.0), {name: values.masked_fill(outside, 0.0) for name, values in metrics.items()}


def normalization(sums: Tensor) -> float:
    """What weights are multiplied by so that their mean becomes 1: their number / their sum; 1 where that sum is 0.

    Args:
        sums: [2] sum of the weights and their number, added up over the micro-batches and ranks of the whole batch.
    """
    total, count = sums.tolist()
    return count / total if total > 0.0 else 1.0
