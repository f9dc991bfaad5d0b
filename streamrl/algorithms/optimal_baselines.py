"""Baselines of least variance: rewards weighed by how far each rollout's gradient reaches. In float64 and without torch.

Letters: `T` tokens of the batch, `M` trained ones, otherwise those of `streamrl.algorithms.advantages`, as is what all take and raise.

The variance of the estimator sum_i w_i (R_i - b) g_i is least at b = sum w^2 |g|^2 R / sum w^2 |g|^2, with g the gradient of a rollout's
log pi and w its importance weight. |g|^2 over all parameters would take a backward pass for each rollout. What stands for it is its part
at the logits, summed over tokens, which forward passes know (the logit-gradient proxy of arXiv 2602.07078): `token_energies`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from streamrl.algorithms.advantages import STD_EPSILON, Floats, Ids
from streamrl.algorithms.groups import rollout_rewards


def token_energies(logprobs: npt.NDArray[np.floating], halved: npt.NDArray[np.floating], temperature: npt.NDArray[np.floating]) -> Floats:
    """[T] squared norm of the gradient of log pi(token) by the logits: (1 - 2 pi + sum over the vocabulary of pi^2) / temperature^2.

    With z the logits over the temperature, the sum is sum exp(2 z) / (sum exp z)^2, and 2 z are the logits over half of it: its logarithm
    is 2 log pi - log pi_halved of any one token. So no head has to add anything up.

    Args:
        logprobs: [T] log pi of the tokens over the whole vocabulary.
        halved: [T] their log-probs at half the temperature.
        temperature: [T]

    Example: two tokens, one twice as probable as the other: 1 - 4/3 + 5/9 for it, and 1 - 2/3 + 5/9.

        >>> log = np.log
        >>> token_energies(log([2 / 3, 1 / 3]), log([4 / 5, 1 / 5]), np.ones(2)).round(6).tolist()
        [0.222222, 0.888889]
    """
    wide, narrow = logprobs.astype(np.float64), halved.astype(np.float64)
    energy = 1.0 - 2.0 * np.exp(wide) + np.exp(2.0 * wide - narrow)
    return np.maximum(energy, 0.0) / np.square(temperature.astype(np.float64))


def opob(
    rewards: Floats,
    tasks: Ids,
    rollouts: Ids,
    agents: Sequence[str] = (),
    *,
    log_ratios: Floats,
    energies: Floats,
    normalize_std: bool = True,
) -> tuple[Floats, dict[str, float]]:
    """VCPO's off-policy optimal baseline: A = (R - b) / (std + 1e-6) with b = sum w^2 E R / sum w^2 E over a task's rollouts (2602.17616).

    w is the product of pi / mu over a rollout's trained tokens, unbounded, and E the sum of their energies, which stands for |g|^2. With
    equal weights and energies b is the mean: GRPO. A group whose rewards are all equal gets 0, and so does one without any energy.

    Args:
        rewards: [N]
        tasks: [N]
        rollouts: [N]
        agents: [N], or none.
        log_ratios: [N] sum over each sample's trained tokens of log pi - log mu; a rollout's samples are added up.
        energies: [N] sum over them of `token_energies`, likewise.
        normalize_std: False leaves the division out.
    """
    per_rollout = rollout_rewards(rewards, tasks, rollouts, agents)
    count, group = len(per_rollout.rewards), per_rollout.group
    energy_R = np.bincount(per_rollout.rollout_of_sample, energies, count)
    with np.errstate(divide="ignore"):
        log_weight_R = 2.0 * np.bincount(per_rollout.rollout_of_sample, log_ratios, count) + np.log(energy_R)
    greatest_G = np.full(len(per_rollout.size), -np.inf)
    np.maximum.at(greatest_G, group, log_weight_R)
    none_G = per_rollout.flat | np.isinf(greatest_G)
    # Of the heaviest rollout 1: weights of hundreds of nats neither overflow nor vanish all together.
    weight_R = np.exp(log_weight_R - np.where(np.isinf(greatest_G), 0.0, greatest_G)[group])
    baseline_G = np.bincount(group, weight_R * per_rollout.rewards) / np.maximum(np.bincount(group, weight_R), 1.0)
    advantages_R = np.where(none_G[group], 0.0, per_rollout.rewards - baseline_G[group])
    if normalize_std:
        advantages_R = advantages_R / (per_rollout.std + STD_EPSILON)[group]
    return advantages_R[per_rollout.rollout_of_sample], per_rollout.metrics


def optimal_token_baseline(
    rewards: Floats, tasks: Ids, rollouts: Ids, agents: Sequence[str] = (), *, energies: Floats, samples: Ids
) -> tuple[Floats, dict[str, float]]:
    """[M] A_t = R - B_t with B_t = sum W_t R / sum W_t over the rollouts of a task that have a t-th trained token (arXiv 2602.07078, OTB).

    W_t is the sum of a rollout's energies up to its t-th trained token, of all its samples in order. Where a single rollout goes on, B_t
    is its own reward and A_t is 0: there is nothing to compare it with. Groups whose rewards are all equal get 0.

    Args:
        rewards: [N]
        tasks: [N]
        rollouts: [N]
        agents: [N], or none.
        energies: [M] `token_energies` of the trained tokens.
        samples: [M] whose they are.

    Returns:
        [M] advantages, one a trained token, and the metrics.
    """
    per_rollout = rollout_rewards(rewards, tasks, rollouts, agents)
    # The tokens of an agent's samples need not be neighbours: bring each rollout's together, in their order.
    order = np.argsort(per_rollout.rollout_of_sample[samples], kind="stable")
    owner_M = per_rollout.rollout_of_sample[samples][order]
    length_R = np.bincount(owner_M, minlength=len(per_rollout.rewards))
    first_M = (np.cumsum(length_R) - length_R)[owner_M]
    # Rollout by rollout: in one sum over all, a sure model's energies would be lost beside what came before.
    weight_M = np.concatenate([np.cumsum(own) for own in np.split(energies[order], np.cumsum(length_R)[:-1])])
    position_M, group_M = np.arange(len(owner_M)) - first_M, per_rollout.group[owner_M]
    longest_G = np.zeros(len(per_rollout.size), np.int64)
    np.maximum.at(longest_G, per_rollout.group, length_R)
    # A cell is a position of a group: group g's are cells first_G[g] to first_G[g] + longest_G[g] - 1.
    cell_M = (np.cumsum(longest_G) - longest_G)[group_M] + position_M
    reward_M = per_rollout.rewards[owner_M]
    total = np.bincount(cell_M, weight_M)
    baseline = np.bincount(cell_M, weight_M * reward_M) / np.where(total > 0, total, 1.0)
    none_M = per_rollout.flat[group_M] | (total <= 0)[cell_M] | (np.bincount(cell_M) == 1)[cell_M]
    found = np.zeros(len(owner_M))
    found[order] = np.where(none_M, 0.0, reward_M - baseline[cell_M])
    return found, per_rollout.metrics
