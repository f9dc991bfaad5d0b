"""Metric reports: made in a worker, folded wherever somebody looks."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

from msgspec import UNSET

from streamrl.errors import BusError
from streamrl.schemas.codec import encode
from streamrl.schemas.events import MetricReport
from streamrl.telemetry.names import METRICS, Reduction, metric

logger = logging.getLogger(__name__)


Histograms = Mapping[str, tuple[int, ...]]
"""Counts of lengths by name (`streamrl.telemetry.names.LENGTHS`)."""


def report(
    worker: str,
    values: Mapping[str, float],
    *,
    time_s: float,
    histograms: Histograms | None = None,
    tasks: Sequence[int] = (),
    left: bool = False,
) -> MetricReport:
    """Group `values` by the reductions their names are declared with; raises SchemaError for an undeclared name. `left`: it is the last.

    Values that are not finite are left out: they would spoil every mean they enter. `tasks`: see `MetricReport`.
    """
    groups: dict[Reduction, dict[str, float]] = {reduction: {} for reduction in Reduction}
    for name, value in values.items():
        reduction = metric(name).reduction
        if math.isfinite(value):
            groups[reduction][name] = float(value)
    return MetricReport(
        worker=worker,
        mean=groups[Reduction.MEAN],
        sum=groups[Reduction.SUM],
        max=groups[Reduction.MAX],
        last=groups[Reduction.LAST],
        histograms=dict(histograms) if histograms else UNSET,
        time_s=time_s,
        tasks=tuple(tasks) or UNSET,
        left=left or UNSET,
    )


class MetricsSink:
    """Publishes one worker's reports. The bus being away or full costs the report, never the worker."""

    def __init__(self, worker: str, publish: Callable[[bytes], Awaitable[object]]) -> None:
        self._worker = worker
        self._publish = publish
        self.num_lost = 0
        """Reports that the bus did not take."""
        self.left = False
        """Whether a report from now on is the worker's last."""

    async def put(self, values: Mapping[str, float], histograms: Histograms | None = None, tasks: Sequence[int] = ()) -> bool:
        """Publish one report and say whether the bus took it; raises SchemaError for an undeclared name."""
        body = encode(report(self._worker, values, time_s=time.time(), histograms=histograms, tasks=tasks, left=self.left))
        try:
            await self._publish(body)
        except BusError as error:
            self.num_lost += 1
            logger.warning("event=metrics_lost worker=%s lost=%d error=%s", self._worker, self.num_lost, error.message)
            return False
        return True


class Fold:
    """Folds the reports of any number of workers into one number a metric, by the metric's reduction.

    Takes declared names only, so that what it keeps is bounded whatever is reported, and finite numbers only.
    """

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def add(self, one: MetricReport) -> None:
        """Take one report in."""
        for name, value in _taken(one.mean, Reduction.MEAN):
            count = self._counts[name] = self._counts.get(name, 0) + 1
            mean = self._values.get(name, 0.0)
            self._values[name] = mean + (value - mean) / count
        for name, value in _taken(one.sum, Reduction.SUM):
            self._values[name] = self._values.get(name, 0.0) + value
        for name, value in _taken(one.max, Reduction.MAX):
            self._values[name] = max(self._values.get(name, value), value)
        self._values.update(_taken(one.last, Reduction.LAST))

    @property
    def values(self) -> dict[str, float]:
        """The folded numbers by metric name."""
        return dict(self._values)


def _taken(values: Mapping[str, float], reduction: Reduction) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        declared = METRICS.get(name)
        if declared is not None and declared.reduction is reduction and math.isfinite(value):
            yield name, value
