"""Advantages from the rewards of groups: one number per sample. In float64 and without torch.

Letters: `N` samples of a batch. All take `rewards` [N] (equal within a rollout), `tasks` [N] (group ids) and `rollouts` [N] (the rollout
within its group), and return [N] advantages with the metrics of `groups.Votes.metrics`; groups and votes are explained there. Samples of
one rollout share its advantage. All raise TrainingError where a reward is missing or not finite, or the samples of a rollout differ in it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from streamrl.algorithms.groups import count_votes
from streamrl.errors import TrainingError

STD_EPSILON = 1e-6

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


def raw(rewards: Floats, tasks: Ids, rollouts: Ids) -> tuple[Floats, dict[str, float]]:
    """The rewards as they are: A = R. REINFORCE without a baseline (REINFORCE++ and PPO take it as the reward of the last token)."""
    votes = count_votes(rewards, tasks, rollouts)
    return votes.rewards[votes.rollout_of_sample], votes.metrics


def grpo(rewards: Floats, tasks: Ids, rollouts: Ids, *, normalize_std: bool = True) -> tuple[Floats, dict[str, float]]:
    """Group-normalised rewards: A = (R - mean) / (std + 1e-6) over the rollouts of a task (arXiv 2402.03300).

    std is the unbiased one (n - 1). A group of one rollout gets 0, and so does one whose rewards are all equal. GSPO (arXiv 2507.18071) and
    CISPO (arXiv 2506.13585) take these advantages too.

    Args:
        rewards: [N]
        tasks: [N]
        rollouts: [N]
        normalize_std: False leaves the division out: Dr.GRPO (arXiv 2503.20783), and the baseline of REINFORCE++ (arXiv 2501.03262).
    """
    votes = count_votes(rewards, tasks, rollouts)
    advantages_R = votes.centred / (votes.std + STD_EPSILON)[votes.group] if normalize_std else votes.centred
    return advantages_R[votes.rollout_of_sample], votes.metrics


def rloo(rewards: Floats, tasks: Ids, rollouts: Ids) -> tuple[Floats, dict[str, float]]:
    """Leave-one-out baseline: A_i = R_i - mean of the group's other rollouts = (R_i - mean) n / (n - 1) (arXiv 2402.14740).

    A group of one rollout has no others and gets 0.
    """
    votes = count_votes(rewards, tasks, rollouts)
    factor_G = votes.size / np.maximum(votes.size - 1, 1)
    return (votes.centred * factor_G[votes.group])[votes.rollout_of_sample], votes.metrics


def maxrl(rewards: Floats, tasks: Ids, rollouts: Ids) -> tuple[Floats, dict[str, float]]:
    """Rewards relative to the group's mean: A = (R - mean) / mean, 0 where all rewards of the group are 0.

    With rewards of 0 and 1 its expectation is a truncated gradient of the log of the probability to succeed: hard tasks weigh more.

    Raises:
        TrainingError: also where a reward is negative: dividing by a mean of either sign could turn the advantage around.
    """
    votes = count_votes(rewards, tasks, rollouts)
    if (votes.rewards < 0).any():
        bad = int(np.flatnonzero(rewards < 0)[0])
        raise TrainingError(
            f"maxrl expects rewards of at least 0, got {rewards[bad]} for task {tasks[bad]}, rollout {rollouts[bad]}",
            hint='shift the reward so that failure is 0, or take loss.advantage = "grpo"',
        )
    # A group that is not flat has a positive reward, hence a positive mean.
    mean_G = np.where(votes.flat, 1.0, votes.mean)
    return (votes.centred / mean_G[votes.group])[votes.rollout_of_sample], votes.metrics
