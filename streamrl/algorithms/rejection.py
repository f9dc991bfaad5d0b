"""Rejection: which tokens or whole samples are left out because the trainer's policy is too far from the one that sampled them.

The tokens come from mu, so what can be estimated from them is the divergence KL(mu || pi) of the trainer's policy. Bounds are inclusive.
Tensors are shaped as the tokens of their `Sequences`; nothing here carries a gradient.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from streamrl.algorithms.importance import ratio_of
from streamrl.algorithms.sequences import Sequences, mean

Measure = Literal["ratio", "k1", "k2", "k3"]
Level = Literal["token", "sequence_sum", "sequence_mean", "sequence_max"]


def divergence(log_ratio: Tensor, measure: Measure) -> Tensor:
    """A token's term: log rho itself for `ratio`, else an estimate of KL(mu || pi) at the token, with l = log rho = log pi - log mu.

    k1 = -l, k2 = l^2 / 2, k3 = exp(l) - 1 - l, where l is clamped to +-20 in exp only. k1 and k3 have KL(mu || pi) as their mean under
    mu; k2 and k3 are never negative.
    """
    if measure == "ratio":
        return log_ratio
    if measure == "k1":
        return -log_ratio
    if measure == "k2":
        return log_ratio.square() / 2.0
    return ratio_of(log_ratio) - 1.0 - log_ratio


def accept(
    log_ratio: Tensor, sequences: Sequences, *, measure: Measure, level: Level, low: float, high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Keep what is within the bounds: a token by its own measure, or all of a sample by the sum, mean or maximum over its trained tokens.

    Divergences are added up as they are. Ratios are aggregated as logarithms and compared after exp: sequence_sum is the product of the
    ratios, sequence_mean their geometric mean, sequence_max the greatest.

    Args:
        log_ratio: log pi - log mu; what stands outside the mask is never read.
        sequences: which tokens are trained, and of which sample.
        measure: what is compared.
        level: of what.
        low: kept where at least this (`ratio` and `k1`; k2 and k3 have no lower bound).
        high: kept where at most this.

    Returns:
        Bool, false outside the mask, and per-token metrics `train/mis_rs_mask_fraction_low` and `train/mis_rs_mask_fraction_high`.
    """
    with torch.no_grad():
        mask = sequences.mask
        found = divergence(log_ratio, measure)
        if level == "sequence_sum":
            found = sequences.spread(sequences.sum(found))
        elif level == "sequence_mean":
            found = sequences.spread(mean(sequences, found))
        elif level == "sequence_max":
            found = sequences.spread(sequences.max(found))
        if measure == "ratio":
            found = ratio_of(found)
        below = mask & (found < low) if measure in ("ratio", "k1") else torch.zeros_like(mask)
        above = mask & (found > high)
        return mask & ~below & ~above, {
            "train/mis_rs_mask_fraction_low": below.to(log_ratio.dtype),
            "train/mis_rs_mask_fraction_high": above.to(log_ratio.dtype),
        }


def veto(log_ratio: Tensor, sequences: Sequences, *, least: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Reject whole samples in which any trained token's ratio is below `least`: such a token was all but impossible under pi.

    Returns:
        Bool, false outside the mask, and per-token metrics `train/mis_rs_catastrophic_token_fraction` (the tokens below `least`) and
        `train/mis_rs_catastrophic_seq_fraction` (all tokens of their samples).
    """
    with torch.no_grad():
        mask = sequences.mask
        low = (mask & (ratio_of(log_ratio) < least)).to(log_ratio.dtype)
        vetoed = mask & (sequences.spread(sequences.max(low)) > 0.0)
        return mask & ~vetoed, {
            "train/mis_rs_catastrophic_token_fraction": low,
            "train/mis_rs_catastrophic_seq_fraction": vetoed.to(log_ratio.dtype),
        }
