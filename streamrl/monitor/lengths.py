"""Whether long answers are trained as often as short ones: lengths of what was finished, cut, trained and dropped, side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from streamrl.core.lengths import added, distance, edge, histogram, quantile
from streamrl.telemetry.names import LENGTHS, length_quantile

MOST_DECIDED = 8192
"""Answers trained, dropped or cut that are looked at: beyond, all counts are halved, so that the newest weigh most."""
FEWEST = 64
"""Trained, and decided, for a distance: of fewer chance makes one."""
_MOST_BUCKETS = len(histogram([1 << 62]))
_TRAINED, _DROPPED, _CUT = "lengths/trained", "lengths/dropped", "lengths/cut"

Histograms = Mapping[str, Sequence[int]]


class Lengths:
    """Adds up the histograms of reports and of ledger entries, in bounded memory."""

    def __init__(self) -> None:
        self.counts: dict[str, tuple[int, ...]] = {}
        """By name (`streamrl.telemetry.names.LENGTHS`)."""

    def add(self, histograms: Histograms | msgspec.UnsetType) -> None:
        """Take what a report or an entry has; what is no histogram of ours is passed over."""
        if isinstance(histograms, msgspec.UnsetType):
            return
        for name, counts in known(histograms).items():
            self.counts[name] = added(self.counts.get(name, ()), counts)
        if sum(map(sum, self._decided)) > MOST_DECIDED:
            self.counts = {name: tuple(count // 2 for count in counts) for name, counts in self.counts.items()}

    def forget_ledger(self) -> None:
        """Before the ledger is read anew."""
        for name in (_TRAINED, _DROPPED):
            self.counts.pop(name, None)

    @property
    def _decided(self) -> list[tuple[int, ...]]:
        return [self.counts.get(name, ()) for name in (_TRAINED, _DROPPED, _CUT)]

    @property
    def distance(self) -> float | None:
        """How far apart the lengths of trained answers are from those of all that were decided on; None: too few to say."""
        trained, dropped, cut = self._decided
        decided = added(added(trained, dropped), cut)
        return distance(trained, decided) if min(sum(trained), sum(decided)) >= FEWEST else None

    @property
    def values(self) -> dict[str, float]:
        """Quantiles and the distance by metric, as far as they are known."""
        found = quantiles(self.counts)
        return found if (apart := self.distance) is None else {**found, "lengths/distance": apart}


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


def side_by_side(histograms: Histograms, most: int) -> tuple[int, int, dict[str, list[int]]]:
    """The shortest and the longest length, and for each name counts of at most `most` stretches of equal ratio between them."""
    places = [place for counts in histograms.values() for place, count in enumerate(counts) if count]
    first, last = min(places, default=0), max(places, default=0)
    width = -(-(last + 1 - first) // most)
    stretches = range(first, last + 1, width)
    found = {name: [sum(counts[start : start + width]) for start in stretches] for name, counts in histograms.items()}
    return math.ceil(edge(first)), math.ceil(edge(last + 1)) - 1, found
