"""The losses of `streamrl.core.losses` in numpy, with their derivative by the log-prob written out.

For processes without torch; a test holds both to the same numbers. All arrays are [M] float64.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from streamrl.config.tree import LossConfig

Values = npt.NDArray[np.float64]
MAX_LOG_RATIO = 20.0


def sft(logprobs: Values) -> tuple[Values, Values, dict[str, Values]]:
    """L = -log pi: loss, its derivative -1, and no metrics."""
    return -logprobs, np.full_like(logprobs, -1.0), {}


def policy_gradient(
    logprobs: Values, old_logprobs: Values, sampler_logprobs: Values, advantages: Values, loss: LossConfig
) -> tuple[Values, Values, dict[str, Values]]:
    """L = w max(-r A, -clamp(r) A), see `streamrl.core.losses.policy_gradient`.

    dL / d log pi is -w r A where the unclipped term is the larger or equal one, else 0; the log ratio's own clamp to +-20
    has derivative 0 outside.

    Returns:
        [M] loss, [M] derivative, per-token metrics under the same names.
    """
    log_ratio = logprobs - old_logprobs
    ratio = np.exp(np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    free = -ratio * advantages
    clipped = -np.clip(ratio, 1.0 - loss.clip_low, 1.0 + loss.clip_high) * advantages
    slope = np.where((clipped > free) | (np.abs(log_ratio) > MAX_LOG_RATIO), 0.0, free)

    difference = old_logprobs - sampler_logprobs
    importance = np.exp(np.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    weights = np.clip(importance, loss.tis_floor, loss.tis_cap) if loss.tis_cap else np.ones_like(importance)
    value = weights * np.maximum(free, clipped)
    return (
        value,
        weights * slope,
        {
            "train/pg_loss": value,
            "train/pg_clipfrac": (clipped > free).astype(np.float64),
            "train/ppo_kl": -log_ratio,
            "train/ois": ratio,
            "train/tis": importance,
            "train/tis_abs": np.abs(importance - 1.0),
            "train/tis_clipfrac": (weights != importance).astype(np.float64) if loss.tis_cap else np.zeros_like(importance),
            "train/train_rollout_logprob_abs_diff": np.abs(difference),
        },
    )
