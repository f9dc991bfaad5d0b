"""Token weights: closed forms, and independence of how samples are cut."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from streamrl.core.batches import TrainBatch
from streamrl.core.reductions import Reduction, sample_of_token, token_weights

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


def test_rollout_mean_shares_the_denominator_among_a_rollouts_samples(batch: TrainBatch) -> None:
    got = token_weights(batch, np.arange(4), "rollout_mean")
    assert got == pytest.approx(np.array([0, 1, 1, 0, 1, 0, 1, 1, 0, 5, 0, 0]) / 15)


def test_token_mean(batch: TrainBatch) -> None:
    assert token_weights(batch, np.arange(4), "token_mean") == pytest.approx(batch.loss_mask / 6)


@pytest.mark.parametrize("reduction", ["rollout_mean", "token_mean"])
def test_a_step_over_some_samples_weighs_nothing_else(batch: TrainBatch, reduction: Reduction) -> None:
    got = token_weights(batch, np.array([2]), reduction)
    assert got.nonzero()[0].tolist() == [9]
    assert got.sum() == 1.0
    assert not token_weights(batch, np.array([3]), reduction).any()


def test_constant_values_reduce_to_themselves(batch: TrainBatch) -> None:
    assert token_weights(batch, np.array([0, 1, 2]), "rollout_mean").sum() == pytest.approx(1)
    assert sample_of_token(batch).tolist() == [0] * 3 + [1] * 5 + [2] * 2 + [3] * 2
