"""How many tasks may be issued: worked examples of both formulas of streamrl/core/pacing.py. Simulated runs: tests/staleness."""

import pytest

from streamrl.core.pacing import refilled, released
from tests.support.records import config

FULL = config(4, 2)
"""Window (2 + 1) * 4 = 12."""
HOLD = config(4, 2, hold_ahead=True)


@pytest.mark.parametrize(("granted", "retired", "ended", "expected"), [(12, 0, 0, 12), (12, 1, 1, 13), (12, 5, 1, 17), (20, 5, 1, 20)])
def test_the_window_is_kept_full(granted: int, retired: int, ended: int, expected: int) -> None:
    assert refilled(granted, retired, ended, FULL) == expected
    assert released(granted, retired, 7, ended, FULL) == expected, "the same after a step, whatever is ready"


@pytest.mark.parametrize(
    ("granted", "retired", "ended", "expected"),
    [
        (8, 0, 0, 8),  # nothing ended: what is held stays held
        (8, 3, 2, 10),  # one for each that ended
        (12, 2, 3, 14),  # but no more than the window: 2 + 12
        (15, 2, 1, 15),  # and never less than before
    ],
)
def test_while_holding_only_what_ended_is_replaced(granted: int, retired: int, ended: int, expected: int) -> None:
    assert refilled(granted, retired, ended, HOLD) == expected


@pytest.mark.parametrize(
    ("ready", "release"), [(0, 6), (1, 6), (2, 5), (3, 5), (4, 4), (5, 4), (6, 3), (11, 1), (12, 0), (13, 0), (14, 0), (40, 0)]
)
def test_a_step_releases_b_and_half_of_what_is_missing_of_b(ready: int, release: int) -> None:
    # B = 4: max(0, 4 + ceil((4 - ready) / 2)), as in ready = 3: 4 + ceil(1 / 2) = 5.
    assert released(10, 8, ready, 0, HOLD) == 10 + release


@pytest.mark.parametrize(
    ("granted", "retired", "ready", "dropped", "expected"),
    [
        (10, 8, 4, 3, 17),  # 10 + 3 dropped + 4
        (10, 8, 12, 3, 13),  # what was dropped is replaced even where nothing is released: 4 + ceil(-8 / 2) = 0
        (10, 8, 14, 3, 13),  # and where less than nothing would be: 4 + ceil(-10 / 2) = -1
        (10, 1, 0, 2, 13),  # no more than the window: 1 + 12
        (15, 1, 0, 2, 15),  # never less than before
    ],
)
def test_what_a_step_drops_is_replaced_within_the_window(granted: int, retired: int, ready: int, dropped: int, expected: int) -> None:
    assert released(granted, retired, ready, dropped, HOLD) == expected
