"""Group-normalised rewards: golden numbers, uneven groups, one vote per rollout."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.core.advantages import grpo
from streamrl.errors import TrainingError


def advantages(rewards: list[float], tasks: list[int], rollouts: list[int], **options: bool) -> npt.NDArray[np.float64]:
    return grpo(np.array(rewards, np.float64), np.array(tasks), np.array(rollouts), **options)[0]


def test_golden() -> None:
    got = advantages([1, 0, 0, 1], [5] * 4, [0, 1, 2, 3])
    assert got == pytest.approx([0.866024, -0.866024, -0.866024, 0.866024], abs=1e-6)


def test_without_the_standard_deviation_is_dr_grpo() -> None:
    assert advantages([1, 0, 0, 1], [5] * 4, [0, 1, 2, 3], normalize_std=False).tolist() == [0.5, -0.5, -0.5, 0.5]


def test_groups_are_named_by_id_and_may_be_uneven_and_interleaved() -> None:
    got = advantages([1, 10, 0, 30, 0], [0, 1, 0, 1, 0], [0, 0, 1, 1, 2])
    assert got[[0, 2, 4]] == pytest.approx(advantages([1, 0, 0], [0] * 3, [0, 1, 2]))
    assert got[[1, 3]] == pytest.approx([-(0.5**0.5), 0.5**0.5], abs=1e-6)


def test_a_rollout_of_several_samples_votes_once() -> None:
    split = advantages([1, 1, 1, 0, 0], [0] * 5, [0, 0, 0, 1, 2])
    whole = advantages([1, 0, 0], [0] * 3, [0, 1, 2])
    assert split.tolist() == [whole[0]] * 3 + whole[1:].tolist()


def test_singletons_and_equal_rewards_give_exactly_zero() -> None:
    assert advantages([3.0, 0.1, 0.1, 0.1], [0, 1, 1, 1], [0, 0, 1, 2]).tolist() == [0.0] * 4


def test_metrics_count_rollouts_not_samples() -> None:
    _, metrics = grpo(np.array([1.0, 1, 0, 0, 0]), np.array([0, 0, 0, 1, 1]), np.array([0, 0, 1, 0, 1]))
    assert metrics == pytest.approx({"rollout/raw_reward": 0.25, "rollout/raw_reward_std": 0.5**0.5 / 2, "rollout/zero_spread": 0.5})


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=8), st.floats(-5, 5))
def test_sums_to_zero_and_ignores_a_shift(rewards: list[float], shift: float) -> None:
    tasks, rollouts = [0] * len(rewards), list(range(len(rewards)))
    got = advantages(rewards, tasks, rollouts, normalize_std=False)
    assert got.sum() == pytest.approx(0, abs=1e-9)
    assert got == pytest.approx(advantages([r + shift for r in rewards], tasks, rollouts, normalize_std=False), abs=1e-9)


def test_refuses_missing_and_contradictory_rewards() -> None:
    with pytest.raises(TrainingError, match=r"finite reward.*task 4, rollout 1"):
        advantages([1, float("nan")], [4, 4], [0, 1])
    with pytest.raises(TrainingError, match="one reward"):
        advantages([1, 0], [4, 4], [1, 1])
