"""Totals that grow, and how fast. No clock of their own."""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections import Counter, deque
from collections.abc import Mapping, Sequence

import msgspec

RATE_WINDOW_S = 10.0
_LEFT_BATCHES = 20
"""So many of the newest batches say how fast a run is."""
_FEWEST = 3
_PAUSE = 10.0
"""So many times the median between two batches is a pause, as of a run that was down, which will not come again."""
_MOST_SEEN = 4096
"""Processes whose counts are remembered; of those that have not reported for longest, none."""
_MOST_CARRIED = 1024
"""Of them, those that the next session is told."""


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Counts that the streams do not hold, carried from one session of a run to the next under the key `totals`."""

    tokens_made: int = 0
    swaps: int = 0
    wall_s: float = 0.0
    tokens_by_engine: dict[str, int] = {}
    """What of `tokens_made` engines have counted that may still report: they outlive the supervisor, and their presence outlives them."""
    swaps_by_engine: dict[str, int] = {}
    seconds: dict[str, float] = {}
    """The sums of `streamrl.monitor.accounting.Spent`."""
    untimed: bool = False
    """There was a session whose seconds nobody has counted, of a build before there were such."""


class Growing:
    """A total reported by processes that start again from 0 when they are restarted.

    Args:
        late: what a process has counted before its first report is left out.
        seen: counts of processes that an earlier session has in its total; those may report again.
    """

    def __init__(self, *, late: bool, seen: Mapping[str, int] | None = None) -> None:
        self.total = 0
        self._late = late
        self._seen = dict(seen or {})

    def report(self, who: str, count: int) -> int:
        """`who` has counted to `count` since it started; returns by how much the total has grown."""
        before = self._seen.pop(who, count if self._late else 0)
        growth = count - before if count >= before else count
        self.total += growth
        self._seen[who] = count
        if len(self._seen) > _MOST_SEEN:
            del self._seen[next(iter(self._seen))]
        return growth

    @property
    def seen(self) -> dict[str, int]:
        """The last counts by process, of those that have reported last."""
        return dict(list(self._seen.items())[-_MOST_CARRIED:])


class Rate:
    """Growth per second of a total over the last `RATE_WINDOW_S`."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque()

    def mark(self, now_s: float, total: int) -> None:
        """The total is `total` at `now_s`; times must not fall. One that falls, as where versions are trained again, begins anew."""
        if self._marks and total < self._marks[-1][1]:
            self._marks.clear()
        self._marks.append((now_s, total))
        while len(self._marks) > 2 and self._marks[1][0] <= now_s - RATE_WINDOW_S:
            self._marks.popleft()

    @property
    def per_s(self) -> float:
        """0.0 until there are two marks."""
        if len(self._marks) < 2:
            return 0.0
        (start, low), (end, high) = self._marks[0], self._marks[-1]
        return (high - low) / (end - start) if end > start else 0.0


def batch_s(times_s: Sequence[float]) -> float | None:
    """Mean seconds from one batch to the next, by the newest of those that ended at `times_s`, pauses left out; None: too few to say."""
    newest = times_s[-_LEFT_BATCHES - 1 :]
    steps = [later - earlier for earlier, later in itertools.pairwise(newest) if later > earlier > 0]
    if len(steps) < _FEWEST:
        return None
    longest = _PAUSE * statistics.median(steps)
    return statistics.fmean(step for step in steps if step <= longest)


def counted_quantile(counts: Counter[int], part: float) -> float:
    """The value below which `part` of those lie that `counts` counts, the mean of two where it is between them; 0.0 if there are none."""
    if not counts:
        return 0.0
    values = sorted(counts)
    last_ranks = list(itertools.accumulate(counts[value] for value in values))
    place = part * (last_ranks[-1] - 1)
    low, high = (values[bisect.bisect_right(last_ranks, rank)] for rank in (math.floor(place), math.ceil(place)))
    return (low + high) / 2
