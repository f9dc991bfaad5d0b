"""Masked whitening: closed forms, one rank and two."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from threading import Thread

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from streamrl.algorithms.whitening import Reduce, whiten
from streamrl.errors import TrainingError


def test_bessels_correction_and_epsilon() -> None:
    got = whiten(np.array([1.0, 3.0, np.nan]), np.array([True, True, False]))
    assert got == pytest.approx([-1 / np.sqrt(2 + 1e-8), 1 / np.sqrt(2 + 1e-8), 0], rel=1e-12)


def test_epsilon_is_added_to_the_variance() -> None:
    """Values 1e-4 apart: their variance 5e-9 is smaller than the epsilon, 1e-8."""
    assert whiten(np.array([0.0, 1e-4]), np.ones(2, np.bool_)) == pytest.approx(np.array([-5e-5, 5e-5]) / np.sqrt(1.5e-8))


def test_a_single_value_and_equal_values_give_zero() -> None:
    assert whiten(np.array([7.0, 8.0]), np.array([True, False])).tolist() == [0, 0]
    assert whiten(np.full(4, 0.25), np.ones(4, np.bool_)).tolist() == [0] * 4


def test_nothing_trained_is_refused() -> None:
    with pytest.raises(TrainingError, match="trained tokens"):
        whiten(np.ones(3), np.zeros(3, np.bool_))


def test_a_large_mean_costs_no_digits() -> None:
    assert whiten(np.array([1e8, 1e8 + 1, 1e8 + 2]), np.ones(3, np.bool_)) == pytest.approx([-1, 0, 1], rel=1e-7)


@given(st.lists(st.tuples(st.floats(-5, 5), st.booleans()), min_size=2, max_size=20))
def test_mean_zero_deviation_one(rows: list[tuple[float, bool]]) -> None:
    values, mask = np.array([r[0] for r in rows]), np.array([r[1] for r in rows])
    if mask.sum() < 2:
        return
    got = whiten(values, mask)
    deviation = np.std(values[mask], ddof=1)
    assert got[mask] == pytest.approx((values[mask] - values[mask].mean()) / np.sqrt(deviation**2 + 1e-8), abs=1e-9)


def both_ranks(run: Callable[[int, Reduce], None]) -> None:
    """`run(rank, reduce)` on two threads, with gloo's sum between them."""
    store = dist.HashStore()
    failures: list[BaseException] = []

    def rank(number: int) -> None:
        try:
            group = dist.ProcessGroupGloo(store, number, 2, timedelta(seconds=60))

            def reduce(array: np.ndarray) -> np.ndarray:
                tensor = torch.from_numpy(array.copy())
                group.allreduce([tensor]).wait()
                return tensor.numpy()

            run(number, reduce)
        except BaseException as error:
            failures.append(error)

    threads = [Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@pytest.mark.parametrize("cut", [0, 1, 6])
def test_two_ranks_over_gloo_equal_one(cut: int) -> None:
    """Also where a rank has no token, or none that is trained."""
    values = np.random.default_rng(0).normal(3, 2, 10)
    mask = np.array([False, True, True, False, True, True, True, False, True, True])
    found: dict[int, np.ndarray] = {}
    part = {0: slice(0, cut), 1: slice(cut, 10)}
    both_ranks(lambda rank, reduce: found.__setitem__(rank, whiten(values[part[rank]], mask[part[rank]], reduce=reduce)))
    assert np.concatenate([found[0], found[1]]) == pytest.approx(whiten(values, mask), abs=1e-14)
