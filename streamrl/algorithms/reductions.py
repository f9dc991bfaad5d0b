"""How per-token values become one number: a weight per token, fixed before anything is computed.

A batch's loss is sum over its tokens of weight x value. Because the weights of the whole optimizer step are known
beforehand, the loss does not depend on how tokens are spread over micro-batches, rows, ranks and context-parallel shards, nor on
which of them a correction zeroes later: partial sums simply add up.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from streamrl.algorithms.groups import rollout_of_sample
from streamrl.config.loss import Reduction
from streamrl.core.batches import TrainBatch, sample_of_token
from streamrl.errors import TrainingError


def token_weights(
    batch: TrainBatch, samples: npt.NDArray[np.int64], reduction: Reduction, *, constant_length: int = 0, legacy_samples: int = 0
) -> npt.NDArray[np.float64]:
    """Weights of an optimizer step over `samples`: [T] float64, 0 outside the loss mask and outside `samples`.

    - `rollout_mean`: mean over the trained tokens of each rollout (all samples of a rollout together), then over the rollouts of
      `samples` (the sample-level loss of arXiv 2402.03300, with every rollout counted once).
    - `token_mean`: mean over all trained tokens (arXiv 2503.14476).
    - `sequence_mean`: mean over the trained tokens of each sample, then over `samples`.
    - `prompt_mean`: mean over the trained tokens of each task (all its rollouts together), then over the tasks of `samples`: a long answer
      weighs more beside the others of its task, a task with long answers no more than another.
    - `token_mean_legacy`: mean over the trained tokens of `legacy_samples` samples at a time, in the order of `samples`, then over these
      parts, the last of which may be smaller: what comes out where each micro-batch of that size takes the mean of its own tokens.
    - `constant_length`: sum over the trained tokens of each rollout / constant_length, then mean over the rollouts of `samples`: a long
      answer is not weakened by its length (Dr.GRPO, arXiv 2503.20783).

    Rollouts, samples and parts without any trained token count in the means over them.

    Args:
        batch: the whole batch.
        samples: [n] indices of the step's samples; a rollout's samples are all in it or all not.
        reduction: which mean.
        constant_length: tokens, for the reduction of that name.
        legacy_samples: of a part, for `token_mean_legacy`.

    Raises:
        TrainingError: `constant_length` or `legacy_samples` is missing where it is needed.
    """
    owner_T = sample_of_token(batch)
    chosen = np.zeros(batch.num_samples, np.bool_)
    chosen[samples] = True
    mask_T = batch.loss_mask & chosen[owner_T]
    if reduction == "token_mean":
        return mask_T / np.float64(max(int(mask_T.sum()), 1))
    if reduction == "sequence_mean":
        trained_N = np.bincount(owner_T, mask_T, batch.num_samples)
        return mask_T / (np.maximum(trained_N, 1.0)[owner_T] * max(len(samples), 1))
    if reduction == "prompt_mean":
        _, task_N = np.unique(batch.tasks, return_inverse=True)
        trained_G = np.bincount(task_N[owner_T], mask_T)
        num_tasks = max(len(np.unique(task_N[samples])), 1)
        return mask_T / (np.maximum(trained_G, 1.0)[task_N[owner_T]] * num_tasks)
    if reduction == "token_mean_legacy":
        _require("legacy_samples", legacy_samples, "sample")
        part_N = np.zeros(batch.num_samples, np.int64)
        part_N[samples] = np.arange(len(samples)) // legacy_samples
        trained_P = np.bincount(part_N[owner_T], mask_T)
        return mask_T / (np.maximum(trained_P, 1.0)[part_N[owner_T]] * max(math.ceil(len(samples) / legacy_samples), 1))
    rollout_N = rollout_of_sample(batch.tasks, batch.rollouts)
    num_rollouts = max(len(np.unique(rollout_N[samples])), 1)
    if reduction == "constant_length":
        _require("constant_length", constant_length, "token")
        return mask_T / (np.float64(constant_length) * num_rollouts)
    trained_R = np.bincount(rollout_N[owner_T], mask_T)
    return mask_T / (np.maximum(trained_R, 1.0)[rollout_N[owner_T]] * num_rollouts)


def _require(key: str, value: int, unit: str) -> None:
    if value < 1:
        raise TrainingError(f"expected loss.{key} of at least 1 {unit} with this reduction, got {value}", key=f"loss.{key}", got=value)
