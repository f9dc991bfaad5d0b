"""What a loss decides over all trained tokens of an optimizer step at once, from arrays that every rank holds: no torch.

A micro-batch sees a part of a step, so it cannot say which of the step's tokens are the furthest. The trainer scores the step's tokens
before it, adds up what the ranks have of them, and asks here: micro-batches, packing, ranks and context parallelism change a choice by
rounding alone, and the same step gives the same choice. Letters: `T` tokens of the batch, `K` of them that are chosen among.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from streamrl.config.loss import LossConfig, policy_loss_of, policy_name
from streamrl.core.batches import TrainBatch

Values = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class Choice(NamedTuple):
    """Of the tokens of an optimizer step."""

    chosen: Bools
    """[K], or of a batch [T]; False at tokens that were not asked about."""
    metrics: dict[str, float]


def chooses(loss: LossConfig) -> bool:
    """Whether the policy loss decides over a whole optimizer step."""
    return policy_loss_of(loss).choice is not None


def choose(
    batch: TrainBatch, loss: LossConfig, among: Bools, *, logprobs: npt.NDArray[np.floating], advantages: npt.NDArray[np.floating]
) -> Choice:
    """The choice of the policy loss that the configuration names.

    Args:
        batch: the whole batch.
        loss: which loss, one that `chooses`, and its numbers.
        among: [T] trained tokens of the step; of them count those whose numbers are finite.
        logprobs: [T] log pi before the step.
        advantages: [T]
    """
    settings = policy_loss_of(loss).choice
    assert settings is not None
    among = among & np.isfinite(logprobs) & np.isfinite(batch.sampler_logprobs) & np.isfinite(advantages)
    values = (one[among].astype(np.float64) for one in (logprobs, batch.sampler_logprobs, advantages))
    found = CHOICES[policy_name(loss)](*values, **{argument: getattr(loss, key) for argument, key in settings.items()})
    chosen = np.zeros(batch.num_tokens, np.bool_)
    chosen[among] = found.chosen
    return Choice(chosen, found.metrics)


def second_moment(logprobs: Values, sampler_logprobs: Values, advantages: Values, *, bound: float) -> Choice:
    """Which tokens M2PO leaves out: the furthest, until the mean of (log r)^2 over those that remain is at most the bound; r = pi / mu.

    arXiv 2510.01161, algorithm 1. Only tokens count that their advantage pushes further from the sampler, those that PPO would clip:
    A > 0 and r > 1, or A < 0 and r < 1. The furthest is left out first, of equally far ones that which comes later in the batch. Where even
    the nearest is beyond the bound, none of them remains.

    Args:
        logprobs: [K] log pi.
        sampler_logprobs: [K] log mu.
        advantages: [K]
        bound: of the mean, in nats^2; 0.04 in the paper.

    Returns:
        What is left out, and the mean before (`train/m2`) and after (`train/m2_kept`); 0 without such tokens.
    """
    log_ratio = logprobs - sampler_logprobs
    pushed = np.flatnonzero(log_ratio * np.sign(advantages) > 0)
    squares = np.square(log_ratio[pushed])
    order = np.argsort(squares, kind="stable")
    # Of the n nearest, [len(pushed)]: never falling, for each is at least as far as the mean of those before it.
    means = np.cumsum(squares[order]) / np.arange(1, len(order) + 1)
    kept = int(np.searchsorted(means, bound, side="right"))
    left_out = np.zeros(len(logprobs), np.bool_)
    left_out[pushed[order[kept:]]] = True
    return Choice(left_out, {"train/m2": float(means[-1]) if len(means) else 0.0, "train/m2_kept": float(means[kept - 1]) if kept else 0.0})


CHOICES: Mapping[str, Callable[..., Choice]] = MappingProxyType({"m2po": second_moment})
"""By policy loss, see `streamrl.config.registry.PolicyLoss.choice`."""
