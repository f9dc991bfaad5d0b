"""How per-token values become one number: a weight per token, fixed before anything is computed.

A batch's loss is sum over its tokens of weight x value. Because the weights of the whole optimizer step are known
beforehand, the loss does not depend on how tokens are spread over micro-batches and ranks, nor on which of them a
correction zeroes later: partial sums simply add up.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from streamrl.core.batches import TrainBatch

Reduction = Literal["rollout_mean", "token_mean"]


def sample_of_token(batch: TrainBatch) -> npt.NDArray[np.int64]:
    """[T] index of the sample that each packed token belongs to."""
    return np.repeat(np.arange(batch.num_samples, dtype=np.int64), batch.lengths)


def token_weights(batch: TrainBatch, samples: npt.NDArray[np.int64], reduction: Reduction) -> npt.NDArray[np.float64]:
    """Weights of an optimizer step over `samples`: [T] float64, 0 outside the loss mask and outside `samples`.

    `rollout_mean`: mean over the trained tokens of each rollout (all samples of a rollout together), then over the
    rollouts of `samples`, those without any trained token included. `token_mean`: mean over all trained tokens.

    Args:
        batch: the whole batch.
        samples: [n] indices of the step's samples; a rollout's samples are all in it or all not.
        reduction: which mean.
    """
    owner_T = sample_of_token(batch)
    chosen = np.zeros(batch.num_samples, np.bool_)
    chosen[samples] = True
    mask_T = batch.loss_mask & chosen[owner_T]
    if reduction == "token_mean":
        return mask_T / np.float64(max(int(mask_T.sum()), 1))
    keys = np.stack([batch.tasks, batch.rollouts], axis=1)
    _, rollout_N = np.unique(keys, axis=0, return_inverse=True)
    rollout_N = rollout_N.reshape(-1)
    trained_R = np.bincount(rollout_N[owner_T], mask_T)
    num_rollouts = len(np.unique(rollout_N[samples]))
    return mask_T / (np.maximum(trained_R, 1.0)[rollout_N[owner_T]] * max(num_rollouts, 1))
