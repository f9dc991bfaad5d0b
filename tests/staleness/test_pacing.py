"""Just-in-time pacing: what is granted, and what that does to staleness and to the trainer's utilisation on the simulated clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.core.pacing import refilled, released
from streamrl.core.state import FoldConfig, window
from tests.staleness.measure import PACED, measured

B = 8
FULL = FoldConfig(batch_tasks=B, max_staleness=4)
HOLD = FoldConfig(batch_tasks=B, max_staleness=4, hold_ahead=True)


@pytest.mark.parametrize(("ready", "release"), [(0, 12), (4, 10), (8, 8), (16, 4), (23, 1), (24, 0), (30, 0)])
def test_a_step_steers_towards_one_ready_batch(ready: int, release: int) -> None:
    assert released(24, 8, ready, 0, HOLD) == 24 + release


def test_ended_tasks_are_replaced_within_the_window() -> None:
    assert (window(FULL), window(FoldConfig(batch_tasks=B, max_staleness=4, delay_versions=3))) == (5 * B, 2 * B)
    assert (refilled(40, 3, 3, FULL), refilled(30, 5, 2, HOLD)) == (43, 32)
    assert (released(43, 16, 30, 0, FULL), released(30, 11, 30, 3, HOLD)) == (56, 33)


@given(granted=st.integers(0, 400), retired=st.integers(0, 300), ready=st.integers(0, 60), dropped=st.integers(0, 20))
def test_a_grant_never_falls_and_never_exceeds_the_window(granted: int, retired: int, ready: int, dropped: int) -> None:
    for given_next in (released(granted, retired, ready, dropped, HOLD), refilled(granted, retired, dropped, HOLD)):
        assert granted <= given_next <= max(granted, retired + window(HOLD))


@pytest.mark.parametrize("tail", ["fixed", "uniform"])
def test_pacing_lowers_staleness_and_keeps_the_trainer_busy(tail: str) -> None:
    full, paced = (measured(PACED, tail=tail, steps=60, hold=hold) for hold in (False, True))
    assert paced.mean_age < 0.7 * full.mean_age
    assert paced.utilisation > 0.97 * full.utilisation
    assert (full.stale, paced.stale) == (0, 0)
