"""Rewards that come by themselves: late, early, revised."""

from __future__ import annotations

from tests.core.stream import Stream, config, view


def test_a_reward_that_comes_late_completes_its_group() -> None:
    s = Stream(config(1))
    s.rollouts(0, view(0, reward=0.0), view(1))
    assert s.close() is None
    s.reward(0, 1, 0.5)
    assert s.train().groups[0].rollouts[1].reward == 0.5


def test_a_reward_that_comes_early_is_kept() -> None:
    s = Stream(config(1))
    s.reward(0, 1, 0.5, revision=2)
    s.reward(0, 1, 0.25, revision=1)
    assert s.dropped == [(2, 0, (1,), "superseded_reward", False)]
    s.rollouts(0, view(0, reward=0.0), view(1, reward=0.75))
    batch = s.train()
    assert (batch.groups[0].rollouts[1].reward, batch.groups[0].rollouts[1].revision) == (0.5, 2)
    assert s.state.early_rewards == {}


def test_the_highest_revision_counts() -> None:
    s = Stream(config(1))
    s.rollouts(0, view(0, reward=0.0), view(1, reward=1.0))
    s.reward(0, 1, 2.0, revision=3)
    s.reward(0, 1, 9.0, revision=2)
    assert s.dropped == [(3, 0, (1,), "superseded_reward", False)]
    assert s.train().groups[0].rollouts[1].reward == 2.0
    s.reward(0, 1, 4.0, revision=4)
    assert s.dropped == [(4, 0, (1,), "superseded_reward", False)]


def test_a_revision_can_take_the_spread_away() -> None:
    s = Stream(config())
    s.group(0, (0.0, 1.0))
    s.reward(0, 0, 1.0)
    assert s.dropped == [(1, 0, (0, 1), "zero_spread", True)]
    assert s.state.ready == 0 and s.state.pending == {}


def test_early_rewards_vanish_with_their_task() -> None:
    s = Stream(config())
    s.reward(0, 1, 1.0)
    s.reward(1, 0, 1.0)
    s.end(0)
    assert s.state.early_rewards == {"1/0": (1, 1.0)}
