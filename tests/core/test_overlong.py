"""The soft overlong penalty against equation 13 of arXiv 2503.14476, and that it is taken once."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from streamrl.algorithms.objective import make_objective
from streamrl.config.loss import LossConfig
from streamrl.core.assembly import assemble
from streamrl.core.batches import TrainBatch
from streamrl.core.fold import fold
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
    batch, messages, state = closed([rows], CONFIG)
    arrays = assemble(batch, messages, state, CONFIG)
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


def given_to_trainer(config: FoldConfig, **values: Any) -> TrainBatch:
    batch, messages, state = closed([[long(0, 7, reward=1.0, **values), long(1, 6, reward=0.0, **values)]], config)
    return assemble(batch, messages, state, config)


def test_it_is_taken_from_the_samples_own_limit_or_the_runs() -> None:
    assert given_to_trainer(CONFIG).rewards.tolist() == [1.0 - 0.5 / 4, 0.0]
    at = given_to_trainer(replace(CONFIG, overlong_length=8))
    assert at.rewards.tolist() == [1.0 - 0.5 * 3 / 4, 0.0 - 0.5 * 2 / 4] and at.penalties is not None
    off = given_to_trainer(replace(CONFIG, overlong_buffer=0, overlong_length=8))
    assert off.rewards.tolist() == [1.0, 0.0] and off.penalties is None


def test_masked_answers_are_as_long_as_others() -> None:
    cut = given_to_trainer(replace(CONFIG, overlong="train"), status=Status.COMPLETED)
    masked = np.array([0, 0] + [0] * 6, np.uint8)
    batch, messages, state = closed([[long(0, 7, reward=1.0), long(1, 6, reward=0.0, loss_mask=masked)]], CONFIG)
    assert assemble(batch, messages, state, CONFIG).rewards.tolist() == cut.rewards.tolist()


def test_rewards_are_punished_once_and_filtered_without_it() -> None:
    batch, messages, state = closed([[long(0, 10, reward=0.0), long(1, 3, reward=1.0)]], CONFIG)
    state, _ = fold(state, Rewarded(2, 1, 0, 2.0, 1), CONFIG)
    state, _ = fold(state, Rewarded(3, 1, 0, 0.5, 2), CONFIG)
    assert state.pending[1].rollouts[0].reward == 0.5, "the log has it without"
    assert state.reward_sum == 1.0, "and so has what ends a run"
    corrected = replace(batch, groups=(state.pending[1],))
    assert assemble(corrected, messages, state, CONFIG).rewards.tolist() == [0.0, 1.0]
    with pytest.raises(AssertionError):
        closed([[long(0, 10, reward=1.0), long(1, 3, reward=1.0)]], CONFIG)
    flat = replace(CONFIG, drop_zero_variance=False)
    batch, messages, state = closed([[long(0, 10, reward=1.0), long(1, 3, reward=1.0)]], flat)
    assert assemble(batch, messages, state, flat).rewards.tolist() == [0.5, 1.0], "length alone teaches"


def test_what_was_taken_is_a_metric() -> None:
    batch = given_to_trainer(CONFIG)
    assert make_objective(batch, LossConfig(), 1).metrics["rollout/overlong_penalty"] == pytest.approx(-0.0625)
    assert "rollout/overlong_penalty" not in make_objective(replace(batch, penalties=None), LossConfig(), 1).metrics
