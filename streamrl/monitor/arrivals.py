"""How old the oldest message is that no batch has come to, from how far the sample stream was when it was looked at. Reads no message."""

from __future__ import annotations

from collections import deque

MOST_MARKS = 2048


class Arrivals:
    """Remembers when the stream had grown to which sequence, in bounded memory. No clock of its own."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque()
        self._now_s = 0.0

    def mark(self, now_s: float, last: int) -> None:
        """The stream ends with sequence `last` at `now_s`; times must not fall."""
        self._now_s = now_s
        if not self._marks or last > self._marks[-1][1]:
            self._marks.append((now_s, last))
        if len(self._marks) > MOST_MARKS:
            self._marks = deque(mark for place, mark in enumerate(self._marks) if not place or place % 2 == len(self._marks) % 2)

    def age_s(self, cursor: int) -> float:
        """Seconds since the first message behind `cursor` was seen, as of the last mark; 0.0 if there is none.

        A message that was there at the first mark counts from then. To be asked with cursors that do not fall.
        """
        while self._marks and self._marks[0][1] <= cursor:
            self._marks.popleft()
        return self._now_s - self._marks[0][0] if self._marks else 0.0
