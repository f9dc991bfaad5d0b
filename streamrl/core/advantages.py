"""Advantages from rewards, in float64 and without torch. Letters: `N` samples of a batch, `R` its rollouts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from streamrl.errors import TrainingError

STD_EPSILON = 1e-6


def grpo(
    rewards: npt.NDArray[np.float64],
    tasks: npt.NDArray[np.int64],
    rollouts: npt.NDArray[np.int64],
    *,
    normalize_std: bool = True,
) -> tuple[npt.NDArray[np.float64], dict[str, float]]:
    """Group-normalised rewards: A = (R - mean) / (std + 1e-6) over the rollouts of a task (arXiv 2402.03300).

    A group is named by its task id, so groups may have any size and order. A rollout has one vote however many samples
    it gave; its samples share its advantage. std is the unbiased one (n - 1). A group of one rollout gets 0.

    Args:
        rewards: [N], one reward per sample; equal within a rollout.
        tasks: [N], group id.
        rollouts: [N], rollout within its group.
        normalize_std: False leaves the division out (Dr.GRPO, arXiv 2503.20783).

    Returns:
        [N] advantages, and metrics over rollouts: `rollout/raw_reward`, `rollout/raw_reward_std` (within groups, mean
        over groups), `rollout/zero_spread` (fraction of groups whose rewards are all equal).

    Raises:
        TrainingError: a reward is missing or not finite, or the samples of one rollout differ in reward.
    """
    if not np.isfinite(rewards).all():
        bad = int(np.flatnonzero(~np.isfinite(rewards))[0])
        raise TrainingError(
            f"expected a finite reward for every sample, got {rewards[bad]} for task {tasks[bad]}, rollout {rollouts[bad]}",
            hint="a sample without a reward belongs in the drops, not in a batch",
        )
    keys = np.stack([tasks, rollouts], axis=1)
    voters, first, sample_rollout = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    sample_rollout = sample_rollout.reshape(-1)
    votes_R = rewards[first]
    if not np.array_equal(votes_R[sample_rollout], rewards):
        bad = int(np.flatnonzero(votes_R[sample_rollout] != rewards)[0])
        raise TrainingError(f"expected one reward for all samples of task {tasks[bad]}, rollout {rollouts[bad]}, got several")

    _, group_R = np.unique(voters[:, 0], return_inverse=True)
    group_R = group_R.reshape(-1)
    size = np.bincount(group_R).astype(np.float64)
    mean = np.bincount(group_R, votes_R) / size
    centred_R = votes_R - mean[group_R]
    std = np.sqrt(np.bincount(group_R, centred_R**2) / np.maximum(size - 1, 1))
    # Equal rewards must give exactly 0, also where their mean is rounded.
    low, high = np.full(len(size), np.inf), np.full(len(size), -np.inf)
    np.minimum.at(low, group_R, votes_R)
    np.maximum.at(high, group_R, votes_R)
    flat = low == high
    advantages_R = centred_R / (std + STD_EPSILON)[group_R] if normalize_std else centred_R
    advantages_R = np.where(flat[group_R], 0.0, advantages_R)
    metrics = {
        "rollout/raw_reward": float(votes_R.mean()),
        "rollout/raw_reward_std": float(np.where(flat, 0.0, std).mean()),
        "rollout/zero_spread": float(flat.mean()),
    }
    return advantages_R[sample_rollout], metrics
