from __future__ import annotations

import pytest
from msgspec.structs import replace

from streamrl.core.fold import fold
from streamrl.core.gaps import bridged
from streamrl.core.records import Rollouts, RolloutView
from streamrl.core.state import Epoch, FoldConfig, FoldState, initial_state
from streamrl.schemas.ledger import Gap, LedgerEntry
from streamrl.schemas.versions import Version

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


def test_an_epoch_begins_and_what_was_granted_counts() -> None:
    state = bridged(at(2), ENTRY)
    assert state.epochs == (Epoch(0, 0, last=5), Epoch(1, 3))
    assert (state.version, state.lost, state.granted) == (Version(0, 2), 5, 9)
    assert bridged(state, ENTRY) == state, "once"


def test_an_epoch_may_begin_with_the_version_that_is_gone_on_from() -> None:
    entry = replace(ENTRY, gap=replace(LOST, first=2))
    state = bridged(at(2), entry)
    assert (state.version, state.epochs, state.grant.epoch) == (Version(1, 2), (Epoch(0, 0, last=5), Epoch(1, 2)), 1)
    assert bridged(state, entry) == state, "once"
    state, effects = fold(state, record(1, 2), CONFIG)
    assert state.drops[0].reason == "zero_variance" and not effects.dead


def test_epochs_whose_entries_are_lost_too_are_made_up_for() -> None:
    later = LedgerEntry(run="r", trainer="main", version=Version(3, 2), source="", used=(), cursor=0, granted=1, retired=0, gap=LOST)
    assert [epoch.epoch for epoch in bridged(at(2), later).epochs] == [0, 1, 2, 3]


@pytest.mark.parametrize("number", [0, 1, 3])
def test_other_states_are_left_as_they_are(number: int) -> None:
    assert bridged(at(number), ENTRY) == at(number)


def test_a_sample_of_a_lost_version_ends_its_task_and_is_not_taken_for_an_invented_one() -> None:
    before, effects = fold(at(2), record(0, 4), CONFIG)
    assert before.drops[0].reason == "poison" and effects.dead
    state, effects = fold(bridged(at(2), ENTRY), record(0, 4), CONFIG)
    assert (state.drops[0].reason, state.drops[0].sequence) == ("lost_version", 1) and state.is_retired(0) and not effects.dead
    for epoch, number in ((0, 6), (1, 4)):
        state, effects = fold(bridged(at(2), ENTRY), record(epoch, number), CONFIG)
        assert effects.dead, "that one never was"


def test_a_sample_of_a_version_before_the_gap_is_used() -> None:
    state, _ = fold(bridged(at(2), ENTRY), record(0, 2), CONFIG)
    assert state.drops[0].reason == "zero_variance"


def gap(epoch: int, number: int, highest: Version) -> LedgerEntry:
    lost = Gap(lost="end", missing=(), highest=highest, known_by="manifest")
    return LedgerEntry(
        run="r", trainer="main", version=Version(epoch, number), source="", used=(), cursor=0, granted=9, retired=0, gap=lost
    )


def test_one_sample_of_a_lost_version_ends_the_whole_task() -> None:
    state, effects = fold(bridged(at(2), ENTRY), record(0, 2, 4), replace(CONFIG, group_size=2))
    assert state.drops[0].reason == "lost_version" and state.is_retired(0) and not effects.dead


def test_one_sample_of_a_version_that_never_was_is_found_among_others() -> None:
    state = bridged(at(2), ENTRY)
    _, effects = fold(replace(state, version=Version(1, 3)), record(1, 3, 4), replace(CONFIG, group_size=2))
    assert effects.dead


def test_a_run_that_lost_everything_knows_what_it_had() -> None:
    state, effects = fold(bridged(at(0), gap(1, 0, Version(0, 5))), record(0, 4), CONFIG)
    assert state.drops[0].reason == "lost_version" and not effects.dead


def test_versions_that_a_later_gap_lost_are_known_too() -> None:
    state = bridged(bridged(at(2), ENTRY), gap(2, 2, Version(1, 7)))
    state, effects = fold(state, record(1, 4), CONFIG)
    assert state.drops[0].reason == "lost_version" and not effects.dead
