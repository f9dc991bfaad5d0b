"""How much the distance from the reference counts in a batch: constant, falling, or adapted to what was measured. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping

from msgspec.structs import replace

from streamrl.config.loss import KLConfig, LossConfig

LEAST, MOST = 1e-6, 1e6
"""Of the factor that is adapted."""
REACH = 0.2
"""How far the relative error is clipped (arXiv 1909.08593)."""


def with_factor(loss: LossConfig, factor: float) -> LossConfig:
    """The section with both coefficients of its KL times `factor`."""
    if factor == 1.0:
        return loss
    kl = replace(loss.kl, loss_coef=loss.kl.loss_coef * factor, reward_coef=loss.kl.reward_coef * factor)
    return replace(loss, kl=kl)


def decayed(kl: KLConfig, step: int) -> float:
    """What is left of the coefficient in one batch: falls in equal parts from 1 to `final_fraction` at `decay_steps`, and stays there.

    Args:
        kl: the section.
        step: batches of reinforcement learning before it.
    """
    if not kl.decay_steps:
        return 1.0
    return 1.0 - (1.0 - kl.final_fraction) * min(step / kl.decay_steps, 1.0)


def adapted(kl: KLConfig, factor: float, measured: float) -> float:
    """The factor of the next batch: times 1 + gain clip((KL - target) / target, -0.2, 0.2); arXiv 1909.08593, section 2.2.

    It stays within 1e-6 and 1e6, and as it is where the KL is not finite.

    Args:
        kl: the section; with target = 0 the factor is 1.
        factor: of this batch.
        measured: mean of this batch's estimate of the KL, in nats a token.
    """
    if not kl.target:
        return 1.0
    if not math.isfinite(measured):
        return factor
    error = min(max(measured / kl.target - 1.0, -REACH), REACH)
    return min(max(factor * (1.0 + kl.gain * error), LEAST), MOST)


def measured_kl(kl: KLConfig, metrics: Mapping[str, float], total: float) -> float:
    """The estimate that the coefficient multiplies, in nats a token, from a batch's metrics; NaN where there is none.

    Args:
        kl: the section.
        metrics: of the batch; `train/kl_loss` is a sum over tokens with the weights of the reduction.
        total: sum of these weights: 1, but for `constant_length` and for rollouts without a trained token.
    """
    if kl.reward_coef > 0:
        return metrics.get("rollout/kl", math.nan)
    return metrics.get("train/kl_loss", math.nan) / total if total > 0 else math.nan


def coefficient(loss: LossConfig) -> dict[str, float]:
    """The metric `train/kl_coef`, where there is a KL and its coefficient is not constant."""
    if not loss.kl.varies:
        return {}
    return {"train/kl_coef": loss.kl.reward_coef or loss.kl.loss_coef}
