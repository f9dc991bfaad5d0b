"""Whether long answers are trained as often as short ones: lengths of what was finished, cut, trained and dropped, side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from streamrl.core.lengths import added, distance, histogram, least, quantile
from streamrl.telemetry.names import LENGTHS, length_quantile

MOST_DECIDED = 8192
"""Answers trained, dropped or cut that are looked at: beyond, their counts are halved, so that the newest weigh most."""
FEWEST = 64
"""Trained for a distance: of fewer chance makes one."""
_MOST_BUCKETS = len(histogram([1 << 62]))
_DECIDED = _TRAINED, _DROPPED, _CUT = "lengths/trained", "lengths/dropped", "lengths/cut"

Histograms = Mapping[str, Sequence[int]]
Counts = dict[str, tuple[int, ...]]


class Lengths:
    """Adds up the histograms of reports and of ledger entries, in bounded memory.

    Reports are heard while somebody listens, and entries are read from the beginning: cut ones are compared with those decided meanwhile.
    """

    def __init__(self) -> None:
        self.counts: Counts = {}
        """By name (`streamrl.telemetry.names.LENGTHS`), the newest of each."""
        self._meanwhile: Counts = {}
        """Of those decided since reports are heard."""

    def add(self, histograms: Histograms | msgspec.UnsetType, *, live: bool = True) -> None:
        """Take what a report, or an entry that is `live` or read from history, has; what is no histogram of ours is passed over."""
        if isinstance(histograms, msgspec.UnsetType):
            return
        for name, counts in known(histograms).items():
            self.counts[name] = added(self.counts.get(name, ()), counts)
            if sum(self.counts[name]) > MOST_DECIDED:
                self.counts[name] = _halved(self.counts[name])
            if live and name in _DECIDED:
                self._meanwhile[name] = added(self._meanwhile.get(name, ()), counts)
        if sum(map(sum, self._meanwhile.values())) > MOST_DECIDED:
            self._meanwhile = {name: _halved(counts) for name, counts in self._meanwhile.items()}

    def forget_ledger(self) -> None:
        """Before the ledger is read anew."""
        self._meanwhile = {}
        for name in (_TRAINED, _DROPPED):
            self.counts.pop(name, None)

    @property
    def knows_cut(self) -> bool:
        """Whether `distance` is that of answers of a time of which cut ones are known."""
        return sum(self._meanwhile.get(_TRAINED, ())) >= FEWEST

    @property
    def distance(self) -> float | None:
        """How far apart the lengths of trained answers are from those of all that were decided on; None: too few to say.

        Unless it `knows_cut`, cut ones are left out, and it is that of the ledger alone.
        """
        names = _DECIDED if self.knows_cut else (_TRAINED, _DROPPED)
        of = self._meanwhile if self.knows_cut else self.counts
        decided: tuple[int, ...] = ()
        for name in names:
            decided = added(decided, of.get(name, ()))
        trained = of.get(_TRAINED, ())
        return distance(trained, decided) if sum(trained) >= FEWEST else None

    @property
    def values(self) -> dict[str, float]:
        """Quantiles and the distance by metric, as far as they are known; no distance without cut ones."""
        apart = self.distance if self.knows_cut else None
        return quantiles(self.counts) | ({} if apart is None else {"lengths/distance": apart})


def _halved(counts: Sequence[int]) -> tuple[int, ...]:
    return tuple(count // 2 for count in counts)


def known(histograms: Histograms) -> dict[str, tuple[int, ...]]:
    """Those under declared names, without what no count can be."""
    return {
        name: tuple(counts)
        for name, counts in histograms.items()
        if name in LENGTHS and len(counts) <= _MOST_BUCKETS and min(counts, default=0) >= 0
    }


def quantiles(histograms: Histograms) -> dict[str, float]:
    """Of each that has counts, by metric."""
    found = {
        length_quantile(name, word): quantile(counts, part)
        for name, counts in histograms.items()
        for word, part in (("p50", 0.5), ("p95", 0.95))
    }
    return {name: value for name, value in found.items() if not math.isnan(value)}


def distance_text(distance: float | None, *, cut: bool) -> str:
    """How far the lengths of trained answers are from those of all that were decided on; `cut`: cut ones are among these."""
    if distance is None:
        return "too few answers to say whether long ones are trained as often as short ones"
    decided = "trained, dropped or cut" if cut else "trained or dropped"
    return f"distance {distance:.2f} of the lengths trained from those {decided}"


def side_by_side(histograms: Histograms, most: int) -> tuple[list[int], dict[str, list[int]]]:
    """At most `most` stretches of equal ratio: the least length of each, and of what is beyond them all; for each name their counts."""
    places = [place for counts in histograms.values() for place, count in enumerate(counts) if count]
    first, last = min(places, default=0), max(places, default=0)
    width = -(-(last + 1 - first) // most)
    stretches = range(first, last + 1, width)
    found = {name: [sum(counts[start : start + width]) for start in stretches] for name, counts in histograms.items()}
    return [least(place) for place in (*stretches, last + 1)], found
