"""RolloutRewards of rollouts, statistics of groups, and the rule for means over rollouts."""

import numpy as np
import pytest

from streamrl.algorithms.groups import rollout_mean, rollout_of_sample, rollout_rewards
from streamrl.errors import TrainingError
from tests.support.errors import raises


def test_votes_are_one_found_in_order_of_task_and_rollout() -> None:
    found = rollout_rewards(np.array([5.0, 1, 1, 3, 7]), np.array([9, 2, 2, 2, 2]), np.array([0, 1, 1, 0, 4]))
    assert found.rewards.tolist() == [3, 1, 7, 5]
    assert found.rollout_of_sample.tolist() == [3, 1, 1, 0, 2]
    assert found.group.tolist() == [0, 0, 0, 1]
    assert found.size.tolist() == [3, 1]
    assert found.mean == pytest.approx([11 / 3, 5])
    assert found.std == pytest.approx([np.std([3, 1, 7], ddof=1), 0])
    assert found.flat.tolist() == [False, True]
    assert found.centred == pytest.approx([3 - 11 / 3, 1 - 11 / 3, 7 - 11 / 3, 0])
    found = rollout_rewards(np.full(3, 0.1), np.zeros(3, np.int64), np.arange(3))
    assert found.centred.tolist() == [0, 0, 0] and found.std.tolist() == [0]
    assert found.metrics["rollout/raw_reward_std"] == 0 and found.metrics["rollout/zero_variance"] == 1
    assert rollout_of_sample(np.array([1, 0, 1, 0]), np.array([0, 0, 0, 1])).tolist() == [2, 0, 2, 1]
    with raises(TrainingError, task=4, rollout=1):
        rollout_rewards(np.array([0.0, 1, 2]), np.array([3, 4, 4]), np.array([0, 1, 1]))


def test_mean_over_each_rollouts_tokens_then_over_rollouts_with_tokens() -> None:
    values = np.array([1.0, 3.0, np.nan, 10.0, np.nan])
    mask = np.array([True, True, False, True, False])
    assert rollout_mean(values, mask, np.array([0, 0, 0, 2, 3])) == (2.0 + 10.0) / 2
    assert rollout_mean(np.ones(2), np.zeros(2, np.bool_), np.array([0, 1])) == 0.0
