"""Estimators with other baselines than the plain mean: by hand, and by going through all subsets."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.algorithms.advantages import grpo, rloo
from streamrl.algorithms.baselines import gdpo, gpg, opo, pass_at_k, remax
from streamrl.errors import TrainingError
from tests.support.errors import raises


def group(rewards: list[float]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One task, a rollout a reward."""
    return np.array(rewards, np.float64), np.zeros(len(rewards), np.int64), np.arange(len(rewards))


def test_opo_by_hand() -> None:
    """Lengths 1 and 3: the baseline is (1 * 1 + 3 * 0) / 4."""
    assert opo(*group([1, 0]), lengths=np.array([1, 3]))[0].tolist() == [0.75, -0.25]
    assert opo(*group([1, 0, 0]), lengths=np.array([2, 2, 2]))[0] == pytest.approx(grpo(*group([1, 0, 0]), normalize_std=False)[0])
    rewards, tasks, rollouts = np.array([1.0, 1, 0]), np.zeros(3, np.int64), np.array([0, 0, 1])
    assert opo(rewards, tasks, rollouts, lengths=np.array([1, 2, 1]))[0].tolist() == [0.25, 0.25, -0.75]
    assert opo(*group([0.1, 0.1, 0.1]), lengths=np.array([1, 2, 4]))[0].tolist() == [0.0] * 3
    assert opo(*group([1, 0]), lengths=np.array([0, 0]))[0].tolist() == [0.0] * 2
    assert opo(*group([3.0]), lengths=np.array([7]))[0].tolist() == [0.0]


def test_gpg_makes_up_for_groups_without_a_gradient() -> None:
    rewards, tasks = np.array([1.0, 0, 1, 1]), np.array([0, 0, 1, 1])
    assert gpg(rewards, tasks, np.array([0, 1, 0, 1]))[0].tolist() == [1.0, -1.0, 0.0, 0.0]  # alpha = 4 / 2
    assert gpg(*group([1, 0]))[0].tolist() == [0.5, -0.5]
    assert gpg(*group([1, 1]))[0].tolist() == [0.0, 0.0]


def by_subsets(rewards: list[float], k: int) -> list[float]:
    """GRPO over all subsets: a subset's reward is its greatest; a rollout's advantage the mean over those that it is in."""
    subsets = list(combinations(range(len(rewards)), min(k, len(rewards))))
    value = {subset: max(rewards[one] for one in subset) for subset in subsets}
    mean = sum(value.values()) / len(value)
    deviation = (sum((each - mean) ** 2 for each in value.values()) / len(value)) ** 0.5 + 1e-6
    with_it = [[value[subset] for subset in subsets if one in subset] for one in range(len(rewards))]
    return [(sum(each) / len(each) - mean) / deviation for each in with_it]


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=7), st.integers(1, 8))
def test_pass_at_k_is_grpo_over_all_subsets(rewards: list[float], k: int) -> None:
    found = pass_at_k(*group(rewards), k=k)[0]
    assert found == pytest.approx(by_subsets(rewards, k), abs=1e-9)
    assert found.sum() == pytest.approx(0.0, abs=1e-9)


def test_pass_at_k_by_hand() -> None:
    assert pass_at_k(*group([1, 0, 0, 0]), k=2)[0] == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3], abs=1e-5)
    # Three of four right, k = 2: no subset is without one, so there is nothing left to gain.
    assert pass_at_k(*group([1, 1, 1, 0]), k=2)[0].tolist() == [0.0] * 4
    rewards = [1.0, 0.0, 0.0, 1.0, 0.0]
    theirs = grpo(*group(rewards))[0] * (np.std(rewards, ddof=1) + 1e-6) / (np.std(rewards) + 1e-6)
    assert pass_at_k(*group(rewards), k=1)[0] == pytest.approx(theirs)


@pytest.mark.parametrize("reward", [0.5, -1.0, 2.0])
def test_pass_at_k_refuses_what_is_neither_right_nor_wrong(reward: float) -> None:
    with raises(TrainingError, estimator="pass_at_k", rollout=1):
        pass_at_k(*group([1.0, reward]), k=2)


def test_grpo_over_the_batchs_deviation_and_without_a_rollouts_own_reward() -> None:
    """A group of nearly equal rewards is not blown up beside one of very unequal ones."""
    rewards, tasks, rollouts = np.array([1.0, 0, 0.51, 0.49]), np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1])
    found = grpo(rewards, tasks, rollouts, batch_std=True)[0]
    assert found == pytest.approx(np.array([0.5, -0.5, 0.01, -0.01]) / (np.std(rewards, ddof=1) + 1e-6))
    assert grpo(rewards[:2], tasks[:2], rollouts[:2], batch_std=True)[0] == pytest.approx(np.array([0.5, -0.5]) / (0.5**0.5 + 1e-6))
    assert grpo(np.array([1.0]), np.array([0]), np.array([0]), batch_std=True)[0].tolist() == [0.0]
    # LOO over std: by hand, over the batch's deviation, and beside rloo.
    rewards, tasks, rollouts = np.array([1.0, 0, 0, 3.0, 1.0]), np.array([0, 0, 0, 1, 1]), np.array([0, 1, 2, 0, 1])
    std = [np.std(rewards[:3], ddof=1)] * 3 + [np.std(rewards[3:], ddof=1)] * 2
    less_others = np.array([1.0, -0.5, -0.5, 2.0, -2.0])
    found = grpo(rewards, tasks, rollouts, leave_one_out=True)[0]
    assert found == pytest.approx(less_others / (np.array(std) + 1e-6))
    over_batch = grpo(rewards, tasks, rollouts, leave_one_out=True, batch_std=True)[0]
    assert over_batch == pytest.approx(less_others / (np.std(rewards, ddof=1) + 1e-6))
    assert rloo(rewards, tasks, rollouts)[0] == pytest.approx(less_others)
    assert grpo(*group([2.0]), leave_one_out=True)[0].tolist() == [0.0]
    assert grpo(*group([0.1, 0.1, 0.1]), leave_one_out=True)[0].tolist() == [0.0] * 3


def by_objective(parts: list[list[float]], weights: list[float], tasks: list[int]) -> list[float]:
    """GDPO in plain Python: z-scores of each objective within its task, their weighted sum, and its z-score over the batch."""

    def z(values: list[float]) -> list[float]:
        mean = sum(values) / len(values)
        deviation = (sum((v - mean) ** 2 for v in values) / max(len(values) - 1, 1)) ** 0.5
        return [0.0 if len(set(values)) == 1 else (v - mean) / (deviation + 1e-6) for v in values]

    total = [0.0] * len(tasks)
    for values, weight in zip(parts, weights, strict=True):
        for task in set(tasks):
            members = [i for i, one in enumerate(tasks) if one == task]
            for i, score in zip(members, z([values[i] for i in members]), strict=True):
                total[i] += weight * score
    return z(total) if len(set(total)) > 1 else [0.0] * len(total)


numbers = st.integers(-4, 4).map(lambda n: n / 2)


@given(st.lists(st.tuples(numbers, numbers, st.integers(0, 2)), min_size=1, max_size=9), st.floats(0.1, 3))
def test_gdpo_normalises_each_objective_by_itself(rows: list[tuple[float, float, int]], weight: float) -> None:
    rows = sorted(rows, key=lambda row: row[2])
    first, second, tasks = ([row[k] for row in rows] for k in range(3))
    parts = {"a": np.array(first, np.float64), "b": np.array(second, np.float64), "unread": np.full(len(rows), np.nan)}
    inputs = parts["a"] + parts["b"], np.array(tasks, np.int64), np.arange(len(rows))
    found, metrics = gdpo(*inputs, parts=parts, weights={"a": 1.0, "b": weight})
    assert found == pytest.approx(by_objective([first, second], [1.0, weight], tasks), abs=1e-6)  # type: ignore[arg-type]
    assert metrics["rollout/raw_reward"] == pytest.approx(np.mean(inputs[0]))


def test_gdpo_tells_apart_what_adds_up_to_the_same_and_names_what_is_missing() -> None:
    """Rewards 1 + 0 and 0 + 1 are equal to grpo; the part whose values differ less often weighs more to gdpo."""
    right, form = np.array([1.0, 0, 1, 1]), np.array([0.0, 1, 0, 0])
    inputs = right + form, np.zeros(4, np.int64), np.arange(4)
    assert grpo(*inputs)[0].tolist() == [0.0] * 4
    found = gdpo(*inputs, parts={"right": right, "form": form}, weights={"right": 2.0, "form": 1.0})[0]
    assert found[1] < 0 < found[0] == found[2] == found[3]
    inputs = group([1, 0])
    for parts in ({}, {"form": np.array([1.0, np.nan])}):
        with raises(TrainingError, estimator="gdpo", objective="form"):
            gdpo(*inputs, parts=parts, weights={"form": 1.0})


def test_remax_is_the_reward_less_that_of_the_tasks_greedy_answer() -> None:
    rewards, tasks, rollouts = np.array([1.0, 0.25, 0.25, 0.5, 3.0]), np.array([4, 4, 4, 7, 9]), np.array([0, 1, 1, 0, 0])
    found, metrics = remax(rewards, tasks, rollouts, baselines=np.array([0.5, 0.5, 0.5, 0.5, -1.0]))
    assert found.tolist() == [0.5, -0.25, -0.25, 0.0, 4.0]
    assert metrics["rollout/raw_reward"] == (1.0 + 0.25 + 0.5 + 3.0) / 4, "of rollouts, and without the greedy answers"
    assert metrics["rollout/zero_variance"] == pytest.approx(1 / 3), "task 7 alone has nothing to learn"


def test_remax_keeps_the_gradient_unbiased_and_lowers_its_variance() -> None:
    """Exactly, over all answers of a softmax policy: E[A d log pi] is the gradient of E[R], whatever the baseline is."""
    logits, reward = np.array([1.0, 0.2, -0.5, 0.1]), np.array([1.0, 0.6, 0.0, 0.9])
    pi = np.exp(logits) / np.exp(logits).sum()
    score = np.eye(4) - pi  # [answer, logit] d log pi(answer) / d logit
    exact = pi * (reward - pi @ reward)
    tasks = np.arange(4)
    by_greedy, _ = remax(reward, tasks, np.zeros(4, np.int64), baselines=np.full(4, reward[logits.argmax()]))
    terms = by_greedy[:, None] * score
    assert pi @ terms == pytest.approx(exact, abs=1e-15)
    plain = reward[:, None] * score
    assert pi @ np.square(terms).sum(1) < pi @ np.square(plain).sum(1)


@pytest.mark.parametrize("baselines", [None, np.array([0.5, np.nan])])
def test_remax_without_a_baseline_is_refused_and_never_a_zero(baselines: np.ndarray | None) -> None:
    task = 0 if baselines is None else 3
    with raises(TrainingError, estimator="remax", task=task):
        remax(np.array([1.0, 0.0]), np.array([0, 3]), np.array([0, 0]), baselines=baselines)
