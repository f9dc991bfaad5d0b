"""Losses of tokens: what a token's log-prob, an anchor's and its advantage make of a gradient; and those of demonstrations and critics.

Each function takes tensors of one shape, [M] packed or [N, L] padded, float32 or float64, and gives `(loss, metrics)` of that shape:
the loss of each token, which carries the gradient, and per-token metrics, which do not. Reduction is not theirs:
`streamrl.algorithms.reductions` gives the weights with which both are summed. Only `logprobs` gets a gradient; anchors are detached here.

Letters: pi the policy under training, pi_old the policy before the batch's first step, mu the policy that sampled, A the advantage,
r a ratio, sg(x) the value of x without its gradient. Log-ratios are clamped to +-20 before exp, so beyond that r is constant.
What has no sequence in it works place by place: a place that holds NaN spoils itself and no other, and whoever passes the padded form
fills what stands outside the mask (`streamrl.algorithms.policy.policy_loss` does).
"""

from __future__ import annotations

import torch
from torch import Tensor

from streamrl.algorithms.importance import ratio_of
from streamrl.algorithms.sequences import Sequences, mean


def ppo_clip(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped policy gradient: L = max(-r A, -clamp(r, 1 - low, 1 + high) A), r = pi / pi_old.

    arXiv 1707.06347; separate bounds: arXiv 2503.14476. With dual_clip = c, tokens of negative advantage have L = min(L, -c A)
    (arXiv 1912.09729), which bounds what one token far above pi_old can do. At r = 1 the gradient is -A grad log pi. Where a clipped
    term is chosen there is no gradient. Times the weight of an off-policy correction this is decoupled PPO (arXiv 2505.24298).

    Args:
        logprobs: log pi.
        old_logprobs: log pi_old.
        advantages: A.
        clip_low: how far r may fall below 1.
        clip_high: how far r may rise above 1.
        dual_clip: c > 1; 0: off.

    Returns:
        Loss, and metrics `train/pg_clipfrac` (1 where the clipped term is the larger), `train/ppo_kl` (log pi_old - log pi),
        `train/ois` (r) and, with dual_clip, `train/pg_dual_clipfrac` (1 where -c A took the place of the loss).
    """
    log_ratio = logprobs - old_logprobs.detach()
    ratio = ratio_of(log_ratio)
    free = -ratio * advantages
    bounded = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    # Not torch.maximum: it would halve the gradient between the two where they are equal.
    loss = torch.where(bounded > free, bounded, free)
    metrics = clip_metrics(log_ratio, ratio, bounded > free)
    if dual_clip:
        ceiling = -dual_clip * advantages
        over = (advantages < 0) & (ceiling < loss)
        loss = torch.where(over, ceiling, loss)
        metrics["train/pg_dual_clipfrac"] = over.to(ratio.dtype)
    return loss, metrics


def gspo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sequences: Sequences, *, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """`ppo_clip` with one ratio a sequence: r = exp(mean over its trained tokens of log pi - log pi_old), at each of its tokens.

    arXiv 2507.18071. The gradient goes through the mean: each token's log-prob gets the mean of what the sequence's tokens send back.
    The bounds are narrower than PPO's, for a mean varies less: 3e-4 and 4e-4 in the paper.

    Args:
        logprobs: log pi.
        old_logprobs: log pi_old.
        advantages: A.
        sequences: whose tokens these are; outside its mask anything may stand, and the loss there is 0.
        clip_low: how far r may fall below 1.
        clip_high: how far r may rise above 1.

    Returns:
        Loss and metrics as in `ppo_clip`, of the sequence's ratio.
    """
    log_ratio = sequences.spread(mean(sequences, logprobs - old_logprobs.detach()))
    inside = advantages.masked_fill(~sequences.mask, 0.0)
    return ppo_clip(log_ratio, torch.zeros_like(log_ratio), inside, clip_low=clip_low, clip_high=clip_high)


def gspo_token(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sequences: Sequences, *, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """`gspo` whose gradient is each token's own: r_t = sg(s) pi_t / sg(pi_t), where s is the sequence's ratio.

    arXiv 2507.18071, GSPO-token. Its value is gspo's, and where all advantages of a sequence are equal so is its gradient under a mean over
    the sequence's tokens. Where they differ from token to token, as a critic's do, each acts on its own token.

    Args:
        logprobs: log pi.
        old_logprobs: log pi_old.
        advantages: A.
        sequences: whose tokens these are; outside its mask anything may stand, and the loss there is 0.
        clip_low: how far s may fall below 1.
        clip_high: how far s may rise above 1.

    Returns:
        Loss and metrics as in `gspo`.
    """
    inside = logprobs.masked_fill(~sequences.mask, 0.0)
    ratio = sequences.spread(mean(sequences, (logprobs - old_logprobs).detach()))
    advantages = advantages.masked_fill(~sequences.mask, 0.0)
    return ppo_clip(ratio + inside - inside.detach(), torch.zeros_like(ratio), advantages, clip_low=clip_low, clip_high=clip_high)


def gmpo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sequences: Sequences, *, log_low: float, log_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Geometric mean of clipped ratios: L = -exp(mean over the sequence's tokens of l_t) A, with l_t = log r_t clipped on one side.

    arXiv 2507.20673: l_t = min(log r_t, log_high) where A > 0, max(log r_t, -log_low) where A < 0. Each token is clipped before
    the mean, so that one far token does not take the gradient from the others, as a clip of GSPO's mean does.

    Args:
        logprobs: log pi.
        old_logprobs: log pi_old.
        advantages: A; of a token's own sign goes its clip.
        sequences: whose tokens these are; outside its mask anything may stand, and the loss there is 0.
        log_low: above 0.
        log_high: above 0; both are 0.4 in the paper.

    Returns:
        Loss, and metrics `train/pg_clipfrac` (1 where l_t is not log r_t), `train/ppo_kl` (log pi_old - log pi), `train/ois` (r_t).
    """
    log_ratio = (logprobs - old_logprobs.detach()).masked_fill(~sequences.mask, 0.0)
    advantages = advantages.masked_fill(~sequences.mask, 0.0)
    over = ((advantages > 0) & (log_ratio > log_high)) | ((advantages < 0) & (log_ratio < -log_low))
    bounded = torch.where(over, log_ratio.detach().clamp(-log_low, log_high), log_ratio)
    loss = -ratio_of(sequences.spread(mean(sequences, bounded))) * advantages
    return loss, clip_metrics(log_ratio, ratio_of(log_ratio), over)


def cispo(
    logprobs: Tensor, anchor_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE under a clipped importance weight: L = -sg(clamp(r, 1 - low, 1 + high)) A log pi, r = pi / pi_anchor.

    arXiv 2506.13585. Every token keeps a gradient, clipped or not. Usual bounds are 1 (none below) and about 4.

    Args:
        logprobs: log pi.
        anchor_logprobs: log pi_anchor: pi_old, or mu, and then no off-policy correction may be multiplied too.
        advantages: A.
        clip_low: how far r may fall below 1.
        clip_high: how far r may rise above 1.

    Returns:
        Loss, and metrics `train/pg_clipfrac` (1 where the weight is not r), `train/ppo_kl` and `train/ois` as in `ppo_clip`.
    """
    log_ratio = (logprobs - anchor_logprobs).detach()
    ratio = ratio_of(log_ratio)
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -weight * advantages * logprobs, clip_metrics(log_ratio, ratio, weight != ratio)


def clip_cov(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, chosen: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """`ppo_clip` without some tokens whose log-prob and advantage are high together, which use up the entropy: L = 0 where chosen.

    arXiv 2505.22617, equation 12, over PPO's clip as in its listing. Which tokens are chosen is decided over the whole optimizer step
    (`streamrl.algorithms.choices.clip_cov`); they keep their place in the denominator.

    Args:
        logprobs: log pi.
        old_logprobs: log pi_old.
        advantages: A.
        chosen: bool, what is detached.
        clip_low: how far r may fall below 1.
        clip_high: how far r may rise above 1.

    Returns:
        Loss and metrics as in `ppo_clip`, and `train/cov_fraction` (1 where chosen).
    """
    loss, metrics = ppo_clip(logprobs, old_logprobs, advantages, clip_low=clip_low, clip_high=clip_high)
    return torch.where(chosen, 0.0, loss), {**metrics, "train/cov_fraction": chosen.to(loss.dtype)}


def kl_cov(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, chosen: Tensor, *, coef: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy gradient with a penalty on the tokens whose log-prob and advantage are highest together: L = -r A + chosen coef |log r|.

    arXiv 2505.22617, equation 14, with r = pi / pi_old and |log r| for KL(pi_old || pi) as in its listing; nothing is clipped. Which
    tokens are penalised is decided over the whole optimizer step (`streamrl.algorithms.choices.kl_cov`). Where a token has not moved
    the penalty has no gradient, so without steps between pi_old and pi it does nothing.

    Args:
        logprobs: log pi.
        old_logprobs: log pi_old.
        advantages: A.
        chosen: bool, what is penalised.
        coef: beta; 1 in the paper.

    Returns:
        Loss, and metrics `train/pg_clipfrac` (0), `train/ppo_kl` (log pi_old - log pi), `train/ois` (r), `train/cov_fraction` (1 where
        chosen).
    """
    log_ratio = logprobs - old_logprobs.detach()
    ratio = ratio_of(log_ratio)
    metrics = clip_metrics(log_ratio, ratio, torch.zeros_like(chosen))
    loss = -ratio * advantages + torch.where(chosen, coef * log_ratio.abs(), 0.0)
    return loss, {**metrics, "train/cov_fraction": chosen.to(loss.dtype)}


def sapo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, tau_positive: float, tau_negative: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """A soft gate in place of the clip: L = -(4 / tau) sigmoid(tau (r - 1)) A, r = pi / pi_old.

    arXiv 2511.20347; tau is tau_positive where A > 0 and tau_negative elsewhere. The gradient is -w r A grad log pi with
    w = 4 s (1 - s), s = sigmoid(tau (r - 1)): 1 at r = 1, and falling to 0 on both sides, the faster the greater tau. The loss itself is
    -2 A / tau at r = 1: its level says nothing, its slope does.

    Args:
        logprobs: log pi.
        old_logprobs: log pi_old.
        advantages: A.
        tau_positive: above 0.
        tau_negative: above 0.

    Returns:
        Loss, and metrics `train/ppo_kl` and `train/ois` as in `ppo_clip`, `train/sapo_gate` (w).
    """
    log_ratio = logprobs - old_logprobs.detach()
    ratio = ratio_of(log_ratio)
    tau = torch.full_like(ratio, tau_negative).masked_fill(advantages > 0, tau_positive)
    gate = torch.sigmoid(tau * (ratio - 1.0))
    metrics = {
        "train/ppo_kl": -log_ratio.detach(),
        "train/ois": ratio.detach(),
        "train/sapo_gate": (4.0 * gate * (1.0 - gate)).detach(),
    }
    return -(4.0 / tau) * gate * advantages, metrics


def opsm_keep(
    logprobs: Tensor, sampler_logprobs: Tensor, advantages: Tensor, sequences: Sequences, *, delta: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Which tokens to keep: not those with A < 0 in a sequence whose mean of log mu - log pi is above delta.

    arXiv 2512.02556, equation 9, whose pi_old is the probability that the sampler itself gave: a sample's age, and what engine and trainer
    disagree in, count as well as the batch's own steps. What a policy would no longer say teaches it little by being bad, and its ratios
    are the wildest. Samples of positive advantage are always kept. Tokens that are left out keep their place in the denominators: multiply
    the loss by the result.

    Args:
        logprobs: log pi.
        sampler_logprobs: log mu.
        advantages: A.
        sequences: whose tokens these are; what stands outside its mask is not read, and is kept.
        delta: in nats a token.

    Returns:
        0 or 1 for each token, without gradient, and the metric `train/opsm_clipfrac` (1 where left out).
    """
    gone = sequences.spread(mean(sequences, (sampler_logprobs - logprobs).detach())) > delta
    left_out = (sequences.mask & gone & (advantages < 0)).to(logprobs.dtype)
    return 1.0 - left_out, {"train/opsm_clipfrac": left_out}


def sft(logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood: L = -log pi.

    Args:
        logprobs: log pi.

    Returns:
        Loss, and no metrics.
    """
    return -logprobs, {}


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float, huber: float = 0.0) -> tuple[Tensor, dict[str, Tensor]]:
    """Squared error, which stops pulling once a value has moved far: L = max((V - R)^2, (clamp(V, V_old - clip, V_old + clip) - R)^2).

    arXiv 1707.06347's clipping for values. A value more than `clip` from V_old on R's side has no gradient, for the second term is the
    larger; on the other side it has. There is no factor 1/2.

    Args:
        values: V of the critic under training; carries the gradient.
        old_values: V before the batch's first step.
        returns: R.
        clip: in units of the reward; 0: off, L = (V - R)^2.
        huber: d, in units of the reward: beyond |e| = d an error's square is replaced by d (2 |e| - d), which has the slope of the square
            there and keeps it (P. J. Huber 1964); 0: off.

    Returns:
        Loss of each token, and the metric `train/value_clipfrac` (1 where the clipped term is the larger).
    """
    free = _squared(values - returns, huber)
    if not clip:
        return free, {"train/value_clipfrac": torch.zeros_like(free)}
    old = old_values.detach()
    # Not old + clamp(values - old): that rounds where nothing is clipped, and rounding would count as clipping.
    bounded = _squared(values.clamp(old - clip, old + clip) - returns, huber)
    return torch.where(bounded > free, bounded, free), {"train/value_clipfrac": (bounded > free).to(free.dtype)}


def _squared(errors: Tensor, huber: float) -> Tensor:
    size = errors.abs()
    return torch.where(size > huber, huber * (2.0 * size - huber), errors.square()) if huber else errors.square()


def clip_metrics(log_ratio: Tensor, ratio: Tensor, clipped: Tensor) -> dict[str, Tensor]:
    """What every loss of a clipped ratio measures, [M] or [N, L] as its tokens, without gradient."""
    return {"train/pg_clipfrac": clipped.to(ratio.dtype), "train/ppo_kl": -log_ratio.detach(), "train/ois": ratio.detach()}
