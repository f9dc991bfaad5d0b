"""Advantages from the rewards of groups: one number per sample. In float64 and without torch.

Letters: `N` samples of a batch. All take `rewards` [N] (equal within a rollout), `tasks` [N] (group ids) and `rollouts` [N] (the rollout
within its group), and return [N] advantages with the metrics of `groups.RolloutRewards.metrics`; see there. Samples of
one rollout share its advantage. All raise TrainingError where a reward is missing or not finite, or the samples of a rollout differ in it.

`agents` [N] says whose own reward a sample has (`streamrl.algorithms.groups`): then "rollout" below is an agent of a rollout, and
"group" the agents of one role among the rollouts of a task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from streamrl.algorithms.groups import RolloutRewards, rollout_rewards
from streamrl.config.loss import MAX_LOG_RATIO, KLEstimator
from streamrl.errors import TrainingError

STD_EPSILON = 1e-6
VARIANCE_EPSILON = 1e-8
MAX_LOW_VAR_KL = 10.0

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Reduce = Callable[[Floats], Floats]
"""The element-wise sum of an array over ranks; every rank calls it with the same shape, as often."""


def raw(rewards: Floats, tasks: Ids, rollouts: Ids, agents: Sequence[str] = ()) -> tuple[Floats, dict[str, float]]:
    """The rewards as they are: A = R. REINFORCE without a baseline (REINFORCE++ and PPO take it as the reward of the last token)."""
    per_rollout = rollout_rewards(rewards, tasks, rollouts, agents)
    return per_rollout.rewards[per_rollout.rollout_of_sample], per_rollout.metrics


def grpo(
    rewards: Floats,
    tasks: Ids,
    rollouts: Ids,
    agents: Sequence[str] = (),
    *,
    normalize_std: bool = True,
    batch_std: bool = False,
    leave_one_out: bool = False,
) -> tuple[Floats, dict[str, float]]:
    """Group-normalised rewards: A = (R - mean) / (std + 1e-6) over the rollouts of a task (arXiv 2402.03300).

    std is the unbiased one (n - 1). A group of one rollout gets 0, and so does one whose rewards are all equal. GSPO (arXiv 2507.18071) and
    CISPO (arXiv 2506.13585) take these advantages too.

    Args:
        rewards: [N]
        tasks: [N]
        rollouts: [N]
        agents: [N], or none.
        normalize_std: False leaves the division out: Dr.GRPO (arXiv 2503.20783), and the baseline of REINFORCE++ (arXiv 2501.03262).
        batch_std: std is that of all rewards of the batch, which a group of nearly equal ones does not make small (arXiv 2508.08221).
        leave_one_out: the mean is that of the others, as in `rloo`, and std still that of all; a rollout's own reward is then no part of
            what it is compared with.
    """
    per_rollout = rollout_rewards(rewards, tasks, rollouts, agents)
    centred_R = _left_out(per_rollout) if leave_one_out else per_rollout.centred
    std_G = (
        np.full_like(per_rollout.std, per_rollout.rewards.std(ddof=1) if len(per_rollout.rewards) > 1 else 0.0)
        if batch_std
        else per_rollout.std
    )
    advantages_R = centred_R / (std_G + STD_EPSILON)[per_rollout.group] if normalize_std else centred_R
    return advantages_R[per_rollout.rollout_of_sample], per_rollout.metrics


def rloo(rewards: Floats, tasks: Ids, rollouts: Ids, agents: Sequence[str] = ()) -> tuple[Floats, dict[str, float]]:
    """Leave-one-out baseline: A_i = R_i - mean of the group's other rollouts = (R_i - mean) n / (n - 1) (arXiv 2402.14740).

    A group of one rollout has no others and gets 0.
    """
    per_rollout = rollout_rewards(rewards, tasks, rollouts, agents)
    return _left_out(per_rollout)[per_rollout.rollout_of_sample], per_rollout.metrics


def _left_out(per_rollout: RolloutRewards) -> Floats:
    """[R] rewards less the mean of the group's others."""
    factor_G = per_rollout.size / np.maximum(per_rollout.size - 1, 1)
    return per_rollout.centred * factor_G[per_rollout.group]


def maxrl(rewards: Floats, tasks: Ids, rollouts: Ids, agents: Sequence[str] = ()) -> tuple[Floats, dict[str, float]]:
    """Rewards relative to the group's mean: A = (R - mean) / mean, 0 where all rewards of the group are 0.

    With rewards of 0 and 1 its expectation is a truncated gradient of the log of the probability to succeed: hard tasks weigh more.

    Raises:
        TrainingError: also where a reward is negative: dividing by a mean of either sign could turn the advantage around.
    """
    per_rollout = rollout_rewards(rewards, tasks, rollouts, agents)
    if (per_rollout.rewards < 0).any():
        bad = int(np.flatnonzero(rewards < 0)[0])
        raise TrainingError(
            f"maxrl expects rewards of at least 0, got {rewards[bad]} for task {tasks[bad]}, rollout {rollouts[bad]}",
            hint='shift the reward so that failure is 0, or take loss.advantage = "grpo"',
            estimator="maxrl",
            task=int(tasks[bad]),
            rollout=int(rollouts[bad]),
        )
    # A group that is not flat has a positive reward, hence a positive mean.
    mean_G = np.where(per_rollout.flat, 1.0, per_rollout.mean)
    return (per_rollout.centred / mean_G[per_rollout.group])[per_rollout.rollout_of_sample], per_rollout.metrics


def token_kl(log_ratio: Floats, estimator: KLEstimator) -> Floats:
    """Estimates of KL(pi || reference) from tokens that pi sampled (J. Schulman, "Approximating KL Divergence").

    With r = log pi - log reference: k1 = r, k2 = r^2 / 2, k3 = exp(-r) - 1 + r (never negative), low_var_kl = min(k3, 10). These two
    take r as -20 where it is less. abs = |r|; k1+ and k3+ differ from k1 and k3 in a gradient alone, which nothing here has.

    Args:
        log_ratio: r, any shape.
        estimator: which.
    """
    if estimator in ("k1", "k1+"):
        return log_ratio
    if estimator == "abs":
        return np.abs(log_ratio)
    if estimator == "k2":
        return np.square(log_ratio) / 2
    r = np.maximum(log_ratio, -MAX_LOG_RATIO)
    k3 = np.expm1(-r) + r
    return np.minimum(k3, MAX_LOW_VAR_KL) if estimator == "low_var_kl" else k3


def token_rewards(
    rewards: Floats,
    offsets: Ids,
    loss_mask: Mask,
    *,
    kl: Floats | None,
    kl_coef: float,
) -> Floats:
    """[T] r_t = -kl_coef KL_t at trained tokens, plus the sample's reward at its last one; 0 elsewhere.

    A sample without a trained token has nowhere to put its reward.

    Args:
        rewards: [N]
        offsets: [N + 1]
        loss_mask: [T]
        kl: [T], read at trained tokens; None: no penalty.
        kl_coef: the penalty's coefficient.
    """
    found = np.zeros(len(loss_mask))
    if kl is not None:
        found[loss_mask] = -kl_coef * kl[loss_mask]
    trained = np.flatnonzero(loss_mask)
    owner = np.searchsorted(offsets, trained, side="right") - 1
    last = np.ones(len(trained), np.bool_)
    last[:-1] = owner[1:] != owner[:-1]
    found[trained[last]] += rewards[owner[last]]
    return found


def distill(advantages: Floats, logprobs: Floats, teacher: Floats, loss_mask: Mask, *, coef: float) -> tuple[Floats, Floats]:
    """A_t - coef (log pi - log teacher): advantages [T] and the estimate of the reverse KL that was taken, [T] (arXiv 2306.13649).

    At tokens that pi sampled, log pi - log teacher has the reverse KL(pi || teacher) as its mean. It is a constant to the loss, as
    every advantage is.

    Args:
        advantages: [T]
        logprobs: [T] the student's before the batch; read under the mask only.
        teacher: [T] the teacher's; read under the mask only.
        loss_mask: [T]; outside it advantages stay and the estimate is 0.
        coef: weight of the term.
    """
    reverse_kl = np.zeros(len(advantages))
    reverse_kl[loss_mask] = np.asarray(logprobs, np.float64)[loss_mask] - np.asarray(teacher, np.float64)[loss_mask]
    return advantages - coef * reverse_kl, reverse_kl


def whiten(values: Floats, mask: Mask, *, reduce: Reduce | None = None) -> Floats:
    """(x - mean) / sqrt(variance + 1e-8) under the mask, 0 outside it; the variance is the unbiased one (n - 1).

    A single value gives 0. The deviations are summed in a second pass, after the mean is known, so a large mean costs no digits.

    Args:
        values: [T] those of this rank; read under the mask only.
        mask: [T]
        reduce: sums over ranks where each holds other tokens; called twice. None: they are all here.

    Raises:
        TrainingError: no token of any rank is under the mask.
    """
    sums = np.array([values[mask].sum(), mask.sum()], np.float64)
    total, count = sums if reduce is None else reduce(sums)
    if count == 0:
        raise TrainingError("whitening expects trained tokens, this batch has none", hint="was everything masked out of it?", trained=0)
    centred = np.zeros(len(values))
    centred[mask] = values[mask] - total / count
    squares = np.array([np.square(centred).sum()])
    variance = float((squares if reduce is None else reduce(squares))[0]) / max(count - 1, 1)
    return centred / np.sqrt(variance + VARIANCE_EPSILON)
