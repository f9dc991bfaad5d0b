"""Rewards on the length of answers, by what others of their task were: what is added where a batch is assembled. Pure.

As the soft overlong penalty it is added once, whoever gave the reward and however late; on the log and for filters rewards are without.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from streamrl.config.reward import LengthConfig
from streamrl.core.numbering import group_of_owner, owner_of_sample

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def length_rewards(
    config: LengthConfig, rewards: Floats, lengths: Ints, longest: Ints, tasks: Ints, rollouts: Ints, agents: Sequence[str] = ()
) -> Floats:
    """[N] what length adds to each sample's reward.

    A rollout's length is that of all its samples together; of an agent with a reward of its own, that of the agent's in the rollout, beside
    those of the same role. An answer is right whose reward is at least `config.right`.

    - `kimi` (arXiv 2501.12599): weight x l where the answer is right, weight x min(0, l) elsewhere, with
      l = 1/2 - (length - shortest) / (longest - shortest) of the task's answers; 0 where all are as long.
    - `alp` (arXiv 2506.05256): -weight x max(share of the task's answers that are right, 1 / their number) x length / L.
    - `cosine` (arXiv 2502.03373): what makes the reward go along half a cosine from the first to the second number of `cosine_right` or
      `cosine_wrong` while the length goes from 0 to L, and `cosine_exceeded` from L on.

    Args:
        config: which, and its numbers; `kind` is not `none`.
        rewards: [N] equal where a reward is shared.
        lengths: [N] sampled tokens of each sample.
        longest: [N] L, where `config.longest` is 0; of a rollout's samples the greatest.
        tasks: [N]
        rollouts: [N]
        agents: [N], whose own reward a sample has, empty where it is the rollout's; none at all where no sample has an agent.
    """
    owner_N = owner_of_sample(tasks, rollouts, agents)
    _, first_R = np.unique(owner_N, return_index=True)
    group_R = group_of_owner(first_R, tasks, agents)
    reward_R, right_R = rewards[first_R], rewards[first_R] >= config.right
    length_R = np.bincount(owner_N, lengths).astype(np.float64)
    if config.kind == "kimi":
        return _kimi(length_R, right_R, group_R, config.weight)[owner_N]
    limit_R = np.zeros(len(first_R))
    np.maximum.at(limit_R, owner_N, longest)
    if config.longest:
        limit_R[:] = config.longest
    if config.kind == "alp":
        size_G = np.bincount(group_R)
        share_G = np.maximum(np.bincount(group_R, right_R), 1.0) / size_G
        return (-config.weight * share_G[group_R] * length_R / limit_R)[owner_N]
    (right_0, right_l), (wrong_0, wrong_l) = config.cosine_right, config.cosine_wrong
    at_0, at_longest = np.where(right_R, right_0, wrong_0), np.where(right_R, right_l, wrong_l)
    along = at_longest + (at_0 - at_longest) * (1.0 + np.cos(np.pi * length_R / limit_R)) / 2
    return (np.where(length_R >= limit_R, config.cosine_exceeded, along) - reward_R)[owner_N]


def _kimi(length_R: Floats, right_R: npt.NDArray[np.bool_], group_R: Ints, weight: float) -> Floats:
    shortest_G, longest_G = np.full(int(group_R.max()) + 1, np.inf), np.zeros(int(group_R.max()) + 1)
    np.minimum.at(shortest_G, group_R, length_R)
    np.maximum.at(longest_G, group_R, length_R)
    spread_R = (longest_G - shortest_G)[group_R]
    found = 0.5 - (length_R - shortest_G[group_R]) / np.where(spread_R > 0, spread_R, 1.0)
    return weight * np.where(spread_R > 0, np.where(right_R, found, np.minimum(found, 0.0)), 0.0)
