"""Rewards of rollouts and the statistics of their groups, and means over rollouts. In float64 and without torch.

Letters: `T` tokens of a batch, `N` samples, `R` rollouts, `G` groups (tasks). A group is named by its task id, so groups may have any
size and order. A rollout counts once however many samples it gave: they share its reward, and its advantage.

Where samples have agents with rewards of their own, each agent of a rollout is a rollout here, and the agents of one role (`role_of`) in a
task are a group of their own:

```text
task 5   rollout 0: main, solver/0, solver/1       groups of task 5: main (2 rewards), solver (3 rewards)
         rollout 1: main, solver/0
```
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from streamrl.core.numbering import group_of_owner, owner_of_sample
from streamrl.errors import TrainingError


class RolloutRewards(msgspec.Struct, frozen=True, kw_only=True):
    """The rewards of a batch, one per rollout, and the statistics of their groups."""

    rewards: npt.NDArray[np.float64]
    """[R]"""
    group: npt.NDArray[np.int64]
    """[R] index of the rollout's group, in ascending order of task ids and, within one, of roles."""
    rollout_of_sample: npt.NDArray[np.int64]
    """[N] index of the sample's rollout."""
    size: npt.NDArray[np.float64]
    """[G] rollouts of the group, at least 1."""
    mean: npt.NDArray[np.float64]
    """[G]"""
    std: npt.NDArray[np.float64]
    """[G] unbiased (n - 1); 0 where the group is flat."""
    flat: npt.NDArray[np.bool_]
    """[G] whether all rewards of the group are equal, as they are in a group of one."""

    @property
    def centred(self) -> npt.NDArray[np.float64]:
        """[R] rewards minus the mean of their group; exactly 0 in flat groups, also where their mean is rounded."""
        return np.where(self.flat[self.group], 0.0, self.rewards - self.mean[self.group])

    @property
    def metrics(self) -> dict[str, float]:
        """`rollout/raw_reward` (mean over rollouts), `rollout/raw_reward_std` (mean over groups), `rollout/zero_variance` (flat groups)."""
        return {
            "rollout/raw_reward": float(self.rewards.mean()),
            "rollout/raw_reward_std": float(self.std.mean()),
            "rollout/zero_variance": float(self.flat.mean()),
        }


def rollout_of_sample(tasks: npt.NDArray[np.int64], rollouts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """[N] number of each sample's rollout, 0 to R - 1, in ascending order of (task, rollout)."""
    return owner_of_sample(tasks, rollouts)


def rollout_rewards(
    rewards: npt.NDArray[np.float64], tasks: npt.NDArray[np.int64], rollouts: npt.NDArray[np.int64], agents: Sequence[str] = ()
) -> RolloutRewards:
    """One reward a rollout, and the statistics of their groups.

    Args:
        rewards: [N], one reward per sample; equal within a rollout, or within an agent of a rollout.
        tasks: [N], group id.
        rollouts: [N], rollout within its group.
        agents: [N], whose own reward it is, empty where it is the rollout's; none at all where no sample has an agent.

    Raises:
        TrainingError: a reward is missing or not finite, or the samples of one rollout, or of one agent in it, differ in reward.
    """
    if not np.isfinite(rewards).all():
        bad = int(np.flatnonzero(~np.isfinite(rewards))[0])
        raise TrainingError(
            f"expected a finite reward for every sample, got {rewards[bad]} for task {tasks[bad]}, rollout {rollouts[bad]}",
            hint="a sample without a reward belongs in the drops, not in a batch",
            reward=float(rewards[bad]),
            task=int(tasks[bad]),
            rollout=int(rollouts[bad]),
        )
    owner_N = owner_of_sample(tasks, rollouts, agents)
    _, first_R = np.unique(owner_N, return_index=True)
    rewards_R = rewards[first_R].astype(np.float64)
    if not np.array_equal(rewards_R[owner_N], rewards):
        bad = int(np.flatnonzero(rewards_R[owner_N] != rewards)[0])
        of = f", agent {agents[bad]}" if agents and agents[bad] else ""
        raise TrainingError(
            f"expected one reward for all samples of task {tasks[bad]}, rollout {rollouts[bad]}{of}, got several",
            task=int(tasks[bad]),
            rollout=int(rollouts[bad]),
        )
    group_R = group_of_owner(first_R, tasks, agents)
    size = np.bincount(group_R).astype(np.float64)
    mean = np.bincount(group_R, rewards_R) / size
    low, high = np.full(len(size), np.inf), np.full(len(size), -np.inf)
    np.minimum.at(low, group_R, rewards_R)
    np.maximum.at(high, group_R, rewards_R)
    flat = low == high
    variance = np.bincount(group_R, (rewards_R - mean[group_R]) ** 2) / np.maximum(size - 1, 1)
    return RolloutRewards(
        rewards=rewards_R,
        group=group_R,
        rollout_of_sample=owner_N,
        size=size,
        mean=mean,
        std=np.where(flat, 0.0, np.sqrt(variance)),
        flat=flat,
    )


def rollout_mean(values: npt.NDArray[np.float64], mask: npt.NDArray[np.bool_], rollout_of_token: npt.NDArray[np.int64]) -> float:
    """The rule for metrics of a batch's tokens: the mean over each rollout's tokens under the mask, then over those rollouts.

    Rollouts without a token under the mask do not count; where there is none at all the mean is 0.

    Args:
        values: [T], read under the mask only.
        mask: [T]
        rollout_of_token: [T], from 0.
    """
    owner_M = rollout_of_token[mask]
    if not len(owner_M):
        return 0.0
    count_R = np.bincount(owner_M)
    present = count_R > 0
    return float((np.bincount(owner_M, values[mask])[present] / count_R[present]).mean())
