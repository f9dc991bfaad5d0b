"""Trying again: how long to pause, and how often is too often."""

from __future__ import annotations

from collections import deque


def pause_s(failures: int, *, first_s: float, most_s: float) -> float:
    """Seconds to wait after the given number of failures in a row (1, 2, ...): `first_s`, doubled with each, at most `most_s`."""
    return min(most_s, first_s * 2.0 ** min(failures - 1, 64))


class FailureWindow:
    """How many failures lie within the last `window_s` seconds."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._times_s: deque[float] = deque()

    def add(self, now_s: float) -> int:
        """Count one more; returns how many there are within the window, this one included. Times must not fall."""
        self._times_s.append(now_s)
        while self._times_s[0] < now_s - self._window_s:
            self._times_s.popleft()
        return len(self._times_s)
