"""Answers to requests for rewards: for the attempt that they name, whatever comes first; a failed one ends a rollout that has come."""

from functools import partial
from itertools import permutations

import pytest

from streamrl.core.gradings import MOST_EARLY
from streamrl.core.state import FoldState
from tests.support.records import Stream, config, view


def test_an_answer_is_for_its_request_and_a_correction_for_any() -> None:
    s = Stream(config(1))
    s.rollouts(0, view(0, grading=7), view(1, grading=7))
    s.reward(0, 0, 1.0, grading=7)
    s.reward(0, 1, 0.5, grading=6)
    assert s.dropped == [(3, 0, (1,), "superseded_reward", False)]
    assert s.close() is None
    s.reward(0, 1, 0.25, grading=7)
    assert [one.reward for one in s.train().groups[0].rollouts.values()] == [1.0, 0.25]
    s = Stream(config(1))
    s.reward(0, 0, 4.0, revision=2)
    s.reward(0, 0, 1.0, grading=7)
    s.rollouts(0, view(0, grading=7), view(1, reward=0.0))
    assert [one.reward for one in s.train().groups[0].rollouts.values()] == [4.0, 0.0]


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_of_two_attempts_the_one_whose_samples_came_first_gets_its_own_reward(order: tuple[int, ...]) -> None:
    """Samples of requests 3 and 5 and their answers in every order: the reward trained on is always that of the samples trained on."""
    s = Stream(config(1, drop_zero_variance=False))
    records = [
        lambda: s.rollouts(0, view(0, grading=3), group=1),
        lambda: s.rollouts(0, view(0, grading=5), group=1),
        lambda: s.reward(0, 0, 0.3, grading=3),
        lambda: s.reward(0, 0, 0.5, grading=5),
    ]
    for number in order:
        records[number]()
    [group] = s.train().groups
    first = 3 if order.index(0) < order.index(1) else 5
    assert (group.rollouts[0].grading, group.rollouts[0].reward) == (first, first / 10)
    assert s.state.early_rewards == {}


@pytest.mark.parametrize("answer_first", [True, False])
def test_of_early_rewards_of_one_revision_the_first_counts_as_it_does_behind_the_samples(answer_first: bool) -> None:
    """An answer and a service's reward: a replay must not choose by the hashes of its process."""
    for early in (True, False):
        s = Stream(config(1))
        samples = partial(s.rollouts, 0, view(0, grading=7), view(1, reward=0.0))
        both = [partial(s.reward, 0, 0, 1.0, grading=7), partial(s.reward, 0, 0, 4.0)]
        rewards = both if answer_first else both[::-1]
        for put in [*rewards, samples] if early else [samples, *rewards]:
            put()
        assert s.train().groups[0].rollouts[0].reward == (1.0 if answer_first else 4.0)


def test_early_answers_are_bounded_and_one_of_a_higher_revision_stands_behind() -> None:
    s = Stream(config(1))
    s.reward(0, 0, 1.0)
    s.reward(0, 0, 2.0, revision=2, grading=7)
    s.reward(0, 0, 3.0, revision=2)
    s.state = FoldState.decode(s.state.encode())
    s.rollouts(0, view(0, grading=7), view(1, reward=0.0))
    assert s.train().groups[0].rollouts[0].reward == 2.0
    s = Stream(config(1))
    for number in range(1, MOST_EARLY + 3):
        s.reward(0, 0, 1.0, grading=number)
    assert len(s.state.early_rewards) == MOST_EARLY
    assert [reason for *_, reason, _ in s.dropped] == ["superseded_reward"] * 2


def test_a_failed_grading_ends_the_rollout_of_its_attempt_alone() -> None:
    s = Stream(config(1))
    s.rollouts(0, view(0, grading=7), view(1, grading=7), view(2, grading=7), group=3)
    s.reward(0, 0, 1.0, grading=7)
    s.reward(0, 2, 0.0, grading=7)
    s.end(0, 1, group=3, reason="timeout", grading=7)
    assert s.dropped == [(4, 0, (1,), "timeout", False)]
    assert s.state.dropped["timeout"].tokens == 3
    s.end(0, 1, group=3, reason="timeout", grading=7)
    assert s.dropped[1:] == [(5, 0, (1,), "duplicate", False)]
    assert sorted(s.train().groups[0].rollouts) == [0, 2]
    s = Stream(config(1))
    s.rollouts(0, view(0), view(1, grading=6))
    for rollout in range(2):
        s.end(0, rollout, reason="timeout", grading=7)
    assert [drop[2:4] for drop in s.dropped] == [((0,), "superseded_reward"), ((1,), "superseded_reward")]
    s = Stream(config(1, 0))
    s.rollouts(0, view(0, grading=7), view(1, grading=7))
    s.end(0, 0, grading=7)
    effects = s.end(0, 1, grading=7)
    assert s.dropped[-1] == (3, 0, (1,), "failed", True)
    assert effects.grant is not None and effects.grant.granted == 2
    s = Stream(config(1))
    s.rollouts(0, view(0, grading=7), view(1, reward=0.0))
    s.end(0, 0, grading=5)
    s.end(0, 1, grading=7)
    s.reward(0, 0, 1.0, grading=7)
    s.end(0, 0, grading=7)
    assert [(rollouts, reason) for _, _, rollouts, reason, _ in s.dropped] == [
        ((0,), "superseded_reward"),
        ((1,), "superseded_reward"),
        ((0,), "superseded_reward"),
    ]
    assert [one.reward for one in s.train().groups[0].rollouts.values()] == [1.0, 0.0]
    s = Stream(config(1, drop_zero_variance=False))
    s.end(0, 0, grading=7)
    s.rollouts(0, view(0, grading=7), view(1, grading=7))
    assert s.dropped == [(1, 0, (0,), "failed", False), (2, 0, (0,), "duplicate", False)]
    s.reward(0, 1, 1.0, grading=7)
    assert sorted(s.train().groups[0].rollouts) == [1]
