"""The fold: pure functions that decide everything about the sample stream.

```text
fold(state, record, config)  -> (state, effects)      one record in stream order
close(state, config)         -> batch or None         the B oldest admissible groups, once there are B
trained(state, batch, ...)   -> state                 after the step: version + 1, its tasks retired, credits freed
```

No clock, no arrival timing, no await. A live trainer, one that resumes, a replay, a tap and a simulation drive the same functions, so they
decide alike. Every issued task ends at least once on the stream; the first end in stream order counts, and whatever comes for it
later is dropped and counted: credits never leak.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from streamrl.core.admission import admit
from streamrl.core.expiry import expired, must_wait, unrewarded
from streamrl.core.filters import baseline_refusal, group_refusal
from streamrl.core.gradings import first_reward, is_for, with_early, without_early
from streamrl.core.impossible import impossible
from streamrl.core.pacing import refilled, released
from streamrl.core.records import Ended, Forked, Marked, Poison, Record, Rewarded, Rollouts
from streamrl.core.state import FoldConfig, FoldState, PendingAgent, PendingRollout, PendingTask
from streamrl.schemas.control import Grant
from streamrl.schemas.ledger import NO_MESSAGE, Drop

LOST_VERSION = "lost_version"
"""Reason of a drop: a token is of a version that was lost."""
BLOB_MISSING = "blob_missing"
"""Reason of a tombstone: what a rollout's samples keep beside them is gone, or is not what they say. It ends a rollout that came, too."""
WARMUP_SMOOTHING = 0.7
"""Weight of the past in the warm-up's smoothed score."""


class DeadLetter(msgspec.Struct, frozen=True):
    """A message to be quarantined."""

    sequence: int
    reason: str
    task: int | None = None


class Effects(msgspec.Struct, frozen=True):
    """What the shell has to do after one record; all of it is idempotent."""

    dead: tuple[DeadLetter, ...] = ()
    grant: Grant | None = None
    """Set when credits have been freed."""


class Batch(msgspec.Struct, frozen=True):
    """A closed batch: groups of one source, by task."""

    source: str
    groups: tuple[PendingTask, ...]

    @property
    def sequences(self) -> tuple[int, ...]:
        """Messages it needs, rising, without repeats."""
        return tuple(sorted({r.sequence for group in self.groups for r in group.rollouts.values()}))


def fold(state: FoldState, record: Record, config: FoldConfig) -> tuple[FoldState, Effects]:
    """Take in the next record of the stream.

    Records at or below the cursor have been folded before and change nothing.

    Example: a batch is one task, whose only rollout is told to have failed: the task retires, and its credit is given again.

        >>> from streamrl.core.state import initial_state
        >>> config = FoldConfig(batch_tasks=1, group_size=1, max_staleness=1)
        >>> state = initial_state(config)
        >>> state.granted, state.retired
        (2, 0)
        >>> state, effects = fold(state, Ended(sequence=1, task=0, rollout=None, group_size=1, reason="failed", source="main"), config)
        >>> state.retired, state.drops[0].reason, effects.grant.granted
        (1, 'failed', 3)
    """
    if record.sequence <= state.cursor:
        return state, Effects()
    before, retired = state.granted, state.retired
    dead: tuple[DeadLetter, ...] = ()
    match record:
        case Rollouts():
            lengths = [view.length for view in record.rollouts if view.length]
            state = replace(state, stored_tokens=state.stored_tokens + sum(lengths))
            problem = impossible(state, record, config)
            if problem:
                state, dead = _poison(state, record.sequence, record.task, problem, lengths=lengths)
            elif max(r.highest for r in record.rollouts) > state.version.number:
                end = Ended(record.sequence, record.source, record.task, None, record.group_size, LOST_VERSION)
                state = _take_end(state, end, config, lengths=lengths)
            else:
                state = _take_rollouts(state, record, config)
        case Ended():
            problem = impossible(state, record, config)
            if problem:
                state, dead = _poison(state, record.sequence, record.task, problem)
            else:
                state = _take_end(state, record, config)
        case Rewarded():
            problem = impossible(state, record, config)
            if problem:
                state, dead = _poison(state, record.sequence, record.task, problem, retires=False)
            else:
                state = _take_reward(state, record, config)
        case Poison():
            state, dead = _poison(state, record.sequence, record.task, record.reason)
        case Forked():
            problem = impossible(state, record, config)
            if problem:
                state, dead = _poison(state, record.sequence, None, problem)
            else:
                state = state.with_epoch(record.epoch, record.first, record.last_before)
        case Marked():
            pass
    ended = state.retired - retired
    state = replace(state, cursor=record.sequence).with_grant(refilled(before, state.retired, ended, config))
    return state, Effects(dead, state.grant if state.granted != before else None)


def close(state: FoldState, config: FoldConfig) -> Batch | None:
    """The B oldest ready groups (by oldest token version, then task), or None.

    All groups of a batch have one source: the warm-up's tasks are trained to the last before any other; its last batch may be short.
    Under `wait` no batch closes while a task granted at version <= v - S is unfinished.
    """
    if not state.ready:
        return None
    in_warmup = state.warmup_end is None or state.watermark < state.warmup_end
    ready = [task for task in state.pending.values() if task.ready and state.in_warmup(task.task) == in_warmup]
    wanted = config.batch_tasks
    if in_warmup and state.warmup_end is not None:
        left = sum(1 for task in range(state.watermark, state.warmup_end) if task not in state.retired_above)
        wanted = min(wanted, left)
    if len(ready) < wanted or not ready:
        return None
    if config.stale == "wait" and not in_warmup and must_wait(state, config):
        return None
    ready.sort(key=lambda task: (task.oldest, task.task))
    chosen = sorted(ready[:wanted], key=lambda task: task.task)
    return Batch(chosen[0].source, tuple(chosen))


def trained(state: FoldState, batch: Batch, config: FoldConfig, *, warm: bool, score: float = 0.0) -> FoldState:
    """After the step on `batch`: the version grows by one, its tasks are retired, groups now too old are dropped, and tasks expire.

    Args:
        state: the state the batch was closed on.
        batch: what `close` gave.
        config: the decisions' configuration.
        warm: whether the warm-up has ended with or before this batch (`is_warm`, or what the ledger says).
        score: the warm-up's score of this batch; not looked at afterwards.
    """
    state = _retire(state, *(group.task for group in batch.groups))
    retired = state.retired
    in_warmup = state.warmup_end is None
    if in_warmup:
        smoothed = smooth(state, score)
        end = state.granted if warm else None
        state = replace(state, warmup_score=smoothed, warmup_steps=state.warmup_steps + 1, warmup_end=end)
    elif state.in_warmup(batch.groups[0].task):
        state = replace(state, warmup_steps=state.warmup_steps + 1)
    state = replace(
        state,
        version=state.version.next(),
        newest_drops=(),
        older_drops=(),
        reward_sum=0.0,
        reward_count=0,
        stored_tokens=0,
        dropped={},
    )
    if config.stale != "wait":
        for task in [t for t in state.pending.values() if t.ready and _too_old(state, t, config)]:
            state = _drop_group(state, task, "stale")
    for task in [t for t in state.pending.values() if unrewarded(state, t, config)]:
        state = _drop_group(state, task, "unrewarded")
    for number in expired(state, config):
        state = _expire(state, number, config)
    return state.with_grant(released(state.granted, state.retired, state.ready, state.retired - retired, config))


def smooth(state: FoldState, score: float) -> float:
    """The warm-up's smoothed score after one more batch."""
    if state.warmup_steps == 0:
        return score
    return WARMUP_SMOOTHING * state.warmup_score + (1 - WARMUP_SMOOTHING) * score


def is_warm(state: FoldState, config: FoldConfig, score: float) -> bool:
    """Whether the warm-up ends with the batch just trained (or ended before)."""
    if state.warmup_end is not None:
        return True
    return state.warmup_steps + 1 >= config.warmup_steps or smooth(state, score) >= config.warmup_until


def _take_rollouts(state: FoldState, record: Rollouts, config: FoldConfig) -> FoldState:
    names = tuple(r.rollout for r in record.rollouts)
    lengths = {r.rollout: r.length for r in record.rollouts if r.length}
    if state.is_retired(record.task):
        return state.with_drop(Drop(record.sequence, record.task, names, "late"), tuple(lengths.values()))
    task = state.pending.get(record.task) or _begun(state, record, config)
    repeats = tuple(k for k in names if k in task.rollouts or k in task.ended)
    if repeats:
        state = state.with_drop(Drop(record.sequence, record.task, repeats, "duplicate"), [lengths[k] for k in repeats if k in lengths])
    task, drops, views = admit(task, record, [view for view in record.rollouts if view.rollout not in repeats], config)
    for drop in drops:
        state = state.with_drop(drop, [lengths[k] for k in drop.rollouts if k in lengths])
    if len(task.ended) == task.group_size:
        return _retire(state, record.task)
    fresh = {}
    early = state.early_rewards
    for view in views:
        revision, reward = first_reward(early, record.task, view, view.reward) if early else (0, view.reward)
        rollout = PendingRollout(
            sequence=record.sequence,
            num_samples=view.num_samples,
            num_tokens=view.num_tokens,
            oldest=view.oldest,
            newest=view.newest,
            reward=reward,
            revision=revision,
            arrived=state.version.number,
            sampled=lengths.get(view.rollout, 0),
            agents=tuple(PendingAgent(one.agent, one.samples, one.reward) for one in view.agents),
            grading=view.grading,
        )
        for one in view.agents if early else ():
            own_revision, own = first_reward(early, record.task, view, one.reward, one.agent)
            rollout = rollout if own_revision == 0 or own is None else rollout.with_reward(own, own_revision, one.agent)
        early = without_early(early, record.task, view.rollout) if early else early
        fresh[view.rollout] = rollout
    if not fresh and not drops:
        return state
    task = replace(task, rollouts={**task.rollouts, **fresh})
    return _settle(replace(state, early_rewards=early), task, config)


def _begun(state: FoldState, record: Rollouts | Ended, config: FoldConfig) -> PendingTask:
    """A task at its first record."""
    baseline = state.baseline_of(record.task, record.group_size, config)
    return PendingTask(record.task, record.source, record.group_size, {}, baseline=baseline)


def _take_end(state: FoldState, record: Ended, config: FoldConfig, *, lengths: Sequence[int] = ()) -> FoldState:
    """`lengths` are those of answers that came with it."""
    if state.is_retired(record.task):
        return state.with_drop(Drop(record.sequence, record.task, (), "late", record.detail), lengths)
    known = state.pending.get(record.task)
    if record.rollout is None:
        if known is not None:
            state = _drop_group(state, known, record.reason, retires=False)
        drop = Drop(record.sequence, record.task, (), record.reason, record.detail, retires=True)
        return _retire(state.with_drop(drop, lengths), record.task)
    task = known or _begun(state, record, config)
    came = task.rollouts.get(record.rollout)
    if came is not None and record.grading and (came.rewarded or not is_for(record, came)):
        return state.with_drop(Drop(record.sequence, record.task, (record.rollout,), "superseded_reward"))
    if record.rollout in task.ended or (came is not None and record.reason != BLOB_MISSING and not record.grading):
        return state.with_drop(Drop(record.sequence, record.task, (record.rollout,), "duplicate"))
    others = {k: one for k, one in task.rollouts.items() if k != record.rollout}
    task = replace(task, rollouts=others, ended=(*task.ended, record.rollout))
    finishes = len(task.ended) == task.group_size
    drop = Drop(record.sequence, record.task, (record.rollout,), record.reason, record.detail, retires=finishes)
    state = state.with_drop(drop, [came.length] if came is not None and came.length else [])
    return _retire(state, record.task) if finishes else _settle(state, task, config)


def _take_reward(state: FoldState, record: Rewarded, config: FoldConfig) -> FoldState:
    if state.is_retired(record.task):
        return state.with_drop(Drop(record.sequence, record.task, (record.rollout,), "superseded_reward"))
    task = state.pending.get(record.task)
    rollout = task.rollouts.get(record.rollout) if task else None
    if task is not None and record.rollout in task.ended:
        return state.with_drop(Drop(record.sequence, record.task, (record.rollout,), "superseded_reward"))
    if task is None or rollout is None:
        early = with_early(state.early_rewards, record)
        if early is None:
            return state.with_drop(Drop(record.sequence, record.task, (record.rollout,), "superseded_reward"))
        return replace(state, early_rewards=early)
    if record.revision <= rollout.revision_of(record.agent) or not is_for(record, rollout):
        return state.with_drop(Drop(record.sequence, record.task, (record.rollout,), "superseded_reward"))
    rollout = rollout.with_reward(record.reward, record.revision, record.agent)
    return _settle(state, replace(task, rollouts={**task.rollouts, record.rollout: rollout}), config)


def _poison(
    state: FoldState, sequence: int, task: int | None, reason: str, *, retires: bool = True, lengths: Sequence[int] = ()
) -> tuple[FoldState, tuple[DeadLetter, ...]]:
    """Quarantine a message with answers of these `lengths`; its task, when known and open, ends here (unless told not to)."""
    dead = (DeadLetter(sequence, reason, task),)
    open_task = retires and task is not None and task < state.granted and not state.is_retired(task)
    if task is None or not open_task:
        return state.with_drop(Drop(sequence, -1 if task is None else task, (), "poison", reason), lengths), dead
    known = state.pending.get(task)
    if known is not None:
        state = _drop_group(state, known, "poison", retires=False)
    return _retire(state.with_drop(Drop(sequence, task, (), "poison", reason, retires=True), lengths), task), dead


def _settle(state: FoldState, task: PendingTask, config: FoldConfig) -> FoldState:
    """Put a task back into `pending`, or drop its group when it is complete and not admissible."""
    before = state.pending.get(task.task)
    was_ready = before is not None and before.ready
    state = replace(state, pending={**state.pending, task.task: task}, ready=state.ready + int(task.ready) - int(was_ready))
    if task.ready and not was_ready:
        rewards = [r.reward for r in task.compared.values() if r.reward is not None]
        state = replace(state, reward_sum=state.reward_sum + sum(rewards), reward_count=state.reward_count + len(rewards))
    if reason := baseline_refusal(task):
        return _drop_group(state, task, reason)
    if not task.ready:
        return state
    if not any(r.num_tokens for r in task.rollouts.values()):
        return _drop_group(state, task, "empty")
    if config.stale != "wait" and _too_old(state, task, config):
        return _drop_group(state, task, "stale")
    if reason := group_refusal(state, task, config):
        return _drop_group(state, task, reason)
    return state


def _too_old(state: FoldState, task: PendingTask, config: FoldConfig) -> bool:
    """Beyond the bound; under `mask` only when not one token of the group is within it."""
    ages = [r.newest if config.stale == "mask" else r.oldest for r in task.rollouts.values() if r.oldest >= 0]
    if not ages:
        return False
    limit = max(ages) if config.stale == "mask" else min(ages)
    return state.version.number - limit > config.max_staleness


def _expire(state: FoldState, task: int, config: FoldConfig) -> FoldState:
    """End a task that no record has ended; its drop names no message, because there is none that did it."""
    known = state.pending.get(task)
    if known is not None:
        state = _drop_group(state, known, "expired", retires=False)
    detail = f"it has rollouts that have not ended {config.expire_versions} versions after its grant"
    return _retire(state.with_drop(Drop(NO_MESSAGE, task, (), "expired", detail, retires=True)), task)


def _drop_group(state: FoldState, task: PendingTask, reason: str, *, retires: bool = True) -> FoldState:
    """Drop all rollouts of a pending task, one record per message, and (unless told not to) retire it."""
    by_sequence: dict[int, list[int]] = {}
    for index, rollout in sorted(task.rollouts.items()):
        by_sequence.setdefault(rollout.sequence, []).append(index)
    last = max(by_sequence, default=0)
    for sequence, rollouts in sorted(by_sequence.items()):
        drop = Drop(sequence, task.task, tuple(rollouts), reason, retires=retires and sequence == last)
        answers = (task.rollouts[k] for k in rollouts)
        state = state.with_drop(drop, [one.length for one in answers if one.length])
    return _retire(state, task.task) if retires else state


def _retire(state: FoldState, *tasks: int) -> FoldState:
    pending = dict(state.pending)
    gone = [pending.pop(task, None) for task in tasks]
    above = set(state.retired_above).union(tasks)
    watermark = state.watermark
    while watermark in above:
        above.remove(watermark)
        watermark += 1
    early = state.early_rewards
    if early:
        early = {key: value for key, value in early.items() if int(key.split("/")[0]) not in tasks}
    ready = state.ready - sum(task.ready for task in gone if task is not None)
    return replace(state, pending=pending, ready=ready, watermark=watermark, retired_above=frozenset(above), early_rewards=early)
