"""Tokens of which nobody has said yet what became of them: sampled ones, and those on the sample stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

_MEAN_OF = 16
"""Batches whose messages say how long one is."""
_SAMPLED = "tokens/sampled_total"
_ENDED = ("tokens/published_total", "tokens/greedy_total", "tokens/cut_total", "tokens/evaluated_total")


class Goodput:
    """Adds up reports: sampled = published + greedy + cut + evaluated + open.

    What a killed process had in hand, and had not reported yet, is open for ever. One process's reports may come before another's,
    so that a moment may have fewer than none.
    """

    def __init__(self) -> None:
        self.open = 0.0

    def add(self, sums: Mapping[str, float]) -> None:
        """The amounts of a report."""
        self.open += sums.get(_SAMPLED, 0.0) - sum(sums.get(name, 0.0) for name in _ENDED)


class Backlog:
    """Sampled tokens on the sample stream that are neither trained nor dropped, by the ledger and the stream's end; reads no message.

    What waits for its group or its batch is exact; messages behind the newest batch's cursor count as long as those before them were.
    """

    def __init__(self) -> None:
        self._waiting: float | None = None
        self._taken: deque[tuple[int, float]] = deque([(0, 0.0)], maxlen=_MEAN_OF + 1)
        """(cursor, tokens stored since the entry before) of the newest entries."""

    def ledger(self, cursor: int, metrics: Mapping[str, float]) -> None:
        """The next entry; one whose cursor lies further back takes the place of those behind it.

        A batch that was waiting closes where the one before did, and has stored nothing since.
        """
        self._waiting = metrics.get("tokens/waiting")
        stored = metrics.get("tokens/stored_total", 0.0)
        while self._taken and self._taken[-1][0] >= cursor:
            known, before = self._taken.pop()
            stored = max(stored, before) if known == cursor else stored
        self._taken.append((cursor, stored))

    def tokens(self, last: int) -> float | None:
        """With the stream ending at sequence `last`; None: not known, as of runs of earlier builds and before the first batch."""
        (first, _), (newest, _) = self._taken[0], self._taken[-1]
        if self._waiting is None or newest == first:
            return None
        mean = sum(stored for _, stored in list(self._taken)[1:]) / (newest - first)
        return self._waiting + mean * max(0, last - newest)
