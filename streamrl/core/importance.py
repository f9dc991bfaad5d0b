"""Importance weights: what corrects for tokens that an older policy, or another implementation of it, sampled.

Letters: `M` trained tokens. Log-probs are natural logarithms, all [M] float32 or float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0


def token_tis(old_logprobs: Tensor, sampler_logprobs: Tensor, *, cap: float, floor: float = 0.0) -> tuple[Tensor, dict[str, Tensor]]:
    """Token-level truncated importance sampling: w = clamp(exp(log pi_old - log mu), floor, cap), without gradient.

    mu is the policy that sampled the token, pi_old the trainer's at the batch's first optimizer step (arXiv 2505.24298
    for the split into w and a PPO ratio; arXiv 1802.01561 for truncation). The log ratio is clamped to +-20 before exp.

    Args:
        old_logprobs: [M] log pi_old.
        sampler_logprobs: [M] log mu.
        cap: upper bound of w; 0 switches the correction off (w = 1, metrics as if it were on and never clamped).
        floor: lower bound of w.

    Returns:
        [M] weights, and per-token metrics: `train/tis` (the ratio before clamping), `train/tis_abs` (its distance from
        1), `train/tis_clipfrac`, `train/train_rollout_logprob_abs_diff`.
    """
    with torch.no_grad():
        difference = old_logprobs - sampler_logprobs
        ratio = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        weights = ratio.clamp(floor, cap)
        clipped = (weights != ratio).to(ratio.dtype)
        if cap == 0:
            weights, clipped = torch.ones_like(ratio), torch.zeros_like(ratio)
    return weights, {
        "train/tis": ratio,
        "train/tis_abs": (ratio - 1).abs(),
        "train/tis_clipfrac": clipped,
        "train/train_rollout_logprob_abs_diff": difference.abs(),
    }
