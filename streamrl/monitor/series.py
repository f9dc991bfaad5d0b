"""Rows: the declared metrics of a run over time, one row a trained batch and some every few seconds. What files and sinks are made of."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

import msgspec

from streamrl.monitor.decoded import LedgerLine
from streamrl.schemas.events import MetricReport
from streamrl.schemas.ledger import FORMER_METRICS
from streamrl.schemas.versions import Version
from streamrl.telemetry.metrics import Fold
from streamrl.telemetry.names import METRICS

WINDOW_S = 10.0
MOST_ROWS = 2048
"""Rows that wait to be taken; beyond, the oldest are lost and counted."""
MOST_WORKERS = 1024
"""Workers that have rows of their own in a window; reports of others count for the run as a whole."""

BATCH = "batch"
WINDOW = "window"
RUN = ""
"""Whose values are those of the run as a whole."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Values of one batch or window."""

    time_s: float
    """Unix seconds: when the batch was trained, when the window ended."""
    kind: str
    """`batch` or `window`."""
    of: str = RUN
    """The worker whose values these are."""
    version: str = ""
    """Made by the batch; of a window the newest of which there is a row."""
    step: int = 0
    """Batches of reinforcement learning up to then."""
    values: dict[str, float] = {}
    """By metric: declared names only, finite numbers only. Of metrics whose reduction is `sum`, the amount of this batch or window."""


class Series:
    """Folds ledger entries and reports into rows. No clock: `due` and `close` are told the time.

    Args:
        window_s: length of a window.
        after: newest version that has its row already, written by an earlier session; its row and those before are not made again.
    """

    def __init__(self, *, window_s: float = WINDOW_S, after: Version | None = None) -> None:
        self.num_lost = 0
        """Rows that nobody took in time."""
        self._window_s = window_s
        self._after = after
        self._rows: deque[Row] = deque(maxlen=MOST_ROWS)
        self._folds: dict[str, Fold] = {RUN: Fold()}
        self._began_s: float | None = None

    def batch(self, entry: LedgerLine, *, step: int, also: Mapping[str, float]) -> None:
        """A trained batch; `also` is what is known of it beside its entry's metrics."""
        # Versions rise along the ledger, with forks too: what is no newer was read before.
        if self._after is not None and entry.version <= self._after:
            return
        self._after = entry.version
        named = {FORMER_METRICS.get(name, name): value for name, value in entry.metrics.items()}
        self._append(Row(time_s=entry.time_s, kind=BATCH, version=str(entry.version), step=step, values=known(named | dict(also))))

    def report(self, one: MetricReport) -> None:
        """A worker's report."""
        self._folds[RUN].add(one)
        if one.worker in self._folds or len(self._folds) <= MOST_WORKERS:
            self._folds.setdefault(one.worker, Fold()).add(one)

    def due(self, now_s: float) -> bool:
        """Whether the window is over at `now_s` (Unix seconds); one during which the clock went back begins anew."""
        if self._began_s is None or now_s < self._began_s:
            self._began_s = now_s
        return now_s - self._began_s >= self._window_s

    def close(self, now_s: float, now: Mapping[str, Mapping[str, float]], *, step: int) -> None:
        """End the window; `now` has what is known at its end beside the reports, by whose it is."""
        for of in dict.fromkeys([*self._folds, *now]):
            fold = self._folds.get(of)
            if values := known({**(fold.values if fold else {}), **now.get(of, {})}):
                self._append(Row(time_s=now_s, kind=WINDOW, of=of, version=self.newest, step=step, values=values))
        self._folds = {RUN: Fold()}
        self._began_s = now_s

    @property
    def newest(self) -> str:
        """Up to which version the batches have their rows; empty: none has."""
        return "" if self._after is None else str(self._after)

    @property
    def num_waiting(self) -> int:
        """Rows to be taken."""
        return len(self._rows)

    def take(self) -> list[Row]:
        """The rows since the last call."""
        rows = list(self._rows)
        self._rows.clear()
        return rows

    def _append(self, row: Row) -> None:
        self.num_lost += len(self._rows) == MOST_ROWS
        self._rows.append(row)


def known(values: Mapping[str, float]) -> dict[str, float]:
    """Those that a row may have: under declared names, and finite."""
    return {name: value for name, value in values.items() if name in METRICS and math.isfinite(value)}
