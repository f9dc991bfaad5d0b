"""How per-token values become one number: a weight per token, fixed before anything is computed.

A batch's loss is sum over its tokens of weight x value. Because the weights of the whole optimizer step are known
beforehand, the loss does not depend on how tokens are spread over micro-batches, rows, ranks and context-parallel shards, nor on
which of them a correction zeroes later: partial sums simply add up.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from streamrl.algorithms.groups import rollout_of_sample
from streamrl.config.loss import Reduction
from streamrl.core.batches import TrainBatch, sample_of_token
from streamrl.errors import TrainingError


def token_weights(
    batch: TrainBatch, samples: npt.NDArray[np.int64], reduction: Reduction, *, constant_length: int = 0
) -> npt.NDArray[np.float64]:
    """Weights of an optimizer step over `samples`: [T] float64, 0 outside the loss mask and outside `samples`.

    - `rollout_mean`: mean over the trained tokens of each rollout (all samples of a rollout together), then over the rollouts of
      `samples` (the sample-level loss of arXiv 2402.03300, with every rollout counted once).
    - `token_mean`: mean over all trained tokens (arXiv 2503.14476).
    - `sequence_mean`: mean over the trained tokens of each sample, then over `samples`.
    - `prompt_mean`: mean over the trained tokens of each task (all its rollouts together), then over the tasks of `samples`: a long answer
      weighs more beside the others of its task, a task with long answers no more than another.
    - `constant_length`: sum over the trained tokens of each rollout / constant_length, then mean over the rollouts of `samples`: a long
      answer is not weakened by its length (Dr.GRPO, arXiv 2503.20783).

    Rollouts and samples without any trained token count in the means over them.

    Args:
        batch: the whole batch.
        samples: [n] indices of the step's samples; a rollout's samples are all in it or all not.
        reduction: which mean.
        constant_length: tokens, for the reduction of that name.

    Raises:
        TrainingError: `constant_length` is missing where it is needed.
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
    rollout_N = rollout_of_sample(batch.tasks, batch.rollouts)
    num_rollouts = max(len(np.unique(rollout_N[samples])), 1)
    if reduction == "constant_length":
        if constant_length < 1:
            raise TrainingError(
                f"expected loss.constant_length of at least 1 token with this reduction, got {constant_length}",
                key="loss.constant_length",
                got=constant_length,
            )
        return mask_T / (np.float64(constant_length) * num_rollouts)
    trained_R = np.bincount(rollout_N[owner_T], mask_T)
    return mask_T / (np.maximum(trained_R, 1.0)[rollout_N[owner_T]] * num_rollouts)
