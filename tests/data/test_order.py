"""Which row a task takes: the order of a set, and the shares of several."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.data.mixture import BLOCK, extended, places_at, quotas, segment_of, source_of
from streamrl.data.order import row_of
from streamrl.schemas.control import MixtureSegment


@given(seed=st.integers(0, 2**63 - 1), num_rows=st.integers(1, 300), epoch=st.integers(0, 1000))
def test_each_epoch_is_a_permutation(seed, num_rows, epoch):
    drawn = [row_of(seed, epoch * num_rows + place, num_rows) for place in range(num_rows)]
    assert {each for each, _ in drawn} == {epoch}
    assert sorted(row for _, row in drawn) == list(range(num_rows))


def test_the_order_of_old_is_kept():
    assert [row_of(3, i, 4, shuffle=False) for i in range(9)] == [divmod(i, 4) for i in range(9)]
    assert [row_of(7, i, 10)[1] for i in range(20)] == PINNED


PINNED = [6, 4, 8, 9, 5, 2, 7, 3, 0, 1, 6, 9, 3, 8, 7, 2, 0, 1, 4, 5]


@pytest.mark.parametrize(("index", "num_rows"), [(0, 0), (-1, 5)])
def test_bad_arguments(index, num_rows):
    with pytest.raises(ValueError, match="expected num_rows >= 1"):
        row_of(0, index, num_rows)


WEIGHTS = st.lists(st.sampled_from([0.0, 1e-6, 0.3, 1.0, 7.0]), min_size=1, max_size=5).filter(any)


def test_quotas_by_hand() -> None:
    assert quotas([1, 1, 1]) == (334, 333, 333)
    assert quotas([3, 1]) == (750, 250)
    assert quotas([1, 0]) == (1000, 0)
    assert quotas([1, 1e-9]) == (999, 1)
    for weights in ([0.0], [-1.0, 2.0], [float("inf")], [float("nan")], [1.0] * (BLOCK + 1)):
        with pytest.raises(ValueError, match="expected at most"):
            quotas(weights)


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 99), changes=st.lists(st.tuples(WEIGHTS, st.integers(0, 1500)), min_size=1, max_size=4))
def test_places_are_counted_through_every_change(seed: int, changes: list[tuple[list[float], int]]) -> None:
    """By brute force: the n-th task of a source has place n, whatever segments there were."""
    number = max(len(weights) for weights, _ in changes)
    segments: tuple[MixtureSegment, ...] = ()
    granted = 0
    for version, (weights, more) in enumerate(changes):
        granted += more
        segments = extended(segments, (*weights, *[0.0] * (number - len(weights))), seed=seed, version=version, granted=granted)
    assert next(iter(segments)).first == 0 and all(a.first < b.first for a, b in pairwise(segments))
    seen = [0] * number
    for task in range(granted + 50):
        segment = segment_of(segments, task)
        assert places_at(seed, segment, task) == tuple(seen)
        source, place = source_of(seed, segment, task)
        assert segment.weights[source] > 0
        assert place == seen[source]
        seen[source] += 1


def test_a_batch_has_about_its_shares_and_seeds_differ() -> None:
    segments = extended((), (3.0, 1.0), seed=1, version=0, granted=0)
    drawn = [[source_of(seed, segments[0], task)[0] for task in range(4 * BLOCK)] for seed in (1, 2)]
    assert drawn[0] != drawn[1] and drawn[0][:BLOCK] != drawn[0][BLOCK : 2 * BLOCK]
    assert [sum(drawn[0][start : start + BLOCK]) for start in range(0, 4 * BLOCK, BLOCK)] == [250] * 4
    # Hypergeometric: 64 of 1000, sd 3.4 around 16; 5 sd.
    assert all(0 < sum(drawn[0][start : start + 64]) < 34 for start in range(0, 64 * 60, 64))


def test_a_segment_begins_where_nobody_can_have_issued() -> None:
    first = extended((), (1.0, 0.0), seed=0, version=0, granted=16)
    assert [segment.first for segment in first] == [0]
    assert extended(first, (1.0, 0.0), seed=0, version=5, granted=64) == first
    second = extended(first, (0.0, 1.0), seed=0, version=5, granted=64)
    assert [(segment.first, segment.version) for segment in second] == [(0, 0), (64, 5)]
    assert extended(second, (1.0, 0.0), seed=0, version=4, granted=60) == second, "who is behind changes nothing"
    third = extended(second, (1.0, 1.0), seed=0, version=6, granted=64)
    assert [(segment.first, segment.weights) for segment in third] == [(0, (1.0, 0.0)), (64, (1.0, 1.0))]
    assert third[-1].places == (64, 0)
