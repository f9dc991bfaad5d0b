"""Returns of tokens: golden numbers, and a second implementation over packed batches with holes."""

from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.algorithms.returns import CHUNK, Floats, discounted_returns, find_steps, gae, scan, scan_serial, vtrace
from tests.support import reference_returns as reference

ALL = np.ones(3, np.bool_)
PLAIN: dict[str, Any] = {"gamma": 1.0, "gae_lambda": 1.0, "rho": 1.0, "c": 1.0}


class Packed(NamedTuple):
    rewards: Floats
    values: Floats
    log_ratio: Floats
    offsets: np.ndarray
    mask: np.ndarray

    def sequences(self) -> list[tuple[list[int], list[reference.Step]]]:
        """Of each sample its trained tokens, and the reference's steps."""
        found = []
        for first, end in zip(self.offsets[:-1], self.offsets[1:], strict=True):
            tokens = [t for t in range(first, end) if self.mask[t]]
            ratios = np.exp(np.clip(self.log_ratio, -20, 20))
            found.append((tokens, [(t, self.rewards[t], self.values[t], ratios[t]) for t in tokens]))
        return found


@st.composite
def packed(draw: st.DrawFn) -> Packed:
    lengths = draw(st.lists(st.integers(0, 7), min_size=1, max_size=5))
    size = sum(lengths)

    def numbers(low: float, high: float) -> Floats:
        return np.array(draw(st.lists(st.floats(low, high), min_size=size, max_size=size)), np.float64)

    mask = np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size)), np.bool_)
    log_ratio, rewards, values = numbers(-3, 3), numbers(-2, 2), numbers(-2, 2)
    for array in (log_ratio, rewards, values):
        array[~mask] = np.nan  # what is not a step must not be read
    return Packed(rewards, values, log_ratio, np.cumsum([0, *lengths]), mask)


gammas, lambdas, clips = st.sampled_from([1.0, 0.9, 0.5]), st.sampled_from([1.0, 0.95, 0.0]), st.sampled_from([0.3, 1.0, 4.0])


def test_returns_by_hand() -> None:
    advantages, returns = gae(np.array([0.0, 0, 1]), np.array([0.5, 0.4, 0.3]), np.array([0, 3]), ALL, gamma=0.99, gae_lambda=0.95)
    assert advantages == pytest.approx([0.418307, 0.55535, 0.7], abs=1e-6)
    assert returns == pytest.approx([0.918307, 0.95535, 1.0], abs=1e-6)
    rewards = np.array([-0.01, -0.02, 0.0, 1 - 0.04])
    assert discounted_returns(rewards, np.array([0, 4]), gamma=0.9) == pytest.approx([0.6718, 0.7576, 0.8640, 0.9600], abs=5e-5)
    got = discounted_returns(np.array([1.0, 2, 4, 8]), np.array([0, 1, 1, 3, 4, 4]), gamma=0.5)
    assert got.tolist() == [1, 4, 4, 8]
    assert discounted_returns(np.zeros(0), np.array([0, 0]), gamma=0.5).tolist() == []
    rewards, values = np.array([1.0, 2, 4]), np.array([7.0, -3, 0.5])
    advantages, returns = gae(rewards, values, np.array([0, 3]), ALL, gamma=0.5, gae_lambda=1.0)
    assert returns == pytest.approx([3, 4, 4])
    assert advantages == pytest.approx([3 - 7, 4 + 3, 4 - 0.5])
    # Two steps with one token of a tool between them: the discount counts it, its reward and value are not read.
    mask = np.array([True, False, True])
    advantages, returns = gae(np.array([0.0, 99, 1]), np.array([0.5, np.nan, 0.25]), np.array([0, 3]), mask, gamma=0.5, gae_lambda=0.5)
    second = 1 - 0.25
    first = 0.25 * 0.25 - 0.5 + 0.25 * 0.5 * second
    assert advantages == pytest.approx([first, 0, second])
    assert returns == pytest.approx([first + 0.5, 0, 1])


@given(packed(), gammas, lambdas, clips, clips, st.randoms(use_true_random=False))
def test_a_cut_sample_goes_on_with_the_value_behind_it(
    batch: Packed, gamma: float, lam: float, rho: float, c: float, chance: Random
) -> None:
    """Reference: as if there were one step more, at the sample's end, of that value and with nothing to learn: its delta is 0."""
    ends = np.array([chance.choice([0.0, chance.uniform(-2, 2)]) for _ in batch.offsets[1:]])
    layout = (batch.offsets, batch.mask)
    advantages, returns = gae(batch.rewards, batch.values, *layout, gamma=gamma, gae_lambda=lam, ends=ends)
    clipped: dict[str, Any] = {"gamma": gamma, "gae_lambda": lam, "rho": rho, "c": c}
    theirs, targets = vtrace(batch.rewards, batch.values, batch.log_ratio, *layout, **clipped, ends=ends)
    for place, (tokens, steps) in enumerate(batch.sequences()):
        longer = [*steps, (int(batch.offsets[place + 1]), ends[place], ends[place], 1.0)]
        expected = reference.gae(longer, gamma, lam)[:-1]
        assert advantages[tokens] == pytest.approx(expected, abs=1e-9)
        assert returns[tokens] == pytest.approx([a + step[2] for a, step in zip(expected, steps, strict=True)], abs=1e-9)
        of_vtrace = reference.vtrace(longer, gamma, lam, rho, c)
        assert theirs[tokens] == pytest.approx(of_vtrace[0][:-1], rel=1e-9, abs=1e-9)
        assert targets[tokens] == pytest.approx(of_vtrace[1][:-1], rel=1e-9, abs=1e-9)


def test_a_cut_by_hand() -> None:
    """The golden numbers' sample, cut with a value of 0.6 behind it: its last delta is 1 + 0.99 * 0.6 - 0.3, the others follow."""
    where = (np.array([0.0, 0, 1]), np.array([0.5, 0.4, 0.3]), np.array([0, 3]), ALL)
    last = 1 + 0.99 * 0.6 - 0.3
    second = 0.99 * 0.3 - 0.4 + 0.99 * 0.95 * last
    first = 0.99 * 0.4 - 0.5 + 0.99 * 0.95 * second
    advantages, returns = gae(*where, gamma=0.99, gae_lambda=0.95, ends=np.array([0.6]))
    assert advantages == pytest.approx([first, second, last]) and returns == pytest.approx([first + 0.5, second + 0.4, last + 0.3])
    over = gae(*where, gamma=0.99, gae_lambda=0.95, ends=np.zeros(1))
    assert all(np.array_equal(a, b) for a, b in zip(over, gae(*where, gamma=0.99, gae_lambda=0.95), strict=True)), "0: the episode is over"


def test_vtrace_by_hand() -> None:
    """A ratio of 0 at the second of three steps: its own target stays its value, and the first learns only up to it."""
    log_ratio = np.array([0.0, -np.inf, 0.0])
    _, targets = vtrace(np.array([1.0, 5, 9]), np.array([0.5, 0.25, 0.125]), log_ratio, np.array([0, 3]), ALL, **PLAIN)
    assert targets == pytest.approx([1 + 0.25, 0.25, 9], abs=1e-7)
    one, step = np.array([1.0]), (np.array([0, 1]), np.array([True]))
    _, targets = vtrace(one, one * 0.5, np.array([1e6]), *step, gamma=1.0, gae_lambda=1.0, rho=np.inf, c=np.inf)
    assert targets == pytest.approx(0.5 + np.exp(20.0) * 0.5)
    _, targets = vtrace(one, one * 0.5, np.array([-1e6]), *step, **PLAIN)
    assert targets - 0.5 == pytest.approx(np.exp(-20.0) * 0.5, rel=1e-6)


@pytest.mark.parametrize("size", [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1, CHUNK * CHUNK + 1, 3 * CHUNK * CHUNK - 5])
def test_chunks_of_128_equal_the_serial_scan(size: int) -> None:
    rng = np.random.default_rng(size)
    terms = rng.normal(size=size)
    factors = np.where(rng.random(size) < 0.003, 0.0, rng.uniform(0.9, 1.0, size))
    assert scan(terms, factors) == pytest.approx(scan_serial(terms, factors), rel=1e-12, abs=1e-12)


def test_the_scan_by_hand() -> None:
    assert scan_serial(np.array([1.0, 2, 3]), np.array([10.0, 100, 7])).tolist() == [1 + 10 * (2 + 100 * 3), 2 + 100 * 3, 3]
    assert scan(np.zeros(0), np.zeros(0)).tolist() == []
    steps = find_steps(np.array([0, 1, 1, 6, 8]), np.array([1, 1, 0, 0, 1, 1, 0, 1], np.bool_), 0.5)
    assert steps.index.tolist() == [0, 1, 4, 5, 7]
    assert steps.discount.tolist() == [0.0, 0.125, 0.5, 0.0, 0.0]
    terms = np.arange(1.0, 1001.0)
    factors = np.ones(1000)
    factors[[0, 300, 511, 512, 999]] = 0.0
    assert np.array_equal(scan(terms, factors), scan_serial(terms, factors))
    assert scan(terms, factors)[511:514].tolist() == [512, 513, terms[513:].sum()]
