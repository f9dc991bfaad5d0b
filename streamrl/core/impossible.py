"""Records that contradict what is known: they become dead letters, whoever sent them."""

from __future__ import annotations

from streamrl.core.admission import beyond_limits
from streamrl.core.records import Ended, Forked, Rewarded, Rollouts
from streamrl.core.state import FoldConfig, FoldState


def impossible(state: FoldState, record: Rollouts | Ended | Rewarded | Forked, config: FoldConfig) -> str:
    """Why this record cannot be, in words; empty where it can."""
    match record:
        case Rollouts():
            return _rollouts(state, record, config)
        case Ended():
            return _task(state, record.task, None if record.rollout is None else record.group_size, config)
        case Rewarded():
            return _reward(state, record, config)
        case Forked():
            return _fork(state, record)


def _rollouts(state: FoldState, record: Rollouts, config: FoldConfig) -> str:
    highest = max(r.highest for r in record.rollouts)
    if state.lost:  # by a gap: versions of former epochs may be beyond this one
        own = [high for r in record.rollouts for epoch, _, high in r.epochs if epoch >= state.epochs[-1].epoch]
        highest = max(own, default=-1)
    if highest > state.version.number:
        return f"expected tokens of versions up to {state.version.number}, got version {highest}, which had not been trained"
    for epoch, low, high in {span for r in record.rollouts for span in r.epochs}:
        if not state.exists(epoch, low, high):
            known = ", ".join(f"{e.epoch}.{e.first} to {e.epoch}.{'...' if e.last is None else e.last}" for e in state.epochs)
            return f"expected tokens of versions that there have been ({known}), got {epoch}.{low} to {epoch}.{high}"
    if problem := beyond_limits(record, config):
        return problem
    if not state.in_warmup(record.task) and any(r.demonstration for r in record.rollouts):
        return f"expected trained tokens that a model sampled, got a demonstration for task {record.task}, which is not of the warm-up"
    if problem := _task(state, record.task, record.group_size, config):
        return problem
    baseline = state.baseline_of(record.task, record.group_size, config)
    if trained := sum(r.num_tokens for r in record.rollouts if r.rollout == baseline):
        return f"expected a loss mask of zeros in rollout {baseline} of task {record.task}, the greedy one, got {trained} trained tokens"
    return ""


def _reward(state: FoldState, record: Rewarded, config: FoldConfig) -> str:
    task = state.pending.get(record.task)
    size = task.group_size if task is not None else config.group_size
    if size and record.rollout >= size:
        return f"expected a reward for one of {size} rollouts of task {record.task}, got rollout {record.rollout}"
    rollout = task.rollouts.get(record.rollout) if task is not None else None
    if rollout is not None and record.sample is not None and record.sample >= rollout.num_samples:
        return f"expected a reward for one of {rollout.num_samples} samples of rollout {record.rollout}, got sample {record.sample}"
    if rollout is not None and record.agent and record.agent not in (names := [one.agent for one in rollout.agents]):
        there = f"its agents are {', '.join(names)}" if names else "which has none"
        return f"expected a reward for an agent of rollout {record.rollout} of task {record.task}, {there}, got one for {record.agent}"
    if rollout is not None and not record.agent and (of := [one.agent for one in rollout.agents if record.sample in one.samples]):
        return f"expected agent {of[0]} in a reward for sample {record.sample} of rollout {record.rollout}, which is that agent's, got none"
    return _task(state, record.task, None, config)


def _fork(state: FoldState, record: Forked) -> str:
    newest = state.epochs[-1]
    if record.epoch > newest.epoch + 1 or (record.epoch > newest.epoch and record.last_before < newest.first):
        return f"expected epoch {newest.epoch + 1} after {newest}, got a mark of epoch {record.epoch} after version {record.last_before}"
    return ""


def _task(state: FoldState, task: int, group_size: int | None, config: FoldConfig) -> str:
    if task >= state.granted:
        return f"expected a task below {state.granted}, got task {task}, which had not been granted"
    size = 1 if state.in_warmup(task) else config.group_size
    if config.group_size and group_size is not None and group_size != size:
        return f"expected a group of {size}, which the configuration says, got one of {group_size} for task {task}"
    known = state.pending.get(task)
    if known is not None and group_size is not None and known.group_size != group_size:
        return f"expected a group of {known.group_size} as in earlier messages of task {task}, got {group_size}"
    return ""
