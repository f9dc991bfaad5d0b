"""Baselines of least variance: closed forms, plain loops over rollouts and positions, and the variance that they are the least of."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from streamrl.algorithms.advantages import grpo
from streamrl.algorithms.optimal_baselines import opob, optimal_token_baseline, token_energies

Floats = npt.NDArray[np.float64]


def group(rewards: list[float]) -> tuple[Floats, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """One task, a rollout a reward."""
    return np.array(rewards, np.float64), np.zeros(len(rewards), np.int64), np.arange(len(rewards))


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


@given(groups)
def test_no_other_baseline_has_less_variance(rows: list[tuple[float, float, float]]) -> None:
    """E [w^2 |g|^2 (R - b)^2] over the group, at b and a little beside it."""
    rewards, ratios, energies = (np.array(column) for column in zip(*rows, strict=True))
    advantages = opob(*group(rewards.tolist()), log_ratios=np.log(ratios), energies=energies, normalize_std=False)[0]

    def second_moment(shift: float) -> float:
        return float((ratios**2 * energies * (advantages + shift) ** 2).sum())

    assert second_moment(0.0) <= min(second_moment(1e-3), second_moment(-1e-3)) + 1e-9


def test_opob_by_hand() -> None:
    same: dict[str, Any] = {"log_ratios": np.full(4, -0.3), "energies": np.full(4, 2.5)}
    assert opob(*group([1, 0, 0, 1]), **same)[0] == pytest.approx(grpo(*group([1, 0, 0, 1]))[0])
    rewards, tasks, rollouts = np.array([1.0, 1, 0]), np.zeros(3, np.int64), np.array([0, 0, 1])
    log_ratios, energies = np.log([2.0, 1.5, 1.0]), np.array([1.0, 3.0, 4.0])
    found = opob(rewards, tasks, rollouts, log_ratios=log_ratios, energies=energies, normalize_std=False)[0]
    baseline = papers_baseline([1, 0], [3.0, 1.0], [4.0, 4.0])
    assert found == pytest.approx([1 - baseline, 1 - baseline, -baseline])
    nothing = np.zeros(3)
    assert opob(*group([0.1, 0.1, 0.1]), log_ratios=nothing, energies=np.ones(3))[0].tolist() == [0.0] * 3
    assert opob(*group([1, 0, 0]), log_ratios=nothing, energies=nothing)[0].tolist() == [0.0] * 3
    assert opob(*group([2.0]), log_ratios=np.array([5.0]), energies=np.ones(1))[0].tolist() == [0.0]
    # The first rollout has no gradient, whatever its weight; the second is heaviest by far: the baseline is its reward.
    extreme: dict[str, Any] = {"log_ratios": np.array([900.0, -500.0, -900.0]), "energies": np.array([0.0, 1.0, 1.0])}
    assert opob(*group([1, 0.5, 0]), **extreme, normalize_std=False)[0] == pytest.approx([0.5, 0.0, -0.5])


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
