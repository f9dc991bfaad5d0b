"""Losses and corrections of `streamrl.algorithms` in numpy, with the derivative by the log-prob written out: those of tokens by themselves.

For processes without torch; a test holds both to the same numbers. All arrays are [M] float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from streamrl.config.loss import MAX_LOG_RATIO, CorrectionConfig, policy_name
from streamrl.config.tree import LossConfig

Values = npt.NDArray[np.float64]


def sft(logprobs: Values) -> tuple[Values, Values, dict[str, Values]]:
    """L = -log pi: loss, its derivative -1, and no metrics."""
    return -logprobs, np.full_like(logprobs, -1.0), {}


def policy_gradient(
    logprobs: Values, proximal: Values, sampler: Values, advantages: Values, loss: LossConfig
) -> tuple[Values, Values, Values, dict[str, Values]]:
    """Policy loss (ppo or cispo) times the correction's weights; see `streamrl.algorithms`, `policy_losses` and `corrections`.

    Args:
        logprobs: log pi of the policy under training.
        proximal: log pi_proximal, as `loss.proximal` and `loss.correction.ratio` say.
        sampler: log mu.
        advantages: A.
        loss: the section `loss`.

    Returns:
        [M] loss, [M] derivative, [M] weights, per-token metrics under the same names.
    """
    value, slope, metrics = POLICY_LOSSES[policy_name(loss)](logprobs, proximal, advantages, loss)
    weights, found = importance_weights(proximal - sampler, loss.correction)
    own = proximal if loss.proximal == "recomputed" else logprobs
    distance = {"train/train_rollout_logprob_abs_diff": np.abs(own - sampler)}
    return weights * value, weights * slope, weights, {"train/pg_loss": weights * value, **metrics, **distance, **found}


def importance_weights(log_ratio: Values, config: CorrectionConfig) -> tuple[Values, dict[str, Values]]:
    """Bounded weights of tokens, see `streamrl.algorithms.importance.importance_weights`."""
    ratio = _exp(log_ratio)
    below, above = (ratio < config.low).astype(np.float64), (ratio > config.high).astype(np.float64)
    nothing = np.zeros_like(ratio)
    parts: dict[str, Values] = {}
    if config.kind == "truncate":
        weights, below = np.minimum(ratio, config.high), nothing
        parts["train/mis_tis_truncate_fraction"] = above
    elif config.kind == "clip":
        weights = np.clip(ratio, config.low, config.high)
        parts = {"train/mis_tis_clip_fraction_low": below, "train/mis_tis_clip_fraction_high": above}
    elif config.kind == "mask":
        weights = ratio * (1.0 - below) * (1.0 - above)
        parts = {"train/mis_tis_mask_fraction_low": below, "train/mis_tis_mask_fraction_high": above}
    else:
        weights, below, above = np.ones_like(ratio), nothing, nothing
    return weights, {
        "train/tis": ratio,
        "train/tis_abs": np.abs(ratio - 1.0),
        "train/tis_clipfrac": below + above,
        **parts,
        "train/rejected_fraction": below + above if config.kind == "mask" else nothing,
    }


def _ppo(logprobs: Values, proximal: Values, advantages: Values, loss: LossConfig) -> tuple[Values, Values, dict[str, Values]]:
    """L = max(-r A, -clamp(r) A); dL / d log pi is -r A where the unclipped term is the larger or equal one, else 0.

    The log ratio's own clamp to +-20 has derivative 0 outside.
    """
    log_ratio = logprobs - proximal
    ratio = _exp(log_ratio)
    free = -ratio * advantages
    clipped = -np.clip(ratio, 1.0 - loss.clip_low, 1.0 + loss.clip_high) * advantages
    slope = np.where((clipped > free) | (np.abs(log_ratio) > MAX_LOG_RATIO), 0.0, free)
    return np.maximum(free, clipped), slope, _metrics(log_ratio, ratio, clipped > free)


def _cispo(logprobs: Values, proximal: Values, advantages: Values, loss: LossConfig) -> tuple[Values, Values, dict[str, Values]]:
    """L = -sg(clamp(r)) A log pi; dL / d log pi is -clamp(r) A."""
    log_ratio = logprobs - proximal
    ratio = _exp(log_ratio)
    weight = np.clip(ratio, 1.0 - loss.clip_low, 1.0 + loss.clip_high)
    return -weight * advantages * logprobs, -weight * advantages, _metrics(log_ratio, ratio, weight != ratio)


def _exp(log_ratio: Values) -> Values:
    return np.exp(np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _metrics(log_ratio: Values, ratio: Values, clipped: npt.NDArray[np.bool_]) -> dict[str, Values]:
    return {"train/pg_clipfrac": clipped.astype(np.float64), "train/ppo_kl": -log_ratio, "train/ois": ratio}


POLICY_LOSSES: Mapping[str, Callable[[Values, Values, Values, LossConfig], tuple[Values, Values, dict[str, Values]]]] = MappingProxyType(
    {"ppo": _ppo, "cispo": _cispo}
)
"""The code of what `streamrl.config.registry.POLICY_LOSSES` says that this trainer has."""
