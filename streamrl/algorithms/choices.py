"""What a loss decides over all trained tokens of an optimizer step at once, from arrays that every rank holds: no torch.

A micro-batch sees a part of a step, so it cannot say which of the step's tokens are the furthest. The trainer scores the step's tokens
before it, adds up what the ranks have of them, and asks here: micro-batches, packing, ranks and context parallelism change a choice by
rounding alone, and the same step gives the same choice. Letters: `T` tokens of the batch, `K` of them that are chosen among.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from streamrl.config.loss import LossConfig, policy_loss_of, policy_name
from streamrl.core.batches import TrainBatch
from streamrl.core.seeds import mix64, uniform

Array = npt.NDArray[np.floating]
Values = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class StepTokens(NamedTuple):
    """Trained tokens of an optimizer step whose numbers are finite, in the order of the batch; all [K]."""

    logprobs: Values
    """log pi before the step."""
    sampler: Values
    """log mu."""
    advantages: Values
    draws: Values
    """In [0, 1): random numbers of the batch's version, the step's place in it and the token's alone, so that a replay has them."""


class Choice(NamedTuple):
    """Of the tokens of an optimizer step."""

    chosen: Bools
    """[K]"""
    metrics: dict[str, float]


class Decision(NamedTuple):
    """Of an optimizer step."""

    chosen: Bools | None
    """[T] what its policy loss chose, False at tokens that were not asked about; None: it does not choose."""
    share: Values | None
    """[T] what a token's policy loss is multiplied by (`loss.top_entropy`); None: 1 everywhere."""
    metrics: dict[str, float]


def decides(loss: LossConfig) -> bool:
    """Whether something is decided over a whole optimizer step."""
    return policy_loss_of(loss).choice is not None or loss.top_entropy < 1.0


def decide(
    batch: TrainBatch, loss: LossConfig, weights: Values, usable: Bools, *, logprobs: Array, entropies: Array, advantages: Array, step: int
) -> Decision:
    """What the configuration's losses decide over one optimizer step.

    Args:
        batch: the whole batch.
        loss: the section.
        weights: [T] of the step, see `streamrl.algorithms.reductions`; the step's tokens are those above 0.
        usable: [T] False at tokens that are dropped; tokens with a number here that is not finite are not counted either.
        logprobs: [T] log pi before the step.
        entropies: [T] of that policy, in nats; read only where `loss.top_entropy` is below 1.
        advantages: [T]
        step: its place among the batch's.
    """
    among = (weights > 0) & usable & np.isfinite(logprobs) & np.isfinite(batch.sampler_logprobs) & np.isfinite(advantages)
    settings, metrics = policy_loss_of(loss).choice, dict[str, float]()
    chosen: Bools | None = None
    share: Values | None = None
    if settings is not None:
        seeds = np.full(int(among.sum()), mix64(mix64(batch.version.number) ^ step), np.uint64)
        arrays = (one[among].astype(np.float64) for one in (logprobs, batch.sampler_logprobs, advantages))
        tokens = StepTokens(*arrays, draws=uniform(seeds, np.flatnonzero(among)))
        found = CHOICES[policy_name(loss)](tokens, **{argument: getattr(loss, key) for argument, key in settings.items()})
        chosen = np.zeros(batch.num_tokens, np.bool_)
        chosen[among] = found.chosen
        metrics |= found.metrics
    if loss.top_entropy < 1.0:
        known = among & np.isfinite(entropies)
        kept = np.zeros(batch.num_tokens, np.bool_)
        kept[known], threshold = highest_entropies(entropies[known].astype(np.float64), loss.top_entropy)
        left = float(weights[kept].sum())
        share = kept * np.float64(weights.sum() / left if left > 0 else 1.0)
        metrics |= {"train/top_entropy_threshold": threshold, "train/top_entropy_fraction": float(kept.sum() / max(known.sum(), 1))}
    return Decision(chosen, share, metrics)


def highest_entropies(entropies: Values, fraction: float) -> tuple[Bools, float]:
    """Which tokens are among the given fraction of highest entropy, [K], and the least entropy among them (0 where K = 0).

    arXiv 2506.01939, equation 6: H >= tau, where tau is the ceil(fraction K)-th highest; of equal entropies all are in.

    Args:
        entropies: [K] in nats.
        fraction: above 0, at most 1.
    """
    if not len(entropies):
        return np.zeros(0, np.bool_), 0.0
    threshold = float(np.sort(entropies)[-math.ceil(fraction * len(entropies))])
    return entropies >= threshold, threshold


def second_moment(tokens: StepTokens, *, bound: float) -> Choice:
    """Which tokens M2PO leaves out: the furthest, until the mean of (log r)^2 over those that remain is at most the bound; r = pi / mu.

    arXiv 2510.01161, algorithm 1. Only tokens count that their advantage pushes further from the sampler, those that PPO would clip:
    A > 0 and r > 1, or A < 0 and r < 1. The furthest is left out first, of equally far ones that which comes later in the batch. Where even
    the nearest is beyond the bound, none of them remains.

    Args:
        tokens: of the step.
        bound: of the mean, in nats^2; 0.04 in the paper.

    Returns:
        What is left out, and the mean before (`train/m2`) and after (`train/m2_kept`); 0 without such tokens.
    """
    log_ratio = tokens.logprobs - tokens.sampler
    pushed = np.flatnonzero(log_ratio * np.sign(tokens.advantages) > 0)
    squares = np.square(log_ratio[pushed])
    order = np.argsort(squares, kind="stable")
    # Of the n nearest, [len(pushed)]: never falling, for each is at least as far as the mean of those before it.
    means = np.cumsum(squares[order]) / np.arange(1, len(order) + 1)
    kept = int(np.searchsorted(means, bound, side="right"))
    left_out = np.zeros(len(log_ratio), np.bool_)
    left_out[pushed[order[kept:]]] = True
    return Choice(left_out, {"train/m2": float(means[-1]) if len(means) else 0.0, "train/m2_kept": float(means[kept - 1]) if kept else 0.0})


def covariances(tokens: StepTokens) -> Values:
    """[K] (log pi - its mean) (A - its mean), whose mean is the covariance: arXiv 2505.22617, equation 10."""
    if not len(tokens.logprobs):
        return np.zeros(0)
    return (tokens.logprobs - tokens.logprobs.mean()) * (tokens.advantages - tokens.advantages.mean())


def clip_cov(tokens: StepTokens, *, fraction: float, low: float, high: float) -> Choice:
    """Which tokens Clip-Cov detaches: floor(fraction K), drawn evenly from those whose covariance is in [low, high].

    arXiv 2505.22617, equation 11. Where fewer are, all of them.

    Args:
        tokens: of the step.
        fraction: of all K tokens; 2e-4 in the paper.
        low: 1 in the paper, some hundred times the mean.
        high: 5 in the paper.

    Returns:
        What is detached, and `train/cov`, the mean of all covariances.
    """
    found = covariances(tokens)
    inside = np.flatnonzero((found >= low) & (found <= high))
    order = np.argsort(tokens.draws[inside], kind="stable")
    return _choice(found, inside[order[: math.floor(fraction * len(found))]])


def kl_cov(tokens: StepTokens, *, fraction: float) -> Choice:
    """Which tokens KL-Cov penalises: the floor(fraction K) of the highest covariance, of equal ones those that come first.

    arXiv 2505.22617, equation 13.

    Args:
        tokens: of the step.
        fraction: k; 2e-3 and 2e-4 in the paper.

    Returns:
        What is penalised, and `train/cov`, the mean of all covariances.
    """
    found = covariances(tokens)
    return _choice(found, np.argsort(-found, kind="stable")[: math.floor(fraction * len(found))])


def _choice(covariance: Values, places: npt.NDArray[np.int64]) -> Choice:
    chosen = np.zeros(len(covariance), np.bool_)
    chosen[places] = True
    return Choice(chosen, {"train/cov": float(covariance.mean()) if len(covariance) else 0.0})


CHOICES: Mapping[str, Callable[..., Choice]] = MappingProxyType({"m2po": second_moment, "clip_cov": clip_cov, "kl_cov": kl_cov})
"""By policy loss, see `streamrl.config.registry.PolicyLoss.choice`."""
