from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.data.order import permuted, row_of


@given(seed=st.integers(0, 2**63 - 1), num_rows=st.integers(1, 300), epoch=st.integers(0, 1000))
def test_each_epoch_is_a_permutation(seed, num_rows, epoch):
    drawn = [row_of(seed, epoch * num_rows + place, num_rows) for place in range(num_rows)]
    assert {each for each, _ in drawn} == {epoch}
    assert sorted(row for _, row in drawn) == list(range(num_rows))


def test_the_order_of_old_is_kept():
    assert [row_of(3, i, 4, shuffle=False) for i in range(9)] == [divmod(i, 4) for i in range(9)]
    assert [row_of(7, i, 10)[1] for i in range(20)] == PINNED


def test_epochs_and_seeds_differ():
    def order(seed, epoch):
        return tuple(row_of(seed, epoch * 100 + place, 100)[1] for place in range(100))

    assert len({order(seed, epoch) for seed in range(5) for epoch in range(5)}) == 25


PINNED = [6, 4, 8, 9, 5, 2, 7, 3, 0, 1, 6, 9, 3, 8, 7, 2, 0, 1, 4, 5]


def test_places_are_uniform():
    """Chi-square of (place, row) over many keys: 9 degrees of freedom, 0.1 % point 27.9; the keys are fixed."""
    for place in range(10):
        counts = Counter(permuted(key, place, 10) for key in range(4000))
        assert sum((counts[row] - 400) ** 2 / 400 for row in range(10)) < 27.9


def test_neighbours_are_independent():
    """Ordered pairs (row of place 0, row of place 1) over many keys: 89 degrees of freedom, 0.1 % point 135.9."""
    counts = Counter((permuted(key, 0, 10), permuted(key, 1, 10)) for key in range(9000))
    assert len(counts) == 90
    assert sum((count - 100) ** 2 / 100 for count in counts.values()) < 135.9


@pytest.mark.parametrize(("index", "num_rows"), [(0, 0), (-1, 5)])
def test_bad_arguments(index, num_rows):
    with pytest.raises(ValueError, match="expected num_rows >= 1"):
        row_of(0, index, num_rows)
