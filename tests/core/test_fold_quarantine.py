"""What is quarantined, word by word, what only looks impossible, what is lost, and gaps."""

import pytest
from msgspec.structs import replace

from streamrl.core.fold import BLOB_MISSING, DeadLetter, fold
from streamrl.core.gaps import bridged
from streamrl.core.records import Ended, Forked, Rewarded, Rollouts, RolloutView
from streamrl.core.state import Epoch, FoldConfig, FoldState, initial_state
from streamrl.schemas.ledger import Drop, Gap, LedgerEntry
from streamrl.schemas.versions import Version
from tests.support.records import Stream, config, tasks_of, view


def test_a_dead_letter_says_which_message_why_and_of_which_task() -> None:
    s = Stream(config(1, 0))
    s.mark()
    not_granted = "expected a task below 1, got task 7, which had not been granted"
    assert s.poison(0).dead == (DeadLetter(2, "unreadable", 0),)
    assert s.poison(None).dead == (DeadLetter(3, "unreadable", None),)
    s = Stream(config(1, 0))
    s.mark()
    assert s.group(7).dead == (DeadLetter(2, not_granted, 7),)
    assert s.end(7).dead == (DeadLetter(3, not_granted, 7),)
    assert s.reward(7, 0, 1.0).dead == (DeadLetter(4, not_granted, 7),)
    (fork,) = s.put(Forked(s.next(), 9, 1, 1)).dead
    assert (fork.sequence, fork.task) == (5, None)
    assert s.state.drops == (
        Drop(2, 7, (), "poison", not_granted),
        Drop(3, 7, (), "poison", not_granted),
        Drop(4, 7, (), "poison", not_granted),
        Drop(5, -1, (), "poison", fork.reason),
    )


def test_poison_ends_its_task_and_what_is_some_or_dropped_is_said_in_order() -> None:
    s = Stream(config())
    s.poison(1)
    assert s.state.drops == (Drop(1, 1, (), "poison", "unreadable", retires=True),)
    s = Stream(config())
    (letter,) = s.rollouts(0, view(0, reward=1.0), view(1, oldest=-1, reward=0.0)).dead
    assert "a demonstration for task 0" in letter.reason
    s = Stream(config())
    s.rollouts(0, view(1, reward=1.0), view(0, reward=1.0))
    assert s.dropped == [(1, 0, (0, 1), "zero_variance", True)]
    s = Stream(config(1))
    s.rollouts(0, view(0, oldest=-1, highest=0, tokens=0, reward=0.0), view(1, reward=1.0))
    assert s.state.drops == () and s.train().groups[0].task == 0


def test_an_end_keeps_what_was_said_and_counts_once() -> None:
    s = Stream(config(1, 1))
    s.end(0, 1)
    s.end(0)
    s.put(Ended(s.next(), "main", 0, None, 2, "failed", "and again"))
    assert s.state.drops == (
        Drop(1, 0, (1,), "failed", "said the producer"),
        Drop(2, 0, (), "failed", "said the producer", retires=True),
        Drop(3, 0, (), "late", "and again"),
    )
    s = Stream(config())
    s.rollouts(0, view(0, reward=1.0), group=3)
    s.end(0, 0, group=3)
    s.end(0, 1, group=3)
    s.rollouts(0, view(1, reward=0.5), group=3)
    assert s.dropped == [(2, 0, (0,), "duplicate", False), (3, 0, (1,), "failed", False), (4, 0, (1,), "duplicate", False)]
    assert list(s.state.pending[0].rollouts) == [0] and s.state.pending[0].ended == (1,)


def test_a_reward_for_one_sample_of_its_rollout_counts() -> None:
    s = Stream(config(1, 1))
    s.put(Rewarded(s.next(), 0, 1, 0.25, 1, sample=5))
    assert s.effects.dead == () and s.state.early_rewards == {"0/1": (1, 0.25)}, "how many samples there are is not known yet"
    s.rollouts(0, view(0, samples=2), view(1))
    s.put(Rewarded(s.next(), 0, 0, 0.5, 1, sample=1))
    assert s.effects.dead == () and s.train().groups[0].rollouts[0].reward == 0.5


def test_epochs_follow_each_other() -> None:
    s = Stream(config())
    s.put(Forked(s.next(), 1, 4, 5))
    s.put(Forked(s.next(), 2, 4, 4))
    assert s.effects.dead == () and s.state.epochs == (Epoch(0, 0, 5), Epoch(1, 4, 4), Epoch(2, 4)), "epoch 1 had one version"
    s.put(Forked(s.next(), 3, 6, 8))
    assert s.effects.dead == () and s.state.epochs == (Epoch(0, 0, 5), Epoch(1, 4, 4), Epoch(2, 4, 8), Epoch(3, 6))
    s.put(Forked(s.next(), 5, 6, 8))
    assert len(s.effects.dead) == 1 and len(s.state.epochs) == 4, "epoch 4 is missing"
    s.put(Forked(s.next(), 4, 5, 5))
    assert len(s.effects.dead) == 1 and len(s.state.epochs) == 4, "epoch 3 began after version 5"


def test_a_group_closes_without_what_is_lost_and_retires_when_nothing_is_left() -> None:
    stream = Stream(config(batch=1, drop_zero_variance=False))
    stream.group(0, (0.0, 1.0, 0.5))
    assert tasks_of(stream.close()) == (0,) and stream.state.ready == 1
    stream.end(0, 1, group=3, reason=BLOB_MISSING)
    assert stream.dropped == [(2, 0, (1,), BLOB_MISSING, False)]
    batch = stream.train()
    assert sorted(batch.groups[0].rollouts) == [0, 2] and stream.state.ready == 0 and stream.state.is_retired(0)
    stream = Stream(config(batch=1, drop_zero_variance=False))
    stream.group(0, (0.0, 1.0))
    stream.end(0, 0, reason=BLOB_MISSING)
    stream.end(0, 1, reason=BLOB_MISSING)
    assert stream.dropped == [(2, 0, (0,), BLOB_MISSING, False), (3, 0, (1,), BLOB_MISSING, True)]
    assert stream.close() is None and stream.state.is_retired(0) and stream.state.ready == 0 and not stream.state.pending
    stream = Stream(config(batch=1, drop_zero_variance=False))
    stream.rollouts(0, view(0, reward=1.0), group=3)
    stream.end(0, 0, group=3, reason=BLOB_MISSING)
    stream.rollouts(0, view(1, reward=1.0), group=3)
    assert stream.close() is None
    stream.rollouts(0, view(2, reward=0.0), group=3)
    assert sorted(stream.train().groups[0].rollouts) == [1, 2]
    stream = Stream(config(batch=1, drop_zero_variance=False))
    stream.end(0, 0, reason=BLOB_MISSING)
    stream.group(0, (0.0, 1.0))
    assert stream.dropped[-1][:4] == (2, 0, (0,), "duplicate") and sorted(stream.train().groups[0].rollouts) == [1]
    stream = Stream(config(batch=1, drop_zero_variance=True))
    stream.group(0, (0.0, 1.0, 1.0))
    stream.end(0, 0, group=3, reason=BLOB_MISSING)
    assert stream.dropped[-1][3] == "zero_variance" and stream.state.is_retired(0) and stream.state.ready == 0


def test_a_rollout_ends_once() -> None:
    stream = Stream(config(batch=1, drop_zero_variance=False))
    stream.group(0, (0.0, 1.0))
    for _ in range(2):
        stream.end(0, 0, reason=BLOB_MISSING)
    assert [reason for *_, reason, _ in stream.dropped] == [BLOB_MISSING, "duplicate"]
    stream.reward(0, 0, 0.7)
    assert stream.dropped[-1][3] == "superseded_reward"
    stream.rollouts(0, view(0, reward=1.0))  # a second delivery
    assert stream.dropped[-1][3] == "duplicate"
    stream.train()
    stream.end(0, 1, reason=BLOB_MISSING)
    assert stream.dropped[-1][3] == "late"


@pytest.mark.parametrize("reason", ["failed", "lost", "blob missing"])
def test_no_other_reason_ends_a_rollout_that_came(reason: str) -> None:
    stream = Stream(config(batch=1, drop_zero_variance=False))
    stream.group(0, (0.0, 1.0))
    stream.end(0, 0, reason=reason)
    assert stream.dropped == [(2, 0, (0,), "duplicate", False)] and len(stream.train().groups[0].rollouts) == 2


CONFIG = FoldConfig(batch_tasks=1, group_size=1, max_staleness=1)
LOST = Gap(lost="end", missing=((3, 5),), highest=Version(0, 5), known_by="manifest")
ENTRY = LedgerEntry(run="r", trainer="main", version=Version(1, 2), source="", used=(), cursor=0, granted=9, retired=0, gap=LOST)


def at(number: int) -> FoldState:
    state = initial_state(CONFIG)
    return FoldState(version=Version(0, number), granted=state.granted, grants=state.grants)


def record(epoch: int, *numbers: int, sequence: int = 1) -> Rollouts:
    """A message of task 0 with a rollout of each version."""
    views = (RolloutView(n, 1, 4, number, number, 1.0, number, ((epoch, number, number),)) for n, number in enumerate(numbers))
    return Rollouts(sequence, "main", 0, len(numbers), tuple(views))


def test_an_epoch_begins_once_and_those_whose_entries_are_lost_are_made_up_for() -> None:
    state = bridged(at(2), ENTRY)
    assert state.epochs == (Epoch(0, 0, last=5), Epoch(1, 3))
    assert (state.version, state.lost, state.granted) == (Version(0, 2), 5, 9)
    assert bridged(state, ENTRY) == state, "once"
    later = LedgerEntry(run="r", trainer="main", version=Version(3, 2), source="", used=(), cursor=0, granted=1, retired=0, gap=LOST)
    assert [epoch.epoch for epoch in bridged(at(2), later).epochs] == [0, 1, 2, 3]


def test_an_epoch_may_begin_with_the_version_that_is_gone_on_from() -> None:
    entry = replace(ENTRY, gap=replace(LOST, first=2))
    state = bridged(at(2), entry)
    assert (state.version, state.epochs, state.grant.epoch) == (Version(1, 2), (Epoch(0, 0, last=5), Epoch(1, 2)), 1)
    assert bridged(state, entry) == state, "once"
    state, effects = fold(state, record(1, 2), CONFIG)
    assert state.drops[0].reason == "zero_variance" and not effects.dead


@pytest.mark.parametrize("number", [0, 1, 3])
def test_other_states_are_left_as_they_are(number: int) -> None:
    assert bridged(at(number), ENTRY) == at(number)


def test_samples_of_lost_versions_end_their_tasks_and_no_others_do() -> None:
    before, effects = fold(at(2), record(0, 4), CONFIG)
    assert before.drops[0].reason == "poison" and effects.dead
    state, effects = fold(bridged(at(2), ENTRY), record(0, 4), CONFIG)
    assert (state.drops[0].reason, state.drops[0].sequence) == ("lost_version", 1) and state.is_retired(0) and not effects.dead
    for epoch, number in ((0, 6), (1, 4)):
        state, effects = fold(bridged(at(2), ENTRY), record(epoch, number), CONFIG)
        assert effects.dead, "that one never was"
    state, _ = fold(bridged(at(2), ENTRY), record(0, 2), CONFIG)
    assert state.drops[0].reason == "zero_variance"
    state, effects = fold(bridged(at(2), ENTRY), record(0, 2, 4), replace(CONFIG, group_size=2))
    assert state.drops[0].reason == "lost_version" and state.is_retired(0) and not effects.dead
    state = bridged(at(2), ENTRY)
    _, effects = fold(replace(state, version=Version(1, 3)), record(1, 3, 4), replace(CONFIG, group_size=2))
    assert effects.dead
    state, effects = fold(bridged(at(0), gap(1, 0, Version(0, 5))), record(0, 4), CONFIG)
    assert state.drops[0].reason == "lost_version" and not effects.dead
    state = bridged(bridged(at(2), ENTRY), gap(2, 2, Version(1, 7)))
    state, effects = fold(state, record(1, 4), CONFIG)
    assert state.drops[0].reason == "lost_version" and not effects.dead


def gap(epoch: int, number: int, highest: Version) -> LedgerEntry:
    lost = Gap(lost="end", missing=(), highest=highest, known_by="manifest")
    return LedgerEntry(
        run="r", trainer="main", version=Version(epoch, number), source="", used=(), cursor=0, granted=9, retired=0, gap=lost
    )
