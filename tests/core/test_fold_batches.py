"""Which batch closes, what the step on it leaves behind, and what the fold counts of tokens."""

import random

import pytest
from msgspec.structs import replace

from streamrl.core.fold import Batch, is_warm, smooth, trained
from streamrl.core.lengths import histogram
from streamrl.core.records import Share
from streamrl.core.state import FoldState, PendingRollout, PendingTask, Tally, initial_state
from streamrl.schemas.versions import Version
from tests.support.records import Stream, config, tasks_of, view


def test_a_batch_needs_each_of_its_messages_once_in_their_order() -> None:
    def group(task: int, *sequences: int) -> PendingTask:
        return PendingTask(task, "main", 2, {k: PendingRollout(at, 1, 3, 0, 0, 1.0) for k, at in enumerate(sequences)})

    assert Batch("main", (group(0, 16, 3), group(1, 8, 8), group(2, 3, 1))).sequences == (1, 3, 8, 16)


def test_groups_that_are_not_ready_are_passed_over_and_the_first_task_has_the_source() -> None:
    s = Stream(config(2, 1))
    s.rollouts(0, view(0, oldest=0, reward=1.0))
    s.group(1)
    s.group(2)
    assert tasks_of(s.close()) == (1, 2)
    s = Stream(config(2, 1))
    s.rollouts(1, view(0, reward=0.0), view(1, reward=1.0), source="other")
    s.rollouts(0, view(0, reward=0.0), view(1, reward=1.0), source="main")
    batch = s.close()
    assert batch is not None and batch.source == "main"


def test_age_goes_before_task_and_a_batch_lies_in_the_order_of_tasks() -> None:
    s = Stream(config(2, 3))
    s.group(0)
    s.group(1)
    s.train()
    s.group(2, oldest=1)
    s.group(4, oldest=0)
    s.group(3, oldest=0)
    s.group(5, oldest=0)
    assert tasks_of(s.train()) == (3, 4)
    assert s.state.ready == 2 and list(s.state.pending) == [2, 5]
    assert tasks_of(s.train()) == (2, 5)
    assert s.state.ready == 0


def test_the_last_batch_of_the_warm_up_is_what_is_open_and_no_old_task_is_waited_for() -> None:
    s = Stream(config(2, 1, warmup_steps=8))
    for task in range(2):
        s.demonstration(task)
    s.train(warm=True)
    assert (s.state.watermark, s.state.warmup_end) == (2, 4)
    s.end(3)
    assert s.close() is None, "task 2 is open"
    s.demonstration(2)
    assert tasks_of(s.close()) == (2,), "3 has ended: one of the warm-up's two last tasks is left"
    s = Stream(config(1, 0, stale="wait", warmup_steps=8))
    s.state = replace(s.state, granted=3, grants=((3, 0),))
    s.demonstration(1)
    assert tasks_of(s.close()) == (1,), "task 0 was granted at version 0 = v - S and is unfinished"


def test_what_is_counted_from_batch_to_batch_begins_again() -> None:
    s = Stream(config(1, 1))
    s.group(1, (0.25, 0.5))
    for _ in range(300):
        s.poison(None)
    s.group(0, (0.5, 2.0))
    assert (s.state.reward_sum, s.state.reward_count, s.state.num_drops) == (3.25, 4, 300)
    s.train()
    assert (s.state.reward_sum, s.state.reward_count, s.state.num_drops, s.state.drops) == (0.0, 0, 0, ())
    assert (s.state.newest_drops, s.state.older_drops) == ((), ())


def test_grants_are_remembered_as_far_back_as_open_tasks_need() -> None:
    s = Stream(config(1, 1))
    assert s.state.grants == ((2, 0),)
    s.group(1)
    s.train()
    assert s.state.grants == ((2, 0), (3, 1)), "task 0 is open, which the first grant allowed"
    s.mark()
    assert s.state.grants == ((2, 0), (3, 1))
    s.end(0)
    assert (s.state.watermark, s.state.grants) == (2, ((4, 1),)), "below 2 all have ended; version 1 has one grant, the higher"
    s.group(3, oldest=1)
    s.train()
    assert s.state.grants == ((4, 1), (5, 2))
    s.group(4, oldest=1)
    s.train()
    assert (s.state.version, s.state.grants) == (Version(0, 3), ((4, 1), (5, 2), (6, 3)))


def test_while_holding_a_step_replaces_what_it_drops() -> None:
    s = Stream(config(1, 9, hold_ahead=True, late_versions=1))  # window 10
    s.rollouts(0, view(0), view(1))
    for task in range(1, 6):
        s.group(task)
    s.train()
    assert s.dropped == [(1, 0, (0, 1), "unrewarded", True)]
    # 4 are ready: the step releases max(0, 1 + ceil((1 - 4) / 2)) = 0, and one for the task that was dropped.
    assert (s.state.retired, s.state.ready, s.state.granted) == (2, 4, 11)


def test_what_is_granted_while_holding_step_by_step() -> None:
    s = Stream(config(2, 3, hold_ahead=True))  # window 8
    assert s.state.granted == 8
    for task in range(8):
        s.group(task)
    s.train()
    assert (s.state.ready, s.state.granted) == (6, 8), "2 + ceil((2 - 6) / 2) = 0"
    s.train()
    assert (s.state.ready, s.state.granted) == (4, 9), "2 + ceil((2 - 4) / 2) = 1"
    s.end(8)
    assert s.state.granted == 10, "one that ended, one in its place"
    s.train()
    assert (s.state.ready, s.state.granted) == (2, 12), "2 + ceil((2 - 2) / 2) = 2"
    s.train()
    assert (s.state.ready, s.state.granted) == (0, 15), "2 + ceil((2 - 0) / 2) = 3"


def test_the_score_is_smoothed_and_none_counts_as_nothing() -> None:
    state = initial_state(config(1, 0, warmup_steps=4))
    assert smooth(state, 0.25) == 0.25, "the first one is taken as it is"
    later = replace(state, warmup_steps=2, warmup_score=0.5)
    assert smooth(later, 0.25) == pytest.approx(0.7 * 0.5 + 0.3 * 0.25)
    c = config(1, 1, warmup_steps=4)
    s = Stream(c)
    s.demonstration(0)
    batch = s.close()
    assert batch is not None
    after = trained(s.state, batch, c, warm=False)
    assert (after.warmup_score, after.warmup_steps, after.warmup_end) == (0.0, 1, None)


@pytest.mark.parametrize(
    ("steps", "score", "warm"),
    [
        (0, 0.0, False),  # the first of three
        (1, 0.0, False),
        (2, 0.0, True),  # the third
        (3, 0.0, True),
        (0, 0.75, True),  # the first score is not smoothed, and reaches the bound
        (0, 0.5, False),
        (1, 0.75, False),  # 0.7 * 0.25 + 0.3 * 0.75 = 0.4
        (1, 2.0, True),  # 0.7 * 0.25 + 0.3 * 2 = 0.775
    ],
)
def test_the_warm_up_ends_by_its_length_or_its_score(steps: int, score: float, warm: bool) -> None:
    c = config(1, 1, warmup_steps=3, warmup_until=0.75)
    state = replace(initial_state(c), warmup_steps=steps, warmup_score=0.25)
    assert is_warm(state, c, score) == warm


def test_a_warm_up_that_has_ended_stays_so() -> None:
    c = config(1, 1, warmup_steps=3)
    assert is_warm(replace(initial_state(c), warmup_end=5, warmup_steps=1), c, 0.0)
    assert is_warm(replace(initial_state(c), warmup_end=0), c, 0.0)


def dropped(s: Stream) -> dict[str, int]:
    return {reason: tally.tokens for reason, tally in s.state.dropped.items()}


def test_every_way_to_be_dropped_counts_its_tokens_for_the_next_batch() -> None:
    s = Stream(config(1, 1, drop_zero_variance=True, vocab_size=10))
    s.rollouts(0, view(0, reward=0.0, tokens=5), view(1, reward=1.0, tokens=7))
    s.rollouts(0, view(1, reward=1.0, tokens=11))
    s.rollouts(1, view(0, reward=1.0, tokens=2), view(1, reward=1.0, tokens=3))
    s.rollouts(1, view(0, reward=1.0, tokens=13))
    s.end(1)
    s.rollouts(2, view(0, reward=1.0, tokens=17, highest=40))
    s.rollouts(3, view(0, reward=1.0, tokens=19))
    s.end(3)
    assert dropped(s) == {"duplicate": 11, "zero_variance": 5, "late": 13, "poison": 17, "failed": 19}
    assert s.state.dropped["zero_variance"].lengths == histogram([2, 3])
    assert s.state.stored_tokens == 5 + 7 + 11 + 2 + 3 + 13 + 17 + 19 and s.state.waiting_tokens == 12
    s.train()
    assert (s.state.dropped, s.state.stored_tokens, s.state.waiting_tokens) == ({}, 0, 0)
    s = Stream(config(1, 1))
    s.group(0)
    s.train()
    s.group(1)
    s.rollouts(2, view(0, reward=0.0, tokens=40), view(1, reward=1.0, tokens=2))
    s.train()
    assert s.state.dropped == {"stale": Tally(42, histogram([40, 2]))}


@pytest.mark.parametrize("stale", ["drop", "mask"])
def test_expired_and_lost_answers_are_counted(stale: str) -> None:
    s = Stream(config(1, 2, stale=stale, expire_versions=3))
    s.rollouts(0, view(0, reward=0.0, tokens=23), group=2)
    for task in (1, 2, 3):
        s.group(task, oldest=task - 1)
        s.train()
    assert dropped(s) == {"expired": 23}
    s.state = replace(s.state, lost=9)
    s.rollouts(4, view(0, newest=7, highest=7, tokens=29), group=2)
    assert dropped(s) == {"expired": 23, "lost_version": 29}


def test_answers_that_are_refused_masked_or_of_closed_tasks_are_counted() -> None:
    s = Stream(config(1, 1), replace(Stream(config(1, 1)).state, lost=9))
    s.rollouts(99, view(0, tokens=5), view(1, tokens=0))
    assert s.state.dropped == {"poison": Tally(5, histogram([5]))}, "that task had not been granted"
    s.end(0)
    s.rollouts(0, view(0, tokens=7, highest=3))
    assert s.state.dropped["late"] == Tally(7, histogram([7])), "it is late before it is lost"
    s = Stream(config(1, 1))
    s.rollouts(1, view(0, tokens=0), view(1, tokens=0, grading=7))
    assert [one.sampled for one in s.state.pending[1].rollouts.values()] == [0, 0]
    s.end(1, 1, reason="timeout", grading=7)
    s.end(0)
    s.rollouts(0, view(0, tokens=0))
    assert [drop.reason for drop in s.state.drops] == ["timeout", "failed", "late"] and s.state.dropped == {}
    cut = replace(view(0, reward=1.0, tokens=31), shares=(Share(False, True, 31, 0, 0),))
    s = Stream(config(1, overlong="drop", drop_zero_variance=False))
    s.rollouts(0, cut, view(1, reward=0.0, tokens=3))
    assert dropped(s) == {"truncated": 31} and s.state.waiting_tokens == 3
    s = Stream(config(1, overlong="mask"))
    s.rollouts(0, cut, view(1, reward=0.0, tokens=3))
    assert s.state.pending[0].rollouts[0].num_tokens == 0
    assert (dropped(s), s.state.waiting_tokens) == ({}, 34)


def test_demonstrations_are_no_answers() -> None:
    s = Stream(config(1, warmup_steps=3))
    s.demonstration(0)
    assert (s.state.stored_tokens, s.state.waiting_tokens) == (0, 0)
    s = Stream(config(1, warmup_steps=1))
    s.demonstration(0)
    s.demonstration(0)
    s.end(0)
    s.demonstration(0)
    s.demonstration(99)
    s.demonstration(1)
    s.train()
    s.demonstration(s.state.granted - 1)
    assert [drop.reason for drop in s.state.drops] == ["poison"]
    assert s.state.dropped == {}


def test_a_state_of_an_earlier_build_takes_the_trained_tokens_for_all() -> None:
    s = Stream(config(2))
    s.group(0)
    older = s.state.encode().replace(b"\xa7sampled\x03", b"\xa7another\x03")
    assert FoldState.decode(older).waiting_tokens == 6
    assert PendingRollout(1, 1, 4, -1, -1, None).length == 0


@pytest.mark.parametrize("seed", range(20))
def test_stored_tokens_are_trained_dropped_or_waiting(seed: int) -> None:
    """Random ends, repeats and ages."""
    chance = random.Random(seed)
    s = Stream(config(2, 1, drop_zero_variance=True))
    waiting = 0
    for _ in range(300):
        task, version = chance.randrange(s.state.granted), s.state.version.number
        if chance.random() < 0.15:
            s.end(task, chance.choice([None, 0, 1]))
        else:
            oldest = max(0, version - chance.randrange(3))
            views = [view(k, oldest=oldest, reward=chance.choice([0.0, 1.0]), tokens=chance.randrange(1, 90)) for k in (0, 1)]
            s.rollouts(task, *views[: chance.choice([1, 2, 2])])
        if (batch := s.close()) is not None:
            trained = sum(r.length for group in batch.groups for r in group.rollouts.values())
            left = s.state.waiting_tokens - trained
            assert waiting + s.state.stored_tokens == trained + sum(dropped(s).values()) + left
            waiting = left
            s.train()
    assert s.state.version.number
