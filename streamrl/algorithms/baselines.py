"""Advantages from the rewards of groups with other baselines than the plain mean: one number per sample. In float64 and without torch.

Letters and what all take, return and raise are those of `streamrl.algorithms.advantages`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import comb

import numpy as np

from streamrl.algorithms.advantages import STD_EPSILON, Floats, Ids
from streamrl.algorithms.groups import rollout_rewards
from streamrl.errors import TrainingError


def remax(
    rewards: Floats, tasks: Ids, rollouts: Ids, agents: Sequence[str] = (), *, baselines: Floats | None
) -> tuple[Floats, dict[str, float]]:
    """The greedy answer's reward as the baseline: A = R(x, y) - R(x, y'), y' the same policy's greedy answer to x (arXiv 2310.10505).

    Algorithm 1 there. R(x, y') knows nothing of y, so the gradient stays unbiased, also where y' is of a version before y's.

    Args:
        rewards: [N]
        tasks: [N]
        rollouts: [N]
        agents: [N], or none.
        baselines: [N] R(x, y') (`TrainBatch.baselines`).

    Returns:
        As the others, but that a group is flat whose rewards all equal its baseline.

    Raises:
        TrainingError: also where a baseline is missing or not finite.
    """
    per_rollout = rollout_rewards(rewards, tasks, rollouts, agents)
    if baselines is None or not np.isfinite(baselines).all():
        bad = 0 if baselines is None else int(np.flatnonzero(~np.isfinite(baselines))[0])
        raise TrainingError(
            f"remax expects the reward of each task's greedy answer, got {'none' if baselines is None else baselines[bad]} "
            f"for task {tasks[bad]}",
            hint="a group without one belongs in the drops, not in a batch: was the batch recorded under another loss.advantage?",
            estimator="remax",
            task=int(tasks[bad]),
        )
    group_N = per_rollout.group[per_rollout.rollout_of_sample]
    differs_G = np.bincount(group_N, rewards != baselines) > 0
    return rewards - baselines, per_rollout.metrics | {"rollout/zero_variance": float(1.0 - differs_G.mean())}


def opo(rewards: Floats, tasks: Ids, rollouts: Ids, agents: Sequence[str] = (), *, lengths: Ids) -> tuple[Floats, dict[str, float]]:
    """On-policy RL with the optimal reward baseline: A_i = R_i - sum_j l_j R_j / sum_j l_j over the rollouts of a task (arXiv 2505.23585).

    The baseline of least variance weighs rewards by the squared norm of each rollout's gradient, for which its length l stands. There is no
    division by the deviation. A group whose rewards are all equal gets 0, and so does one without a trained token.

    Args:
        rewards: [N]
        tasks: [N]
        rollouts: [N]
        agents: [N], or none.
        lengths: [N] trained tokens of each sample; a rollout's samples are added up.
    """
    per_rollout = rollout_rewards(rewards, tasks, rollouts, agents)
    length_R = np.bincount(per_rollout.rollout_of_sample, lengths, len(per_rollout.rewards))
    total_G = np.bincount(per_rollout.group, length_R)
    weighted_G = np.bincount(per_rollout.group, length_R * per_rollout.rewards)
    baseline_G = weighted_G / np.maximum(total_G, 1.0)
    none_G = per_rollout.flat | (total_G == 0)
    advantages_R = np.where(none_G[per_rollout.group], 0.0, per_rollout.rewards - baseline_G[per_rollout.group])
    return advantages_R[per_rollout.rollout_of_sample], per_rollout.metrics


def gpg(rewards: Floats, tasks: Ids, rollouts: Ids, agents: Sequence[str] = ()) -> tuple[Floats, dict[str, float]]:
    """Group policy gradient: A = alpha (R - mean), alpha = rollouts of the batch / rollouts of its groups that are not flat.

    arXiv 2504.02546. Flat groups have no gradient; alpha keeps the scale of the others' from falling with their number. Where such groups
    are dropped before (`tasks.drop_zero_variance`) it is 1.
    """
    per_rollout = rollout_rewards(rewards, tasks, rollouts, agents)
    uneven = int((~per_rollout.flat[per_rollout.group]).sum())
    alpha = len(per_rollout.rewards) / max(uneven, 1)
    return (alpha * per_rollout.centred)[per_rollout.rollout_of_sample], per_rollout.metrics


def gdpo(
    rewards: Floats,
    tasks: Ids,
    rollouts: Ids,
    agents: Sequence[str] = (),
    *,
    parts: Mapping[str, Floats],
    weights: Mapping[str, float],
) -> tuple[Floats, dict[str, float]]:
    """Each objective normalised by itself: A = (S - mean S) / (std S + 1e-6) over the batch's rollouts (arXiv 2601.05242).

    S is the sum over objectives k of weight_k (r_k - mean of r_k) / (std of r_k + 1e-6) over the rollouts of a task. So rewards that add up
    to the same are told apart where they are made of other parts, and a part of wide values hides no other. An objective that is
    equal in all rollouts of a task adds 0 there.

    Args:
        rewards: [N] the whole rewards, for the metrics alone.
        tasks: [N]
        rollouts: [N]
        agents: [N], or none.
        parts: [N] values of each objective.
        weights: what each counts; the objectives that are looked at.

    Raises:
        TrainingError: also where a sample's reward has no such part.
    """
    per_rollout = rollout_rewards(rewards, tasks, rollouts, agents)
    total_R = np.zeros(len(per_rollout.rewards))
    for name, weight in weights.items():
        values = parts.get(name, np.full(len(rewards), np.nan))
        if not np.isfinite(values).all():
            bad = int(np.flatnonzero(~np.isfinite(values))[0])
            raise TrainingError(
                f"gdpo expects a finite part {name!r} of every reward, got {values[bad]} for task {tasks[bad]}, rollout {rollouts[bad]}",
                hint=f"have the reward give {name!r} always, or take it out of loss.objectives",
                estimator="gdpo",
                objective=name,
                task=int(tasks[bad]),
                rollout=int(rollouts[bad]),
            )
        own = rollout_rewards(values, tasks, rollouts, agents)
        total_R += weight * own.centred / (own.std + STD_EPSILON)[own.group]
    std = total_R.std(ddof=1) if len(total_R) > 1 else 0.0
    advantages_R = (total_R - total_R.mean()) / (std + STD_EPSILON)
    return advantages_R[per_rollout.rollout_of_sample], per_rollout.metrics


def pass_at_k(rewards: Floats, tasks: Ids, rollouts: Ids, agents: Sequence[str] = (), *, k: int) -> tuple[Floats, dict[str, float]]:
    """What a rollout adds to the probability that one of k is right: GRPO over all subsets of k rollouts, in closed form.

    arXiv 2508.10751. With n rollouts of which c are right, and the mean and deviation of the subsets' rewards
    m = 1 - C(n - c, k) / C(n, k), s = sqrt(m (1 - m)): A = (1 - m) / (s + 1e-6) for those that are right, and
    (1 - m - C(n - c - 1, k - 1) / C(n - 1, k - 1)) / (s + 1e-6) for the others. They add up to 0. Where all subsets have one that is right,
    or none has, they are 0. k = 1 is GRPO with the deviation of a population.

    Example: of 4 rollouts one is right and k = 2, so that half of the subsets have it: m = s = 1/2, A = 1 and -1/3.

    Args:
        rewards: [N], each 0 or 1.
        tasks: [N]
        rollouts: [N]
        agents: [N], or none.
        k: at least 1; a smaller group takes all its rollouts.

    Raises:
        TrainingError: also where a reward is neither 0 nor 1.
    """
    per_rollout = rollout_rewards(rewards, tasks, rollouts, agents)
    if not np.isin(per_rollout.rewards, (0.0, 1.0)).all():
        bad = int(np.flatnonzero(~np.isin(rewards, (0.0, 1.0)))[0])
        raise TrainingError(
            f"pass_at_k expects rewards of 0 or 1, got {rewards[bad]} for task {tasks[bad]}, rollout {rollouts[bad]}",
            hint='make the reward 1 where the answer is right and 0 elsewhere, or take loss.advantage = "grpo"',
            estimator="pass_at_k",
            task=int(tasks[bad]),
            rollout=int(rollouts[bad]),
        )
    right_G = np.bincount(per_rollout.group, per_rollout.rewards).astype(np.int64)
    of_both = np.array([_of_right_and_wrong(int(n), int(c), k) for n, c in zip(per_rollout.size, right_G, strict=True)])
    advantages_R = of_both[per_rollout.group, per_rollout.rewards.astype(np.int64)]
    return advantages_R[per_rollout.rollout_of_sample], per_rollout.metrics


def _of_right_and_wrong(n: int, c: int, k: int) -> tuple[float, float]:
    """(A of a wrong rollout, A of a right one) in a group of n, c of them right."""
    k = min(k, n)
    none_right = comb(n - c, k) / comb(n, k)
    if none_right in (0.0, 1.0):
        return 0.0, 0.0
    deviation = (none_right * (1.0 - none_right)) ** 0.5 + STD_EPSILON
    none_beside = comb(n - c - 1, k - 1) / comb(n - 1, k - 1)
    return (none_right - none_beside) / deviation, none_right / deviation
