"""Rewards of tokens: the sample's at its last trained token, less what each token departs from a reference. Without torch, in float64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from streamrl.algorithms.log_ratios import MAX_LOG_RATIO
from streamrl.config.loss import KLEstimator

Floats = npt.NDArray[np.float64]

MAX_LOW_VAR_KL = 10.0


def token_kl(log_ratio: Floats, estimator: KLEstimator) -> Floats:
    """Estimates of KL(pi || reference) from tokens that pi sampled (J. Schulman, "Approximating KL Divergence").

    With r = log pi - log reference: k1 = r, k2 = r^2 / 2, k3 = exp(-r) - 1 + r (never negative), low_var_kl = min(k3, 10). The last two
    take r as -20 where it is less.

    Args:
        log_ratio: r, any shape.
        estimator: which.
    """
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return np.square(log_ratio) / 2
    r = np.maximum(log_ratio, -MAX_LOG_RATIO)
    k3 = np.expm1(-r) + r
    return np.minimum(k3, MAX_LOW_VAR_KL) if estimator == "low_var_kl" else k3


def token_rewards(
    rewards: Floats,
    offsets: npt.NDArray[np.int64],
    loss_mask: npt.NDArray[np.bool_],
    *,
    kl: Floats | None,
    kl_coef: float,
) -> Floats:
    """[T] r_t = -kl_coef KL_t at trained tokens, plus the sample's reward at its last one; 0 elsewhere.

    A sample without a trained token has nowhere to put its reward.

    Args:
        rewards: [N]
        offsets: [N + 1]
        loss_mask: [T]
        kl: [T], read at trained tokens; None: no penalty.
        kl_coef: the penalty's coefficient.
    """
    found = np.zeros(len(loss_mask))
    if kl is not None:
        found[loss_mask] = -kl_coef * kl[loss_mask]
    trained = np.flatnonzero(loss_mask)
    owner = np.searchsorted(offsets, trained, side="right") - 1
    last = np.ones(len(trained), np.bool_)
    last[:-1] = owner[1:] != owner[:-1]
    found[trained[last]] += rewards[owner[last]]
    return found
