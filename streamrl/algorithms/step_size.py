"""How far an optimizer step may go by what its importance weights are worth: VCPO's rate (arXiv 2602.17616). No torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from streamrl.algorithms.batch_metrics import effective_fraction
from streamrl.algorithms.groups import rollout_of_sample
from streamrl.config.tree import OptimizerConfig
from streamrl.core.batches import TrainBatch, sample_of_token


def rollout_log_ratios(
    batch: TrainBatch, logprobs: npt.NDArray[np.floating], rollout_N: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """[R] log of pi / mu of whole rollouts, the sum over the trained tokens of all their samples, and [R] whether there is such a token.

    Tokens with a log-prob that is not finite are left out.

    Args:
        batch: of sampled tokens.
        logprobs: [T] log pi; only those of trained tokens are read.
        rollout_N: `groups.rollout_of_sample`.
    """
    kept_T = batch.loss_mask & np.isfinite(logprobs) & np.isfinite(batch.sampler_logprobs)
    owner_M, rollouts = rollout_N[sample_of_token(batch)[kept_T]], int(rollout_N.max()) + 1
    log_ratio_M = logprobs[kept_T].astype(np.float64) - batch.sampler_logprobs[kept_T].astype(np.float64)
    return np.bincount(owner_M, log_ratio_M, rollouts).astype(np.float64), np.bincount(owner_M, minlength=rollouts) > 0


def rollout_ess(batch: TrainBatch, logprobs: npt.NDArray[np.floating], samples: npt.NDArray[np.int64]) -> float:
    """Effective sample size of the rollouts of an optimizer step over their number, (sum w)^2 / (B sum w^2), in [0, 1].

    w is the product of pi / mu over a rollout's trained tokens before any bound, as in arXiv 2602.17616. Rollouts without a trained token
    do not count; where there are none at all it is 0.

    Args:
        batch: the whole batch.
        logprobs: [T] log pi at that step; only those of the trained tokens of `samples` are read.
        samples: [n] indices of the step's samples; a rollout's samples are all in it or all not.
    """
    rollout_N = rollout_of_sample(batch.tasks, batch.rollouts)
    log_ratio_R, held_R = rollout_log_ratios(batch, logprobs, rollout_N)
    chosen_R = np.zeros(len(log_ratio_R), np.bool_)
    chosen_R[rollout_N[samples]] = True
    found = log_ratio_R[chosen_R & held_R]
    return effective_fraction(np.exp(found - found.max())) if len(found) else 0.0


def scaled_rate(rate: float, ess: float, config: OptimizerConfig) -> float:
    """The rate of a step whose effective fraction is `ess`: rate x min(1, ess / ess_reference), of `sqrt` the root of that factor.

    The root is for optimizers that divide by the gradient's size, as AdamW does; without scaling it is the rate itself.
    """
    if config.ess_scaling == "off":
        return rate
    factor = min(1.0, ess / config.ess_reference)
    return rate * (factor if config.ess_scaling == "linear" else factor**0.5)
