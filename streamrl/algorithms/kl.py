"""How far the policy is from a reference, estimated at the sampled tokens.

Letters: pi the policy, pi_ref the reference, r = log pi - log pi_ref at a token that was drawn from pi. All tensors have one shape,
[M] packed or [N, L] padded, float32 or float64; each place is by itself.
"""

from __future__ import annotations

from torch import Tensor

from streamrl.algorithms.importance import ratio_of
from streamrl.config.loss import MAX_LOG_RATIO, KLEstimator

LOW_VAR_BOUND = 10.0


def kl_estimate(log_ratio: Tensor, estimator: KLEstimator) -> Tensor:
    """An estimate of KL(pi || pi_ref) from each token's r.

    k1 = r: unbiased, of either sign. k2 = r^2 / 2: biased, never negative. k3 = exp(-r) - 1 + r: unbiased and never negative
    (arXiv 2402.03300 uses it). low_var_kl = min(k3, 10), without gradient beyond. In exp(-r), r is taken as -20 where it is less:
    there k3 is constant. abs = |r|, which pulls equally from wherever the policy is. k1+ and k3+ have the value of k1 and k3 and the
    gradient of k2, whose mean at tokens of pi is the gradient of KL(pi || pi_ref); those of k1 and k3 are not (arXiv 2506.09477).

    Args:
        log_ratio: r.
        estimator: which.

    Returns:
        Of the same shape, in nats; differentiable in r.
    """
    match estimator:
        case "k1":
            return log_ratio
        case "k2":
            return log_ratio.square() / 2.0
        case "k3":
            return _k3(log_ratio)
        case "low_var_kl":
            return _k3(log_ratio).clamp(max=LOW_VAR_BOUND)
        case "abs":
            return log_ratio.abs()
        case "k1+":
            return _straight_through(log_ratio, log_ratio)
        case "k3+":
            return _straight_through(_k3(log_ratio), log_ratio)


def kl_loss(
    logprobs: Tensor, reference_logprobs: Tensor, old_logprobs: Tensor, *, estimator: KLEstimator, unbiased: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """The KL's own loss at each token: k(r), or (pi / pi_old) k(r).

    Differentiating k(r) at tokens of pi_old takes their distribution as given: for k1 the expected gradient is zero, for k3 it is that of
    the KL the other way round. With `unbiased` the ratio pi / pi_old, which carries a gradient too, makes the expected gradient
    of k1 and of k3 that of KL(pi || pi_ref) itself (arXiv 2512.02556). The log-ratio is clamped to +-20 before exp.

    Args:
        logprobs: log pi; carries the gradient.
        reference_logprobs: log pi_ref.
        old_logprobs: log pi_old, the policy before the batch's first step; read only with `unbiased`.
        estimator: which k.
        unbiased: multiply by the ratio.

    Returns:
        Loss of each token, not yet times its coefficient, and the metric `train/kl_loss` (the same without gradient).
    """
    loss = kl_estimate(logprobs - reference_logprobs.detach(), estimator)
    if unbiased:
        loss = loss * ratio_of(logprobs - old_logprobs.detach())
    return loss, {"train/kl_loss": loss.detach()}


def _straight_through(value: Tensor, log_ratio: Tensor) -> Tensor:
    slope = log_ratio.square() / 2.0
    return value.detach() + (slope - slope.detach())  # exactly the value


def _k3(log_ratio: Tensor) -> Tensor:
    # Bounded below only: exp(-r) overflows there. Above, it vanishes, and a bound would take away the gradient that brings pi back.
    bounded = log_ratio.clamp(min=-MAX_LOG_RATIO)
    return (-bounded).exp() - 1.0 + bounded
