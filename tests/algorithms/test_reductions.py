"""Token weights: closed forms, and independence of how samples are cut."""

from collections.abc import Callable
from typing import get_args

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamrl.algorithms.reductions import token_weights
from streamrl.config.loss import Reduction
from streamrl.core.balance import split_ranks
from streamrl.core.batches import TrainBatch, sample_of_token, samples_at
from streamrl.core.packing import plan_micro_batches
from streamrl.errors import TrainingError
from tests.support.errors import raises

MakeBatch = Callable[..., TrainBatch]


@pytest.fixture
def batch(make_batch: MakeBatch) -> TrainBatch:
    return make_batch(
        [
            {"prompt": [1], "answer": [2, 3], "task": 0, "rollout": 0},
            {"prompt": [1], "answer": [2, 3, 4, 5], "mask": [True, False, True, True], "task": 0, "rollout": 0},
            {"prompt": [1], "answer": [2], "task": 0, "rollout": 1},
            {"prompt": [1], "answer": [2], "mask": [False], "task": 1, "rollout": 0},
        ]
    )


def test_each_reduction_by_hand(batch: TrainBatch, make_batch: MakeBatch) -> None:
    got = token_weights(batch, np.arange(4), "rollout_mean")
    assert got == pytest.approx(np.array([0, 1, 1, 0, 1, 0, 1, 1, 0, 5, 0, 0]) / 15)
    assert token_weights(batch, np.arange(4), "token_mean") == pytest.approx(batch.loss_mask / 6)
    got = token_weights(batch, np.arange(4), "sequence_mean")
    assert got == pytest.approx(np.array([0, 1 / 2, 1 / 2, 0, 1 / 3, 0, 1 / 3, 1 / 3, 0, 1, 0, 0]) / 4)
    got = token_weights(batch, np.arange(4), "prompt_mean")
    assert got == pytest.approx(np.array([0, 1, 1, 0, 1, 0, 1, 1, 0, 1, 0, 0]) / 6 / 2)  # the second task has no trained token
    two = make_batch([{"prompt": [1], "answer": [2] * n, "task": n, "rollout": 0} for n in (1, 4)])
    assert token_weights(two, np.arange(2), "prompt_mean") == pytest.approx([0, 1 / 2, 0, 1 / 8, 1 / 8, 1 / 8, 1 / 8])
    # Of trained tokens 2, 3, 1 and 0: parts of two samples have 5 and 1, of three 6 and 0.
    every = np.arange(4)
    two = token_weights(batch, every, "token_mean_legacy", legacy_samples=2)
    assert two == pytest.approx(np.array([0, 1 / 5, 1 / 5, 0, 1 / 5, 0, 1 / 5, 1 / 5, 0, 1, 0, 0]) / 2)
    three = token_weights(batch, every, "token_mean_legacy", legacy_samples=3)
    assert three == pytest.approx(batch.loss_mask / 6 / 2)
    assert token_weights(batch, every, "token_mean_legacy", legacy_samples=1) == pytest.approx(token_weights(batch, every, "sequence_mean"))
    assert token_weights(batch, every, "token_mean_legacy", legacy_samples=9) == pytest.approx(token_weights(batch, every, "token_mean"))
    # In the order of the step's samples, and of no other's: the first and the third are a part.
    some = token_weights(batch, np.array([2, 0, 1]), "token_mean_legacy", legacy_samples=2)
    assert some == pytest.approx(np.array([0, 1 / 3, 1 / 3, 0, 1 / 3, 0, 1 / 3, 1 / 3, 0, 1 / 3, 0, 0]) / 2)
    got = token_weights(batch, np.arange(4), "constant_length", constant_length=10)
    assert got == pytest.approx(batch.loss_mask / 10 / 3)
    with raises(TrainingError, key="loss.constant_length", got=0):
        token_weights(batch, np.arange(4), "constant_length")
    with raises(TrainingError, key="loss.legacy_samples", got=0):
        token_weights(batch, np.arange(4), "token_mean_legacy")
    assert token_weights(batch, np.arange(4), "constant_length", constant_length=1) == pytest.approx(batch.loss_mask / 3)


@pytest.mark.parametrize("reduction", get_args(Reduction))
def test_a_step_over_nothing_weighs_nothing(batch: TrainBatch, reduction: Reduction) -> None:
    assert not token_weights(batch, np.arange(0), reduction, constant_length=7, legacy_samples=2).any()


@pytest.mark.parametrize("reduction", get_args(Reduction))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), parts=st.integers(1, 6), shards=st.integers(1, 4), ranks=st.integers(1, 3))
def test_the_loss_does_not_depend_on_how_its_tokens_are_spread(
    make_batch: MakeBatch, reduction: Reduction, seed: int, parts: int, shards: int, ranks: int
) -> None:
    """Over micro-batches, packing, ranks and context-parallel shards: the weighted sums of the parts add up to the whole's."""
    rng = np.random.default_rng(seed)
    samples = [
        {"prompt": [1], "answer": [2] * n, "mask": (rng.random(n) < 0.7).tolist(), "task": task, "rollout": rollout}
        for task in range(int(rng.integers(1, 5)))
        for rollout in range(int(rng.integers(1, 4)))
        for n in rng.integers(1, 9, int(rng.integers(1, 3))).tolist()
    ]
    batch = make_batch(samples)
    values_T = rng.normal(size=batch.num_tokens)
    weights_T = token_weights(batch, np.arange(batch.num_samples), reduction, constant_length=7, legacy_samples=3)
    whole = _reduced_by_hand(batch, values_T, reduction)
    assert weights_T @ values_T == pytest.approx(whole, rel=1e-12, abs=1e-12)
    spread = 0.0
    for own in split_ranks(batch, np.arange(batch.num_samples), ranks):
        for plan in plan_micro_batches(batch, batch.loss_mask, own, budget=int(rng.integers(2, 40)), share_prefixes=parts % 2 == 0):
            for shard in np.array_split(rng.permutation(plan.target), shards):
                spread += float(weights_T[shard] @ values_T[shard])
    assert spread == pytest.approx(whole, rel=1e-12, abs=1e-12)


def _reduced_by_hand(batch: TrainBatch, values_T: np.ndarray, reduction: Reduction) -> float:
    """The definition, one rollout or sample after the other."""
    bounds = list(zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True))
    trained = [values_T[a:b][batch.loss_mask[a:b]].tolist() for a, b in bounds]
    if reduction == "token_mean":
        every = [value for sample in trained for value in sample]
        return sum(every) / max(len(every), 1)
    rollouts: dict[tuple[int, int], list[float]] = {}
    if reduction == "token_mean_legacy":
        parts = [[value for sample in trained[first : first + 3] for value in sample] for first in range(0, len(trained), 3)]
        return sum(sum(part) / max(len(part), 1) for part in parts) / len(parts)
    for n, sample in enumerate(trained):
        key = (int(batch.tasks[n]), int(batch.rollouts[n]))
        if reduction in ("sequence_mean", "prompt_mean"):
            key = (n if reduction == "sequence_mean" else key[0], 0)
        rollouts.setdefault(key, []).extend(sample)
    sums = [sum(one) / (7 if reduction == "constant_length" else max(len(one), 1)) for one in rollouts.values()]
    return sum(sums) / len(rollouts)


@pytest.mark.parametrize("reduction", ["rollout_mean", "token_mean", "sequence_mean", "prompt_mean"])
def test_a_step_over_some_samples_weighs_nothing_else(batch: TrainBatch, reduction: Reduction) -> None:
    got = token_weights(batch, np.array([2]), reduction)
    assert got.nonzero()[0].tolist() == [9]
    assert got.sum() == 1.0
    assert not token_weights(batch, np.array([3]), reduction).any()


def test_tokens_know_their_samples_also_beside_empty_ones(batch: TrainBatch) -> None:
    assert token_weights(batch, np.array([0, 1, 2]), "rollout_mean").sum() == pytest.approx(1)
    assert sample_of_token(batch).tolist() == [0] * 3 + [1] * 5 + [2] * 2 + [3] * 2
    offsets = np.array([0, 0, 3, 3, 8, 10, 12, 12])
    for packed in (batch, msgspec.structs.replace(batch, offsets=offsets)):
        assert samples_at(packed, np.arange(12)).tolist() == sample_of_token(packed).tolist()
    assert samples_at(batch, np.array([9, 0, 2])).tolist() == [2, 0, 0]
