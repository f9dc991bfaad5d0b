"""Estimators over groups: golden numbers, closed forms, uneven groups, one vote per rollout."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.algorithms.advantages import Floats, grpo, maxrl, raw, rloo
from streamrl.errors import TrainingError

Grouped = Callable[..., tuple[Floats, dict[str, float]]]
ALL: tuple[Grouped, ...] = (raw, grpo, rloo, maxrl)


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


def of(estimator: Grouped, rewards: list[float], tasks: list[int], rollouts: list[int]) -> list[float]:
    return estimator(np.array(rewards, np.float64), np.array(tasks), np.array(rollouts))[0].tolist()


def test_raw_is_the_reward() -> None:
    assert of(raw, [3, 3, -1], [0, 0, 7], [1, 1, 0]) == [3, 3, -1]


def test_rloo_leaves_each_rollout_out_of_its_own_baseline() -> None:
    assert of(rloo, [1, 4, 10], [3] * 3, [0, 1, 2]) == pytest.approx([1 - 7, 4 - 5.5, 10 - 2.5])


def test_maxrl_divides_by_the_groups_mean() -> None:
    assert of(maxrl, [1, 0, 0, 0, 1, 1, 0], [0] * 4 + [1] * 3, [0, 1, 2, 3, 0, 1, 2]) == pytest.approx([3, -1, -1, -1, 0.5, 0.5, -1])


def test_maxrl_gives_zero_where_nobody_succeeds() -> None:
    assert of(maxrl, [0, 0, 0], [0] * 3, [0, 1, 2]) == [0, 0, 0]


def test_maxrl_refuses_negative_rewards() -> None:
    with pytest.raises(TrainingError, match=r"at least 0, got -1.0 for task 5, rollout 2"):
        of(maxrl, [0, -1, 1], [5, 5, 5], [0, 2, 3])


@pytest.mark.parametrize("estimator", [grpo, rloo, maxrl])
def test_groups_of_one_and_equal_rewards_get_exactly_zero(estimator: Grouped) -> None:
    assert of(estimator, [3.0, 0.1, 0.1, 0.1], [0, 1, 1, 1], [0, 0, 1, 2]) == [0.0] * 4


@pytest.mark.parametrize("estimator", ALL)
def test_all_report_the_same_metrics_and_refuse_the_same_rewards(estimator: Grouped) -> None:
    rewards, tasks, rollouts = np.array([1.0, 1, 0, 0, 0]), np.array([0, 0, 0, 1, 1]), np.array([0, 0, 1, 0, 1])
    assert estimator(rewards, tasks, rollouts)[1] == grpo(rewards, tasks, rollouts)[1]
    with pytest.raises(TrainingError, match=r"finite reward.*task 4, rollout 1"):
        of(estimator, [1, float("inf")], [4, 4], [0, 1])


@given(st.data())
def test_uneven_groups_in_any_order_with_forked_rollouts_equal_each_group_alone(data: st.DataObject) -> None:
    """Against loops over the groups, each estimator written out; every rollout's samples get what it gets."""
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    rows = [
        (task * 3, index, data.draw(st.integers(0, 3)) / 2, data.draw(st.integers(1, 2)))
        for task, n in enumerate(sizes)
        for index in range(n)
    ]
    samples = data.draw(st.permutations([(task, index, reward) for task, index, reward, copies in rows for _ in range(copies)]))
    for estimator in (grpo, rloo, maxrl):
        expected: dict[tuple[int, int], float] = {}
        for task in {row[0] for row in rows}:
            group = {row[1]: row[2] for row in rows if row[0] == task}
            mean = sum(group.values()) / len(group)
            for index, reward in group.items():
                others = [value for other, value in group.items() if other != index]
                if estimator is grpo:
                    value = (reward - mean) / (float(np.std([*group.values()], ddof=1)) + 1e-6) if others else 0.0
                elif estimator is rloo:
                    value = reward - sum(others) / len(others) if others else 0.0
                else:
                    value = (reward - mean) / mean if mean else 0.0
                expected[task, index] = value
        got = of(estimator, [s[2] for s in samples], [s[0] for s in samples], [s[1] for s in samples])
        assert got == pytest.approx([expected[s[0], s[1]] for s in samples], abs=1e-9)
