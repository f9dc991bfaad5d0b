"""The chunked scan against the serial one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.algorithms.scan import CHUNK, scan, scan_serial


def test_the_definition() -> None:
    assert scan_serial(np.array([1.0, 2, 3]), np.array([10.0, 100, 7])).tolist() == [1 + 10 * (2 + 100 * 3), 2 + 100 * 3, 3]


def test_of_nothing() -> None:
    assert scan(np.zeros(0), np.zeros(0)).tolist() == []


@pytest.mark.parametrize("size", [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1, CHUNK * CHUNK + 1, 3 * CHUNK * CHUNK - 5])
def test_chunks_of_128_equal_the_serial_scan(size: int) -> None:
    rng = np.random.default_rng(size)
    terms = rng.normal(size=size)
    factors = np.where(rng.random(size) < 0.003, 0.0, rng.uniform(0.9, 1.0, size))
    assert scan(terms, factors) == pytest.approx(scan_serial(terms, factors), rel=1e-12, abs=1e-12)


def test_whole_numbers_are_exact_and_a_factor_of_zero_lets_nothing_through() -> None:
    terms = np.arange(1.0, 1001.0)
    factors = np.ones(1000)
    factors[[0, 300, 511, 512, 999]] = 0.0
    assert np.array_equal(scan(terms, factors), scan_serial(terms, factors))
    assert scan(terms, factors)[511:514].tolist() == [512, 513, terms[513:].sum()]


@given(st.lists(st.tuples(st.floats(-10, 10), st.sampled_from([0.0, 0.5, 0.95, 1.0, 1.2, -1.0])), max_size=60), st.integers(2, 7))
def test_any_chunk_length(steps: list[tuple[float, float]], chunk: int) -> None:
    terms, factors = np.array([s[0] for s in steps]), np.array([s[1] for s in steps])
    # What rounding may cost is bounded by the same sum without signs.
    size = scan_serial(np.abs(terms), np.abs(factors)).max(initial=1.0)
    assert scan(terms, factors, chunk=chunk) == pytest.approx(scan_serial(terms, factors), rel=0, abs=1e-13 * size)
