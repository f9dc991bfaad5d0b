"""Policy losses that hold the policy under training against the sampler itself: ratios pi / mu, whatever the proximal policy is.

What `streamrl.algorithms.policy_losses` says of shapes, types, gradients and letters holds here too. Their ratio counts a token's age, what
engine and trainer disagree in, and the steps of the batch at once, so no off-policy correction may be multiplied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from streamrl.algorithms.importance import ratio_of
from streamrl.algorithms.policy_losses import clip_metrics


def aipo(logprobs: Tensor, sampler_logprobs: Tensor, advantages: Tensor, *, cap: float) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE under a weight truncated from above: L = -sg(min(pi / mu, cap)) A log pi.

    arXiv 2505.24034. The ratio is the current policy's to the sampler's, anew at every step, so it corrects for age as well as for the
    steps of the batch, and no other correction may be multiplied. The weight is taken without gradient because the paper states the
    gradient, min(pi / mu, cap) A grad log pi: below the cap that is the gradient of -(pi / mu) A, and above it a token still counts,
    cap times, where the derivative of min(pi / mu, cap) would drop it. There is no bound below.

    Args:
        logprobs: log pi.
        sampler_logprobs: log mu.
        advantages: A.
        cap: upper bound of the weight.

    Returns:
        Loss, and metrics `train/pg_clipfrac` (1 where the ratio is above the cap), `train/ppo_kl` (log mu - log pi), `train/ois` (pi / mu).
    """
    log_ratio = (logprobs - sampler_logprobs).detach()
    ratio = ratio_of(log_ratio)
    return -ratio.clamp(max=cap) * advantages * logprobs, clip_metrics(log_ratio, ratio, ratio > cap)


def dppo(logprobs: Tensor, sampler_logprobs: Tensor, advantages: Tensor, *, bound: float, kl: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy gradient that leaves out tokens whose probability has gone far enough: L = -keep r A + kl (log r)^2, r = pi / mu.

    Divergence PPO's mask by binary total variation: keep = 0 where A > 0 and pi - mu > bound, or A < 0 and pi - mu < -bound, else 1. It
    compares probabilities, not their ratio: a rare token may become many times as likely, a frequent one may not move by more than the
    bound. A token that comes back towards mu is always kept. The quadratic term holds every token, left out or not, near the sampler.

    Args:
        logprobs: log pi.
        sampler_logprobs: log mu.
        advantages: A.
        bound: of |pi - mu|, between 0 and 1.
        kl: factor of the quadratic term.

    Returns:
        Loss, and metrics `train/pg_clipfrac` (1 where left out), `train/ppo_kl` (log mu - log pi), `train/ois` (r).
    """
    sampler = sampler_logprobs.detach()
    log_ratio = logprobs - sampler
    ratio = ratio_of(log_ratio)
    moved = logprobs.detach().exp() - sampler.exp()
    left_out = torch.where(advantages > 0, moved > bound, (advantages < 0) & (moved < -bound))
    surrogate = torch.where(left_out, 0.0, -ratio * advantages)
    return surrogate + kl * log_ratio.square(), clip_metrics(log_ratio, ratio, left_out)


def m2po(logprobs: Tensor, sampler_logprobs: Tensor, advantages: Tensor, chosen: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy gradient without the tokens that would take the second moment of the log-ratio over its bound: L = -keep r A, r = pi / mu.

    arXiv 2510.01161, equation 5. Nothing else is clipped. Which tokens are left out is decided over the whole optimizer step
    (`streamrl.algorithms.choices.second_moment`); they keep their place in the denominator, as in the paper.

    Args:
        logprobs: log pi.
        sampler_logprobs: log mu.
        advantages: A.
        chosen: bool, what is left out.

    Returns:
        Loss, and metrics `train/pg_clipfrac` (1 where left out), `train/ppo_kl` (log mu - log pi), `train/ois` (r).
    """
    log_ratio = logprobs - sampler_logprobs.detach()
    ratio = ratio_of(log_ratio)
    return torch.where(chosen, 0.0, -ratio * advantages), clip_metrics(log_ratio, ratio, chosen)
