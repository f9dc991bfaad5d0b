"""What is quarantined, word by word, and what only looks impossible."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from streamrl.core.fold import DeadLetter
from streamrl.core.records import Ended, Forked, Rewarded
from streamrl.core.state import Epoch
from streamrl.schemas.ledger import Drop
from tests.support.records import Stream, config, view


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


def test_poison_ends_its_task_and_one_demonstration_among_others_is_some() -> None:
    s = Stream(config())
    s.poison(1)
    assert s.state.drops == (Drop(1, 1, (), "poison", "unreadable", retires=True),)
    s = Stream(config())
    (letter,) = s.rollouts(0, view(0, reward=1.0), view(1, oldest=-1, reward=0.0)).dead
    assert "a demonstration for task 0" in letter.reason


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


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_mark_of_a_known_epoch_is_no_news(epoch: int) -> None:
    s = Stream(config())
    s.put(Forked(s.next(), 1, 4, 5))
    before = s.state
    s.put(Forked(s.next(), epoch, 1, 1))
    assert s.effects.dead == () and s.state == replace(before, cursor=2)


def test_a_dropped_group_is_in_order_and_one_trained_token_keeps_it() -> None:
    s = Stream(config())
    s.rollouts(0, view(1, reward=1.0), view(0, reward=1.0))
    assert s.dropped == [(1, 0, (0, 1), "zero_variance", True)]
    s = Stream(config(1))
    s.rollouts(0, view(0, oldest=-1, highest=0, tokens=0, reward=0.0), view(1, reward=1.0))
    assert s.state.drops == () and s.train().groups[0].task == 0
