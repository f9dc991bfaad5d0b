"""Per-token losses: pure functions of log-probs, [M] in, ([M] loss, per-token metrics) out.

`M` trained tokens; float32 or float64. Reduction is not theirs: `streamrl.core.reductions` gives the weights with which both
loss and metrics are summed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from streamrl.core.importance import MAX_LOG_RATIO, token_tis


def sft(logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood: L = -log pi."""
    return -logprobs, {}


def ppo_clip(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped policy gradient: L = max(-r A, -clamp(r, 1 - low, 1 + high) A), r = exp(log pi - log pi_old).

    arXiv 1707.06347; separate bounds: arXiv 2503.14476. With pi_old = pi (one optimizer step a batch) r is 1, nothing is
    clipped and the gradient is -A grad log pi. The log ratio is clamped to +-20 before exp.

    Args:
        logprobs: [M] log pi of the policy under training; carries the gradient.
        old_logprobs: [M] log pi_old, without gradient.
        advantages: [M].
        clip_low: how far r may fall below 1.
        clip_high: how far r may rise above 1.

    Returns:
        [M] loss, and per-token metrics `train/pg_clipfrac`, `train/ppo_kl` (log pi_old - log pi), `train/ois` (r).
    """
    log_ratio = logprobs - old_logprobs.detach()
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    free = -ratio * advantages
    clipped = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    metrics = {
        "train/pg_clipfrac": (clipped > free).to(ratio.dtype),
        "train/ppo_kl": -log_ratio.detach(),
        "train/ois": ratio.detach(),
    }
    return torch.maximum(free, clipped), metrics


def policy_gradient(
    logprobs: Tensor,
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    tis_cap: float,
    tis_floor: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Decoupled PPO: L = w max(-r A, -clamp(r) A) with w of `token_tis` and r of `ppo_clip` (arXiv 2505.24298).

    Returns:
        [M] loss and the metrics of both parts, with `train/pg_loss` (the loss, weights included).
    """
    surrogate, metrics = ppo_clip(logprobs, old_logprobs, advantages, clip_low=clip_low, clip_high=clip_high)
    weights, importance = token_tis(old_logprobs, sampler_logprobs, cap=tis_cap, floor=tis_floor)
    loss = weights * surrogate
    return loss, {"train/pg_loss": loss.detach(), **metrics, **importance}
