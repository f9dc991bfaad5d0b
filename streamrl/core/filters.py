"""The built-in filters, decided by what stands on the log: lengths and repetition of rollouts, rewards of groups. Pure.

Filters of the user's run where samples are made, and what they refuse comes as tombstones (`streamrl.producers.filtering`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec.structs import replace

from streamrl.core.records import Rollouts, RolloutView
from streamrl.core.state import FoldConfig, FoldState, PendingTask


def refusals(record: Rollouts, config: FoldConfig) -> dict[int, str]:
    """Why rollouts of a message are refused, by rollout; demonstrations never are."""
    rules = config.filters
    if not (rules.min_tokens or rules.max_tokens or rules.max_repetition):  # nearly always
        return {}
    found: dict[int, str] = {}
    for view in record.rollouts:
        if view.demonstration:
            continue
        if view.length < rules.min_tokens:
            found[view.rollout] = "too_short"
        elif rules.max_tokens and view.length > rules.max_tokens:
            found[view.rollout] = "too_long"
    if rules.max_repetition and record.tails is not None:
        measured = record.tails.repetition(rules.repetition_ngram, rules.repetition_tokens)
        for view in record.rollouts:
            if not view.demonstration and measured.get(view.rollout, 0.0) > rules.max_repetition:
                found.setdefault(view.rollout, "repetitive")
    return found


def masked(view: RolloutView) -> RolloutView:
    """The same with none of its tokens trained; assembly leaves out whatever has none."""
    return replace(view, num_tokens=0, oldest=-1, newest=-1)


def baseline_refusal(task: PendingTask) -> str:
    """Why the rewards of a complete group cannot be compared with its greedy rollout's; empty where they can, or it has none.

    `no_baseline`: that rollout gave no sample, or where agents have rewards of their own it has none of a role that others have.
    `empty`: no other rollout gave one. Both are said before any reward is there that would still have to come.
    """
    if task.baseline < 0 or not task.complete:
        return ""
    baseline, others = task.rollouts.get(task.baseline), task.compared.values()
    if baseline is None:
        return "no_baseline"
    if not others:
        return "empty"
    lacks = {role for one in others for role, _ in one.votes} - {role for role, _ in baseline.votes}
    return "no_baseline" if task.ready and lacks else ""


def group_refusal(state: FoldState, task: PendingTask, config: FoldConfig) -> str:
    """Why a complete group is dropped for its rewards; empty where it is not. Looks at rewards as they came, without any penalty.

    The greedy rollout's is one of those that are compared, and no part of the mean.
    """
    rewards = [one.reward for one in task.compared.values() if one.reward is not None]
    if not rewards or state.in_warmup(task.task):
        return ""
    compared, least = _compared(task).values(), config.filters.min_reward_std
    if config.drop_zero_variance and compared and all(_is_flat(votes, least) for votes in compared):
        return "zero_variance"
    if config.filters.mean_reward:
        lowest, highest = config.filters.mean_reward
        mean = _mean(rewards)
        return "too_hard" if mean < lowest else "too_easy" if mean > highest else ""
    return ""


def _compared(task: PendingTask) -> dict[str, list[float]]:
    """The rewards that are compared with each other: those of the rollouts, or of each agent's role by itself."""
    found: dict[str, list[float]] = {}
    for rollout in task.rollouts.values():
        for role, reward in rollout.votes:
            found.setdefault(role, []).append(reward)
    return found


def _is_flat(rewards: Sequence[float], least: float) -> bool:
    return min(rewards) == max(rewards) or (least > 0 and _deviation(rewards) <= least)


def _mean(values: Sequence[float]) -> float:
    """Rounded once, so that the order in which the values came has no part in it."""
    return math.fsum(values) / len(values)


def _deviation(values: Sequence[float]) -> float:
    """The unbiased one (n - 1); infinite for a single value, which has none."""
    if len(values) < 2:
        return math.inf
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
