"""Histograms of lengths against numpy on the lengths themselves."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.core.lengths import MOST_BUCKETS, PER_OCTAVE, added, bucket, distance, edge, histogram, quantile

LENGTHS = st.lists(st.integers(0, 1 << 20), min_size=1, max_size=200)


@given(length=st.integers(1, 1 << 31))
def test_a_length_lies_between_the_edges_of_its_bucket(length: int) -> None:
    place = bucket(length)
    assert edge(place) <= length * (1 + 1e-12) and length < edge(place + 1) * (1 + 1e-12)


def test_what_lies_outside_has_the_first_and_the_last_bucket() -> None:
    assert (bucket(0), bucket(-3), bucket(1)) == (0, 0, 1)
    assert bucket(1 << 40) == bucket(1 << 60) == MOST_BUCKETS - 1
    assert histogram([]) == ()


@given(one=LENGTHS, other=LENGTHS)
def test_histograms_add_up_like_what_they_count(one: list[int], other: list[int]) -> None:
    assert added(histogram(one), histogram(other)) == histogram(one + other)
    assert sum(histogram(one)) == len(one)


@given(lengths=LENGTHS, part=st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_a_quantile_is_within_its_bucket(lengths: list[int], part: float) -> None:
    expected = float(np.quantile(lengths, part, method="inverted_cdf"))
    assert bucket(int(expected)) == bucket(round(quantile(histogram(lengths), part))) or expected < 8
    assert quantile(histogram(lengths), part) == pytest.approx(expected, rel=2 ** (1 / PER_OCTAVE) - 1, abs=1e-9)


@given(one=LENGTHS, other=LENGTHS)
def test_the_distance_is_that_of_the_lengths_at_the_edges(one: list[int], other: list[int]) -> None:
    edges = [edge(place + 1) * (1 - 1e-12) for place in range(MOST_BUCKETS)]
    shares = [np.searchsorted(np.sort(lengths), edges, side="right") / len(lengths) for lengths in (one, other)]
    assert distance(histogram(one), histogram(other)) == pytest.approx(float(np.abs(shares[0] - shares[1]).max()), abs=1e-12)


def test_there_is_no_distance_to_nothing() -> None:
    assert math.isnan(distance((), (1,))) and math.isnan(quantile((), 0.5)) and math.isnan(quantile((0, 0), 0.5))
    assert (distance((1, 2), (2, 4)), distance((3,), (0, 5))) == (0.0, 1.0)
