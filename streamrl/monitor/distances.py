"""The distance of each engine's log-probs from the trainer's under the same weights, over a run: in its first batches, and the newest."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

import msgspec

from streamrl.telemetry.names import BY_ENGINE, MOST_ENGINES

FIRST = 5
"""Batches of an engine that are what is usual for it."""
NEWEST = 3
"""Batches whose median is what holds now: of one batch few tokens may be measured."""


class Distance(msgspec.Struct, frozen=True):
    """The distance of one engine, in nats."""

    now: float
    usual: float | None
    """None: too few batches are known."""

    @property
    def growth(self) -> float | None:
        """Now, over what is usual; None: not known."""
        return self.now / self.usual if self.usual else None


class Distances:
    """Takes what a run's batches say, in order. Metrics of a batch may name more workers than there are engines now."""

    def __init__(self) -> None:
        self._first: dict[str, list[float]] = {}
        self._newest: dict[str, deque[float]] = {}

    def take(self, metrics: Mapping[str, float]) -> None:
        """The metrics of the next batch."""
        for name, value in metrics.items():
            stem, _, worker = name.rpartition("/")
            if stem not in BY_ENGINE:
                continue
            if worker not in self._first and len(self._first) >= MOST_ENGINES:  # the one that is known for longest
                self._newest.pop(oldest := next(iter(self._first)))
                del self._first[oldest]
            first = self._first.setdefault(worker, [])
            if len(first) < FIRST:
                first.append(value)
            self._newest.setdefault(worker, deque(maxlen=NEWEST)).append(value)

    def of_engines(self) -> dict[str, Distance]:
        """The distance of each, by worker."""
        return {worker: Distance(statistics.median(newest), self._usual(worker)) for worker, newest in self._newest.items()}

    def _usual(self, worker: str) -> float | None:
        first = self._first[worker]
        return statistics.median(first) if len(first) == FIRST else None
