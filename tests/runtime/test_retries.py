from __future__ import annotations

from streamrl.runtime.retries import FailureWindow, pause_s


def test_pauses_double_up_to_a_bound() -> None:
    assert [pause_s(failures, first_s=0.5, most_s=3.0) for failures in (1, 2, 3, 4, 5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert pause_s(10_000, first_s=0.5, most_s=30.0) == 30.0
    assert pause_s(3, first_s=0.0, most_s=30.0) == 0.0


def test_failures_older_than_the_window_are_forgotten() -> None:
    window = FailureWindow(10.0)
    assert [window.add(now_s) for now_s in (0.0, 4.0, 10.0, 10.5, 14.5, 100.0)] == [1, 2, 3, 3, 3, 1]
    assert [FailureWindow(0.0).add(5.0)] == [1]
