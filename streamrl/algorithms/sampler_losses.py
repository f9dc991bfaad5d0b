"""Policy losses that hold the policy under training against the sampler itself: ratios pi / mu, whatever the proximal policy is.

What `streamrl.algorithms.policy_losses` says of shapes, types, gradients and letters holds here too. Their ratio counts a token's age, what
engine and trainer disagree in, and the steps of the batch at once, so no off-policy correction may be multiplied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from streamrl.algorithms.divergences import Divergence, binary_divergence
from streamrl.algorithms.importance import ratio_of
from streamrl.algorithms.policy_losses import clip_metrics
from streamrl.algorithms.sequences import Sequences


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


def dppo(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    advantages: Tensor,
    apart: Tensor | None = None,
    *,
    bound: float,
    bound_low: float = 0.0,
    divergence: Divergence = "tv",
    symmetric: bool = False,
    kl: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy gradient that leaves out tokens whose distribution has gone far enough: L = -keep r A + kl (log r)^2, r = pi / mu.

    Divergence PPO, arXiv 2602.04879, equation 12: keep = 0 where D > bound and the advantage pushes on, A > 0 and r > 1 or A < 0 and r < 1;
    else 1. D is the divergence of two outcomes, the token and all others (equations 13 and 14): total variation |pi - mu|, or KL(mu || pi);
    or `apart`, that of the sampler's likeliest tokens one by one and all others. It compares probabilities, not their ratio: a rare token
    may become many times as likely, a frequent one may not move by more than the bound. A token that comes back towards mu is always kept,
    unless `symmetric`: then it counts alone how far a token has gone, for in asynchronous training its own advantage says little of where
    it went. The quadratic term, which is not the paper's, holds every token, left out or not, near the sampler.

    Args:
        logprobs: log pi.
        sampler_logprobs: log mu.
        advantages: A.
        apart: D, where that takes more than log pi and log mu (`streamrl.algorithms.divergences.candidate_divergence`).
        bound: of D where r > 1; with `tv` between 0 and 1, with `kl` in nats.
        bound_low: of D where r < 1; 0: `bound` there, too.
        divergence: which D.
        symmetric: leave out whatever has gone beyond its bound, whichever way its advantage pushes.
        kl: factor of the quadratic term.

    Returns:
        Loss, and metrics `train/pg_clipfrac` (1 where left out), `train/ppo_kl` (log mu - log pi), `train/ois` (r).
    """
    sampler = sampler_logprobs.detach()
    log_ratio = logprobs - sampler
    ratio = ratio_of(log_ratio)
    gone = binary_divergence(logprobs.detach(), sampler, divergence) if apart is None else apart
    rose, fell = log_ratio > 0, log_ratio < 0
    far = (rose & (gone > bound)) | (fell & (gone > (bound_low or bound)))
    left_out = far if symmetric else far & torch.where(rose, advantages > 0, advantages < 0)
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


def vespo(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    advantages: Tensor,
    sequences: Sequences,
    *,
    c1_positive: float,
    c2_positive: float,
    c1_negative: float,
    c2_negative: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE under a smooth weight of the whole sequence: L = -sg(phi(W)) A log pi, phi(W) = W^c1 exp(c2 (1 - W)).

    arXiv 2602.10693, equation 20; W = pi / mu of all the sequence's trained tokens together, their product, which no length divides.
    phi(1) = 1; it falls to 0 on both sides of c1 / c2, so that no sequence, however old, has a large gradient: c1 says how fast below and
    c2 how fast above.

    Args:
        logprobs: log pi.
        sampler_logprobs: log mu.
        advantages: A; each token's own sign says which c1 and c2 are its.
        sequences: whose tokens these are; outside its mask anything may stand, and the loss there is 0.
        c1_positive: above 0, where A > 0; 2 in the paper.
        c2_positive: above 0, where A > 0; 3 in the paper.
        c1_negative: above 0, elsewhere; 3 in the paper.
        c2_negative: above 0, elsewhere; 2 in the paper.

    Returns:
        Loss, and metrics `train/vespo_weight` (phi), `train/ppo_kl` (log mu - log pi), `train/ois` (W).
    """
    inside = logprobs.masked_fill(~sequences.mask, 0.0)
    log_ratio = (logprobs - sampler_logprobs).detach().masked_fill(~sequences.mask, 0.0)
    advantages = advantages.masked_fill(~sequences.mask, 0.0)
    log_whole = sequences.spread(sequences.sum(log_ratio))
    whole = ratio_of(log_whole)
    c1 = torch.full_like(whole, c1_negative).masked_fill(advantages > 0, c1_positive)
    c2 = torch.full_like(whole, c2_negative).masked_fill(advantages > 0, c2_positive)
    weight = (c1 * log_whole + c2 * (1.0 - whole)).exp()
    metrics = {"train/vespo_weight": weight, "train/ppo_kl": -log_ratio, "train/ois": whole}
    return -weight * advantages * inside, metrics
