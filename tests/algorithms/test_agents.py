"""Rewards of agents: who is compared with whom, by numbers worked out by hand and by a plain reference in float64."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.algorithms.advantages import Floats, grpo, maxrl, raw, rloo, whiten
from streamrl.algorithms.estimators import token_advantages
from streamrl.config.loss import LossConfig
from streamrl.core.batches import TrainBatch
from streamrl.errors import TrainingError
from tests.support.errors import raises

Estimator = Callable[..., tuple[Floats, dict[str, float]]]

# Task 5 in two rollouts: a main chat each; three solvers of which the first went on in a second sample; a selector in one of them.
ROWS = [
    (5, 0, "", 1.0),
    (5, 0, "solver/0", 1.0),
    (5, 0, "solver/0", 1.0),
    (5, 0, "solver/1", 0.0),
    (5, 0, "selector", 7.0),
    (5, 1, "", 0.0),
    (5, 1, "solver/0", 0.5),
    (6, 0, "", 3.0),
    (6, 1, "solver/0", 9.0),
]
SAMPLE_STD = 0.5
"""Of 1, 0 and 0.5, by n - 1."""


def columns(rows: Sequence[tuple[int, int, str, float]] = ROWS) -> tuple[Any, ...]:
    tasks, rollouts, agents, rewards = zip(*rows, strict=True)
    return np.array(rewards), np.array(tasks), np.array(rollouts), agents


def test_an_agent_is_compared_with_those_of_its_role_and_counts_once() -> None:
    found, metrics = grpo(*columns(), normalize_std=False)
    assert found.tolist() == [0.5, 0.5, 0.5, -0.5, 0.0, -0.5, 0.0, 0.0, 0.0]
    # Groups: (5, main), (5, selector), (5, solver), (6, main), (6, solver); three have one vote.
    assert metrics["rollout/zero_variance"] == 3 / 5
    assert metrics["rollout/raw_reward_std"] == pytest.approx((0.5**0.5 + SAMPLE_STD) / 5)
    root = 0.5**0.5
    assert raw(*columns())[0].tolist() == [reward for *_, reward in ROWS]
    assert grpo(*columns())[0] == pytest.approx([root, 1, 1, -1, 0, -root, 0, 0, 0], abs=1e-5)
    # Leave one out: 1 against the mean of 0 and 0.5, 0 against that of 1 and 0.5, 0.5 against that of 1 and 0.
    assert rloo(*columns())[0] == pytest.approx([1, 0.75, 0.75, -0.75, 0, -1, 0, 0, 0])
    assert maxrl(*columns())[0] == pytest.approx([1, 1, 1, -1, 0, -1, 0, 0, 0])


def reference(rows: Sequence[tuple[int, int, str, float]], estimator: Estimator) -> list[float]:
    """The definition, one agent of a rollout after the other."""
    votes = {(task, rollout, agent): reward for task, rollout, agent, reward in rows}

    def one(task: int, rollout: int, agent: str, reward: float) -> float:
        role = agent.split("/")[0]
        others = [r for (t, k, a), r in votes.items() if t == task and a.split("/")[0] == role and (k, a) != (rollout, agent)]
        everyone = [*others, reward]
        if estimator is raw:
            return reward
        if len(set(everyone)) == 1:
            return 0.0
        if estimator is rloo:
            return reward - statistics.fmean(others)
        mean = statistics.fmean(everyone)
        return (reward - mean) / (mean if estimator is maxrl else statistics.stdev(everyone) + 1e-6)

    return [one(*row) for row in rows]


@st.composite
def some_rows(draw: st.DrawFn) -> list[tuple[int, int, str, float]]:
    votes = draw(
        st.dictionaries(
            st.tuples(st.integers(0, 2), st.integers(0, 3), st.sampled_from(["", "a", "a/1", "a/2", "ab", "b/1"])),
            st.sampled_from([0.0, 0.25, 1.0, 2.5]),
            min_size=1,
            max_size=20,
        )
    )
    rows = [(*vote, reward) for vote, reward in sorted(votes.items()) for _ in range(draw(st.integers(1, 2)))]
    return draw(st.permutations(rows))


@given(rows=some_rows())
def test_each_estimator_is_its_definition_and_without_agents_the_plain_one_to_the_last_bit(rows: list[tuple[int, int, str, float]]) -> None:
    rewards = {(task, rollout): reward for task, rollout, _, reward in rows}
    inputs = columns([(task, rollout, "", rewards[task, rollout]) for task, rollout, *_ in rows])
    for estimator in (raw, grpo, rloo, maxrl):
        assert estimator(*columns(rows))[0] == pytest.approx(reference(rows, estimator), rel=1e-9, abs=1e-9), estimator
        (found, metrics), (plain, plain_metrics) = estimator(*inputs), estimator(*inputs[:3])
        assert found.tobytes() == plain.tobytes() and metrics == plain_metrics, estimator


def batch() -> TrainBatch:
    """Two rollouts of a task, with a main chat of two tokens and a solver of one each."""
    return TrainBatch.from_lists(
        [[1]] * 4,
        [[2, 3], [4], [2, 3], [4]],
        rewards=[1.0, 0.25, 0.0, 0.75],
        tasks=[5] * 4,
        rollouts=[0, 0, 1, 1],
        agents=["", "solver", "", "solver"],
    )


def of(name: str, **options: Any) -> Any:
    """Advantages of the trained tokens: two of main, one of the solver, for either rollout."""
    loss = msgspec.convert({"advantage": name, **options}, LossConfig)
    values = np.zeros(batch().num_tokens) if name == "ppo" else None
    given = batch()
    return token_advantages(given, loss, values=values, logprobs=np.zeros(given.num_tokens)).advantages[given.loss_mask]


@pytest.mark.parametrize("name", ["ppo", "reinforce_plus_plus"])
def test_an_agents_reward_stands_at_the_last_token_of_its_sample(name: str) -> None:
    # With V = 0 and gamma = lambda = 1 the return of every token is its sample's reward; whitening is over all tokens of the batch.
    returns = np.array([1, 1, 0.25, 0, 0, 0.75])
    assert of(name, gamma=1.0, gae_lambda=1.0, whiten="on") == pytest.approx(whiten(returns, np.ones(6, np.bool_)), abs=1e-9)


def test_tokens_get_what_their_agent_has() -> None:
    root = 0.5**0.5
    assert of("grpo") == pytest.approx([root, root, -root, -root, -root, root], abs=1e-5)
    assert of("rloo") == pytest.approx([1, 1, -0.5, -1, -1, 0.5])
    assert of("maxrl") == pytest.approx([1, 1, -0.5, -1, -1, 0.5])
    assert of("grpo", normalize_rewards=False).tolist() == [1, 1, 0.25, 0, 0, 0.75]
    centred = np.array([0.5, 0.5, -0.25, -0.5, -0.5, 0.25])
    assert of("reinforce_plus_plus_baseline") == pytest.approx(whiten(centred, np.ones(6, np.bool_)), abs=1e-9)


def test_agents_are_of_all_samples_and_have_one_reward() -> None:
    with raises(TrainingError, task=5, rollout=0) as caught:
        grpo(*columns([(5, 0, "", 1.0), (5, 0, "solver", 1.0), (5, 0, "solver", 0.5)]))
    assert "agent solver" in caught.value.message
    with raises(TrainingError, field="agents"):
        TrainBatch.from_lists([[1], [1]], [[2], [2]], rewards=[1.0, 0.0], agents=["solver"])
