"""Rewards and length: the soft overlong penalty of arXiv 2503.14476 (equation 13), and rewards on length by hand and in plain Python."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from streamrl.algorithms.objective import make_objective
from streamrl.config.loss import LossConfig
from streamrl.config.reward import LengthConfig
from streamrl.core.assembly import MOST_PARTS, assemble
from streamrl.core.batches import TrainBatch
from streamrl.core.fold import fold
from streamrl.core.length_rewards import length_rewards
from streamrl.core.overlong import of_rollouts, overlong_penalty
from streamrl.core.records import Rewarded
from streamrl.core.state import FoldConfig
from streamrl.schemas.samples import Sample, Status, VersionSpan
from streamrl.schemas.tasks import Sampling
from streamrl.schemas.versions import Version
from tests.core.test_assembly import closed, row

CONFIG = FoldConfig(batch_tasks=1, max_staleness=4, overlong_buffer=4, overlong_penalty=0.5)


def equation(length: int, longest: int, cache: int) -> Fraction:
    """As it is printed."""
    if length <= longest - cache:
        return Fraction(0)
    if length <= longest:
        return Fraction(longest - cache - length, cache)
    return Fraction(-1)


@given(st.integers(0, 400), st.integers(1, 300), st.integers(1, 300), st.sampled_from([0.0, 0.5, 1.0, 3.0]))
def test_it_is_the_papers(length: int, longest: int, cache: int, penalty: float) -> None:
    (found,) = overlong_penalty(np.array([length]), np.array([longest]), buffer=cache, penalty=penalty)
    assert found == pytest.approx(penalty * float(equation(length, longest, cache)), abs=1e-12)


def test_the_greatest_penalty_is_shared_by_a_rollout_or_agent() -> None:
    found = of_rollouts(np.array([0.0, -0.5, -0.2, 0.0]), np.array([3, 3, 3, 4]), np.array([0, 0, 1, 1]))
    assert found.tolist() == [-0.5, -0.5, -0.2, 0.0]
    found = of_rollouts(np.array([0.0, -0.5, -0.2, -0.1]), np.array([3] * 4), np.array([0] * 4), ["", "a", "", "a"])
    assert found.tolist() == [-0.2, -0.5, -0.2, -0.5]


def test_a_long_helper_takes_nothing_from_the_others() -> None:
    helper = {"agent": "helper", "agent_reward": 1.0}
    rows = [
        long(rollout, length, reward=float(rollout), num_samples=2, sample=index, **own)
        for rollout in (0, 1)
        for index, (length, own) in enumerate([(3, {}), (10 - 4 * rollout, helper)])
    ]
    arrays = assembled(*rows)
    assert arrays.agents == ("", "helper", "", "helper")
    assert arrays.rewards.tolist() == [0.0, 0.5, 1.0, 1.0]
    made = make_objective(arrays, LossConfig(), 1)
    assert made.metrics["rollout/overlong_penalty"] == pytest.approx(-0.5 / 4), "of four rewards"


def long(rollout: int, length: int, **values: Any) -> Sample:
    size = 2 + length
    mask = np.array([0, 0] + [1] * length, np.uint8)
    spans = (VersionSpan(2, None), VersionSpan(length, Version(0, 4)))
    fixed: dict[str, Any] = {
        "tokens": np.arange(size, dtype=np.int32),
        "loss_mask": mask,
        "logprobs": -mask.astype(np.float32),
        "spans": spans,
    }
    given: dict[str, Any] = {**fixed, "sampling": Sampling(max_new_tokens=10), **values}
    return row(1, rollout, **given)


def assembled(*rows: Sample, config: FoldConfig = CONFIG) -> TrainBatch:
    """Make what a trainer is given of one task with these samples."""
    return assemble(*closed([list(rows)], config), config)


def given_to_trainer(config: FoldConfig, **values: Any) -> TrainBatch:
    return assembled(long(0, 7, reward=1.0, **values), long(1, 6, reward=0.0, **values), config=config)


def test_it_is_taken_from_the_samples_own_limit_or_the_runs_and_is_a_metric() -> None:
    assert given_to_trainer(CONFIG).rewards.tolist() == [1.0 - 0.5 / 4, 0.0]
    at = given_to_trainer(replace(CONFIG, overlong_length=8))
    assert at.rewards.tolist() == [1.0 - 0.5 * 3 / 4, 0.0 - 0.5 * 2 / 4] and at.penalties is not None
    off = given_to_trainer(replace(CONFIG, overlong_buffer=0, overlong_length=8))
    assert off.rewards.tolist() == [1.0, 0.0] and off.penalties is None
    cut = given_to_trainer(replace(CONFIG, overlong="train"), status=Status.COMPLETED)
    masked = np.array([0, 0] + [0] * 6, np.uint8)
    assert assembled(long(0, 7, reward=1.0), long(1, 6, reward=0.0, loss_mask=masked)).rewards.tolist() == cut.rewards.tolist()
    batch = given_to_trainer(CONFIG)
    assert make_objective(batch, LossConfig(), 1).metrics["rollout/overlong_penalty"] == pytest.approx(-0.0625)
    assert "rollout/overlong_penalty" not in make_objective(replace(batch, penalties=None), LossConfig(), 1).metrics


def test_rewards_are_punished_once_and_filtered_without_it() -> None:
    batch, messages, state = closed([[long(0, 10, reward=0.0), long(1, 3, reward=1.0)]], CONFIG)
    state, _ = fold(state, Rewarded(2, 1, 0, 2.0, 1), CONFIG)
    state, _ = fold(state, Rewarded(3, 1, 0, 0.5, 2), CONFIG)
    assert state.pending[1].rollouts[0].reward == 0.5, "the log has it without"
    assert state.reward_sum == 1.0, "and so has what ends a run"
    corrected = replace(batch, groups=(state.pending[1],))
    assert assemble(corrected, messages, state, CONFIG).rewards.tolist() == [0.0, 1.0]
    equal = [long(0, 10, reward=1.0), long(1, 3, reward=1.0)]
    with pytest.raises(AssertionError):
        closed([equal], CONFIG)
    flat = replace(CONFIG, drop_zero_variance=False)
    assert assembled(*equal, config=flat).rewards.tolist() == [0.5, 1.0], "length alone teaches"


KIMI, ALP, COSINE = (LengthConfig(kind=kind, longest=20 * (kind != "kimi")) for kind in ("kimi", "alp", "cosine"))  # type: ignore[arg-type]


def added(config: LengthConfig, rewards: list[float], lengths: list[int], tasks: list[int] | None = None) -> list[float]:
    """A rollout each, of one sample; of one task where nothing is said."""
    count = len(rewards)
    given = np.array(rewards, np.float64), np.array(lengths, np.int64), np.full(count, 10, np.int64)
    return length_rewards(config, *given, np.array(tasks or [0] * count), np.arange(count)).tolist()


def kimi(rewards: list[float], lengths: list[int], weight: float) -> list[float]:
    shortest, longest = min(lengths), max(lengths)
    if shortest == longest:
        return [0.0] * len(rewards)
    by_length = [0.5 - (length - shortest) / (longest - shortest) for length in lengths]
    return [weight * (value if reward >= 1 else min(0.0, value)) for reward, value in zip(rewards, by_length, strict=True)]


answers = st.lists(st.tuples(st.sampled_from([0.0, 0.4, 1.0]), st.integers(1, 30)), min_size=1, max_size=8)


@given(answers, st.floats(0.1, 3))
def test_kimis_is_the_papers(rows: list[tuple[float, int]], weight: float) -> None:
    rewards, lengths = [r for r, _ in rows], [n for _, n in rows]
    assert added(replace(KIMI, weight=weight), rewards, lengths) == pytest.approx(kimi(rewards, lengths, weight))


def test_lengths_by_hand_with_and_without_a_bound() -> None:
    """Of right answers the shortest gains a half and the longest loses one; a short wrong one gains nothing. Tasks are apart."""
    assert added(KIMI, [1, 1, 1, 0, 0], [2, 4, 6, 2, 6]) == [0.5, 0.0, -0.5, 0.0, -0.5]
    assert added(KIMI, [1, 1, 1, 1], [2, 4, 30, 30], [0, 0, 1, 1]) == [0.5, -0.5, 0.0, 0.0]
    assert added(replace(ALP, longest=0), [1, 1], [5, 10]) == [-0.5, -1.0]
    assert added(replace(COSINE, longest=0), [1, 0], [10, 12]) == [-11.0, -10.0]


@given(answers, st.floats(0.1, 3))
def test_alps_price_rises_with_the_solve_rate(rows: list[tuple[float, int]], weight: float) -> None:
    rewards, lengths = [r for r, _ in rows], [n for _, n in rows]
    solved = max(sum(r >= 1 for r in rewards) / len(rows), 1 / len(rows))
    assert added(replace(ALP, weight=weight), rewards, lengths) == pytest.approx([-weight * solved * n / 20 for n in lengths])


def cosine(length: int, at_0: float, at_longest: float) -> float:
    """CosFn of the paper: from eta_max at t = 0 to eta_min at T."""
    return at_longest + 0.5 * (at_0 - at_longest) * (1 + math.cos(length * math.pi / 20))


@given(answers)
def test_the_cosine_takes_the_place_of_the_reward(rows: list[tuple[float, int]]) -> None:
    rewards, lengths = [r for r, _ in rows], [n for _, n in rows]
    numbers = [(2.0, 1.0) if reward >= 1 else (-10.0, 0.0) for reward in rewards]
    expected = [-10.0 if n >= 20 else cosine(n, *ends) for n, ends in zip(lengths, numbers, strict=True)]
    found = added(COSINE, rewards, lengths)
    assert [reward + more for reward, more in zip(rewards, found, strict=True)] == pytest.approx(expected)


def test_a_rollouts_samples_are_one_answer_and_agents_are_compared_with_their_role() -> None:
    """Rollout 0: samples of 2 and 4 tokens share a reward. Solvers of both rollouts are compared with each other alone."""
    tasks, rollouts = np.zeros(6, np.int64), np.array([0, 0, 0, 1, 1, 1])
    agents = ("", "", "solver/0", "", "solver/0", "solver/1")
    rewards, lengths = np.array([1.0, 1, 1, 1, 1, 0]), np.array([2, 4, 3, 2, 9, 5])
    found = length_rewards(KIMI, rewards, lengths, np.full(6, 10), tasks, rollouts, agents)
    assert found.tolist() == pytest.approx([-0.5, -0.5, 0.5, 0.5, -0.5, 0.0])


def test_it_is_added_to_what_a_trainer_is_given_and_nowhere_else() -> None:
    """Beside the overlong penalty, which it does not see; the log has rewards without either."""
    config = FoldConfig(batch_tasks=1, max_staleness=4, length=KIMI, overlong_buffer=4)
    rows = [long(k, length, reward=reward, group_size=3) for k, (length, reward) in enumerate([(7, 1.0), (6, 1.0), (3, 0.0)])]
    batch, messages, state = closed([rows], config)
    made = assemble(batch, messages, state, config)
    assert made.length_rewards is not None and made.penalties is not None
    assert made.length_rewards.tolist() == [-0.5, -0.25, 0.0]
    assert made.penalties.tolist() == [-0.25, 0.0, 0.0]
    assert made.rewards.tolist() == [0.25, 0.75, 0.0]
    assert batch.groups[0].rollouts[0].reward == 1.0
    metrics = make_objective(made, LossConfig(), 1).metrics
    assert metrics["rollout/length_reward"] == pytest.approx(-0.25)
    off = assemble(batch, messages, state, FoldConfig(batch_tasks=1, max_staleness=4))
    assert (off.length_rewards, off.rewards.tolist()) == (None, [1.0, 1.0, 0.0])


def test_parts_of_rewards_are_given_by_name() -> None:
    config = FoldConfig(batch_tasks=1, max_staleness=4, objectives=("right", "form"))
    rows = [
        long(0, 7, reward=2.0, reward_parts={"right": 1.0, "form": 0.5, "more": 9.0}),
        long(1, 6, reward=0.0, reward_parts={"right": 0.0}),
    ]
    made = assembled(*rows, config=config)
    assert {name: values.tolist() for name, values in made.reward_parts.items()} == {
        "right": [1.0, 0.0],
        "form": pytest.approx([0.5, math.nan], nan_ok=True),
        "more": pytest.approx([9.0, math.nan], nan_ok=True),
    }
    many = {f"p{number}": float(number) for number in range(MOST_PARTS + 1)}
    made = assembled(long(0, 7, reward=2.0, reward_parts=many), long(1, 6, reward=0.0), config=config)
    assert list(made.reward_parts) == ["right", "form", *list(many)[:MOST_PARTS]]
