"""What the fold counts of tokens: stored = trained + dropped + waiting, whatever becomes of an answer."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from streamrl.core.lengths import histogram
from streamrl.core.records import Share
from streamrl.core.state import FoldState, PendingRollout, Tally
from tests.support.records import Stream, config, view


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
