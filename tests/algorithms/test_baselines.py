"""Estimators with other baselines than the plain mean: by hand, by all subsets and loops, and the variance that some are the least of."""

import math
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from streamrl.algorithms.advantages import grpo, rloo
from streamrl.algorithms.baselines import gdpo, gpg, opo, pass_at_k, remax
from streamrl.algorithms.optimal_baselines import opob, optimal_token_baseline, token_energies
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


def test_gpg_and_remax_by_hand() -> None:
    rewards, tasks = np.array([1.0, 0, 1, 1]), np.array([0, 0, 1, 1])
    assert gpg(rewards, tasks, np.array([0, 1, 0, 1]))[0].tolist() == [1.0, -1.0, 0.0, 0.0]  # alpha = 4 / 2
    assert gpg(*group([1, 0]))[0].tolist() == [0.5, -0.5]
    assert gpg(*group([1, 1]))[0].tolist() == [0.0, 0.0]
    rewards, tasks, rollouts = np.array([1.0, 0.25, 0.25, 0.5, 3.0]), np.array([4, 4, 4, 7, 9]), np.array([0, 1, 1, 0, 0])
    found, metrics = remax(rewards, tasks, rollouts, baselines=np.array([0.5, 0.5, 0.5, 0.5, -1.0]))
    assert found.tolist() == [0.5, -0.25, -0.25, 0.0, 4.0]
    assert metrics["rollout/raw_reward"] == (1.0 + 0.25 + 0.5 + 3.0) / 4, "of rollouts, and without the greedy answers"
    assert metrics["rollout/zero_variance"] == pytest.approx(1 / 3), "task 7 alone has nothing to learn"


@pytest.mark.parametrize("baselines", [None, np.array([0.5, np.nan])])
def test_remax_without_a_baseline_is_refused_and_never_a_zero(baselines: np.ndarray | None) -> None:
    task = 0 if baselines is None else 3
    with raises(TrainingError, estimator="remax", task=task):
        remax(np.array([1.0, 0.0]), np.array([0, 3]), np.array([0, 0]), baselines=baselines)


Floats = npt.NDArray[np.float64]


def test_a_certain_token_has_no_energy_and_never_a_negative_one() -> None:
    """Against the gradient written out, (onehot - softmax) / temperature, at several temperatures."""
    rng = np.random.default_rng(3)
    logits, tokens = 4 * rng.standard_normal((50, 11)), rng.integers(0, 11, 50)
    temperature = rng.choice([0.5, 1.0, 1.7], 50)

    def logprobs(scale: Floats) -> Floats:
        scaled = logits / scale[:, None]
        return (scaled - np.log(np.exp(scaled).sum(-1, keepdims=True)))[np.arange(50), tokens]

    softmax = np.exp(logits / temperature[:, None])
    softmax /= softmax.sum(-1, keepdims=True)
    gradient = (np.eye(11)[tokens] - softmax) / temperature[:, None]
    found = token_energies(logprobs(temperature), logprobs(temperature / 2), temperature)
    assert found == pytest.approx(np.square(gradient).sum(-1), rel=1e-9)
    certain = np.array([-1e-9, 0.0], np.float32)
    assert (token_energies(certain, certain, np.ones(2)) >= 0).all()
    assert token_energies(np.array([-40.0]), np.array([-80.0]), np.ones(1)) == pytest.approx(2.0)


def papers_baseline(rewards: list[float], ratios: list[float], energies: list[float]) -> float:
    weights = [w * w * e for w, e in zip(ratios, energies, strict=True)]
    return sum(w * r for w, r in zip(weights, rewards, strict=True)) / sum(weights)


groups = st.lists(st.tuples(st.floats(-2, 2), st.floats(0.05, 8), st.floats(0.01, 50)), min_size=2, max_size=7)


@given(groups)
def test_opob_is_the_papers(rows: list[tuple[float, float, float]]) -> None:
    rewards, ratios, energies = (list(column) for column in zip(*rows, strict=True))
    inputs: dict[str, Any] = {"log_ratios": np.log(ratios), "energies": np.array(energies)}
    found = opob(*group(rewards), **inputs, normalize_std=False)[0]
    baseline = papers_baseline(rewards, ratios, energies) if len(set(rewards)) > 1 else rewards[0]
    assert found == pytest.approx(np.array(rewards) - baseline, abs=1e-9)
    divided = opob(*group(rewards), **inputs)[0]
    assert divided == pytest.approx(found / (np.std(rewards, ddof=1) + 1e-6), rel=1e-6, abs=1e-9)


def by_positions(rewards: list[float], tasks: list[int], energies: list[list[float]]) -> list[list[float]]:
    """A_t by the equation, position after position; of a rollout that goes on alone 0."""
    found: list[list[float]] = []
    for i, own in enumerate(energies):
        found.append([])
        for t in range(len(own)):
            peers = [j for j in range(len(rewards)) if tasks[j] == tasks[i] and len(energies[j]) > t]
            weights = {j: math.fsum(energies[j][: t + 1]) for j in peers}
            total = math.fsum(weights.values())
            alone = len(peers) == 1 or len({rewards[j] for j in range(len(rewards)) if tasks[j] == tasks[i]}) == 1
            baseline = rewards[i] if alone or total == 0 else math.fsum(weights[j] * rewards[j] for j in peers) / total
            found[-1].append(rewards[i] - baseline)
    return found


rollouts_of_tasks = st.lists(
    st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 2), st.lists(st.floats(0, 2), max_size=5)), min_size=1, max_size=8
)


@given(rollouts_of_tasks)
@example(rows=[(0.5, 0, [0.0, 1.0]), (0.0, 0, [1.5e-82])])
def test_the_token_baseline_is_the_papers(rows: list[tuple[float, int, list[float]]]) -> None:
    rows = sorted(rows, key=lambda row: row[1])
    rewards, tasks, energies = [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows]
    samples = np.repeat(np.arange(len(rows)), [len(one) for one in energies])
    flat = np.array([e for one in energies for e in one], np.float64)
    inputs = np.array(rewards, np.float64), np.array(tasks, np.int64), np.arange(len(rows))
    found, _ = optimal_token_baseline(*inputs, energies=flat, samples=samples)
    expected = [a for one in by_positions(rewards, tasks, energies) for a in one]
    assert found == pytest.approx(expected, abs=1e-9)


def test_the_token_baseline_by_hand() -> None:
    """Rewards 1 and 0, energies 1, 1 and 3: at the first token B = 1 / 4; the second is the first rollout's alone."""
    found, _ = optimal_token_baseline(*group([1, 0]), energies=np.array([1.0, 1.0, 3.0]), samples=np.array([0, 0, 1]))
    assert found == pytest.approx([0.75, 0.0, -0.25])
    # Rollout 0 has a sample of its own, one of an agent, and another of its own: its second token is in the third sample.
    rewards, tasks, rollouts = np.array([1.0, 5.0, 1.0, 0.0, 7.0]), np.zeros(5, np.int64), np.array([0, 0, 0, 1, 1])
    agents = ("", "judge/0", "", "", "judge/0")
    samples, energies = np.array([0, 1, 2, 3, 3, 4]), np.array([1.0, 1.0, 2.0, 1.0, 5.0, 3.0])
    found, _ = optimal_token_baseline(rewards, tasks, rollouts, agents, energies=energies, samples=samples)
    # Own: W is 1, 3 against 1, 6. Judges: rewards 5 and 7 with energies 1 and 3.
    assert found == pytest.approx([0.5, -1.5, 1 - 3 / 9, -0.5, -3 / 9, 0.5])
