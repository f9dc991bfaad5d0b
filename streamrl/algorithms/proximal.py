"""The log-linear proximal policy: pi_proximal without a forward pass of its own."""

from __future__ import annotations

import torch
from torch import Tensor


def log_linear_proximal(logprobs: Tensor, sampler_logprobs: Tensor, staleness: Tensor, *, progress: float) -> Tensor:
    """Interpolation: log pi_prox = log mu + alpha (log pi - log mu), alpha = (v_prox - v_behave) / (v - v_behave), without gradient.

    The log-prob of a token is taken to move at a constant pace from the version that sampled it (v_behave) to the policy under training
    (v); the proximal policy lies between them at v_prox. Here v_prox is the version the batch is trained from, so v_prox - v_behave is the
    token's age, and after k of the batch's K optimizer steps the policy is at v = v_prox + k / K:

        alpha = age / (age + k / K).

    At the batch's first step the policy *is* pi_prox and alpha = 1 gives it exactly, for tokens of age 0 too, where the quotient is 0 / 0.
    Later, a token of age 0 was sampled by pi_prox itself: alpha = 0 and pi_prox = mu. Counting a batch as one version from its first step
    on (v_prox = v - 1, progress = 1) is the published form, alpha = age / (age + 1).

    Args:
        logprobs: log pi of the policy under training, any shape.
        sampler_logprobs: log mu, of that shape. Where either is not finite, neither is the result: drop these tokens.
        staleness: ages in versions, int >= 0, of that shape.
        progress: k / K, in [0, 1].
    """
    with torch.no_grad():
        age = staleness.to(logprobs.dtype)
        span = age + progress
        alpha = torch.where(span > 0.0, age / span, 1.0)
        return torch.lerp(sampler_logprobs, logprobs, alpha)
