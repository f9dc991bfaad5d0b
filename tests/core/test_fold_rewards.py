"""Rewards that come by themselves: late, early, revised."""

from streamrl.core.state import PendingRollout
from tests.support.records import Stream, config, view


def test_the_highest_revision_counts_once() -> None:
    s = Stream(config(1))
    s.rollouts(0, view(0, reward=0.0), view(1, reward=1.0))
    s.reward(0, 1, 2.0, revision=3)
    s.reward(0, 1, 9.0, revision=2)
    assert s.dropped == [(3, 0, (1,), "superseded_reward", False)]
    assert s.train().groups[0].rollouts[1].reward == 2.0
    s.reward(0, 1, 4.0, revision=4)
    assert s.dropped == [(4, 0, (1,), "superseded_reward", False)]
    s = Stream(config(1, 1))
    s.rollouts(0, view(0, reward=0.0), view(1))
    s.reward(0, 1, 0.5, revision=2)
    s.reward(0, 1, 9.0, revision=2)
    assert s.dropped == [(3, 0, (1,), "superseded_reward", False)]
    assert s.train().groups[0].rollouts[1].reward == 0.5


def test_a_revision_can_take_the_spread_away() -> None:
    s = Stream(config())
    s.group(0, (0.0, 1.0))
    s.reward(0, 0, 1.0)
    assert s.dropped == [(1, 0, (0, 1), "zero_variance", True)]
    assert s.state.ready == 0 and s.state.pending == {}


def test_early_rewards_are_kept_by_rollout_and_vanish_with_their_task() -> None:
    s = Stream(config())
    s.reward(0, 1, 1.0)
    s.reward(1, 0, 1.0)
    s.end(0)
    assert s.state.early_rewards == {"1/0": (1, 1.0)}
    s = Stream(config())
    s.rollouts(0, view(0))
    s.reward(0, 1, 0.5)
    s.reward(1, 0, 1.5)
    s.reward(0, 1, 2.5, revision=3)
    s.reward(0, 1, 9.0, revision=3)
    assert s.state.early_rewards == {"0/1": (3, 2.5), "1/0": (1, 1.5)}
    assert s.dropped == [(5, 0, (1,), "superseded_reward", False)], "a revision counts once"


def test_what_waits_of_a_rollout() -> None:
    s = Stream(config(1, 2))
    s.group(0)
    s.train()
    s.reward(1, 1, 0.25, revision=4)
    s.rollouts(1, view(0, oldest=0, newest=1, tokens=5, samples=2), view(1, oldest=1, reward=0.75), group=3)
    assert s.state.early_rewards == {}, "it has found its rollout"
    assert s.state.pending[1].rollouts == {
        0: PendingRollout(sequence=3, num_samples=2, num_tokens=5, oldest=0, newest=1, reward=None, revision=0, arrived=1, sampled=5),
        1: PendingRollout(sequence=3, num_samples=1, num_tokens=3, oldest=1, newest=1, reward=0.25, revision=4, arrived=1, sampled=3),
    }


def test_rewards_of_complete_groups_are_summed() -> None:
    s = Stream(config(3, 1))
    s.group(0, (0.25, 0.5))
    s.rollouts(1, view(0, reward=8.0))
    assert (s.state.reward_sum, s.state.reward_count) == (0.75, 2)
    s.group(2, (2.0, 2.0))
    assert (s.state.reward_sum, s.state.reward_count) == (4.75, 4), "that of a group that is dropped too"
    s.rollouts(1, view(1, reward=1.0))
    s.reward(1, 1, 5.0)
    assert (s.state.reward_sum, s.state.reward_count) == (13.75, 6), "what a group had when it was complete"


def late(versions: int) -> Stream:
    """Version 1; task 1 arrived there and lacks a reward, task 2 lacks a rollout, task 3 lacks nothing."""
    s = Stream(config(1, 9, late_versions=versions))
    s.group(0)
    s.train()
    s.rollouts(1, view(0), view(1, reward=1.0))
    s.rollouts(2, view(0, reward=1.0))
    s.group(3, oldest=1)
    return s


def train_one(s: Stream, task: int) -> None:
    s.group(task)
    assert s.train().groups[0].task == task


def test_a_group_waits_for_its_rewards_as_many_versions_as_it_may() -> None:
    s = late(2)
    train_one(s, 4)
    assert s.state.drops == (), "version 2: one version of two"
    train_one(s, 5)
    assert s.dropped == [(2, 1, (0, 1), "unrewarded", True)] and list(s.state.pending) == [2, 3]
    train_one(s, 6)
    assert list(s.state.pending) == [2, 3] and s.state.drops == ()
    s = late(1)
    train_one(s, 4)
    assert s.dropped == [(2, 1, (0, 1), "unrewarded", True)]
    s = late(0)
    for task in range(4, 9):
        train_one(s, task)
        assert list(s.state.pending) == [1, 2, 3] and s.state.drops == ()
