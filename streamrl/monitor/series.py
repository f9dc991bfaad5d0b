"""Rows: the declared metrics of a run over time, one row a trained batch and some every few seconds. What files and sinks are made of."""

from __future__ import annotations

import math
import re
from collections import Counter, deque
from collections.abc import Callable, Mapping

import msgspec

from streamrl.monitor.decoded import LedgerLine
from streamrl.monitor.lengths import known as known_lengths
from streamrl.monitor.lengths import quantiles
from streamrl.monitor.numbers import Evaluation
from streamrl.monitor.shares import Attendance, shares
from streamrl.monitor.trained import drops_of
from streamrl.schemas.events import MetricReport
from streamrl.schemas.ledger import FORMER_METRICS
from streamrl.schemas.versions import Version
from streamrl.telemetry.metrics import Fold
from streamrl.telemetry.names import DROPPED_SO_FAR, declared
from streamrl.telemetry.names import dropped as dropped_for

WINDOW_S = 10.0
MOST_ROWS = 2048
"""Rows that wait to be taken; beyond, the oldest are lost and counted."""
MOST_WORKERS = 1024
"""Workers that have rows of their own in a window; reports of others count for the run as a whole."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Of a worker that may have rows; a report is told its worker's name by whoever made it."""

BATCH = "batch"
WINDOW = "window"
EVALUATION = "evaluation"
TRAINED = "trained"
RUN = ""
"""Whose values are those of the run as a whole."""
Evaluated = Callable[[int, float], bool]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Values of one batch or window."""

    time_s: float
    """Unix seconds: when the batch was trained, the window ended, the evaluation was done; 0.0 where whoever did it gave no finite time."""
    kind: str
    """`batch`, `window` or `evaluation`."""
    of: str = RUN
    """The worker whose values these are."""
    version: str = ""
    """Made by the batch, or evaluated; of a window the newest of which there is a row."""
    step: int = 0
    """Batches of reinforcement learning up to then."""
    values: dict[str, float] = {}
    """By metric: declared names only, finite numbers only. Of metrics whose reduction is `sum`, the amount of this batch or window."""
    sequence: int = 0
    """An evaluation has that of its event; no file has it."""


class Series:
    """Folds ledger entries and reports into rows. No clock: `due` and `close` are told the time.

    Args:
        window_s: length of a window.
        after: newest version that has its row already, written by an earlier session; its row and those before are not made again.
        evaluated: whether an evaluation of history has its row already, by sequence and time (Unix seconds) of its event; None: all.
    """

    def __init__(self, *, window_s: float = WINDOW_S, after: Version | None = None, evaluated: Evaluated | None = None) -> None:
        self.num_lost = 0
        """Rows that nobody took in time."""
        self.window: dict[str, dict[str, float]] = {}
        """Values of the newest window that is over, by whose they are."""
        self.decided: Counter[str] = Counter()
        """Of that window: groups trained, under `TRAINED`, and rollouts dropped, by metric."""
        self._deciding: Counter[str] = Counter()
        self._window_s = window_s
        self._after = after
        self._evaluated: Evaluated = evaluated or (lambda sequence, time_s: True)
        self._rows: deque[Row] = deque(maxlen=MOST_ROWS)
        self._folds: dict[str, Fold] = {RUN: Fold()}
        self._attendance = Attendance()
        self._began_s: float | None = None
        self._now_s = 0.0

    def batch(self, entry: LedgerLine, *, step: int, dropped: int, live: bool) -> None:
        """A trained batch; one that is not `live` is read from history, and no window is judged by it.

        `dropped` counts the rollouts decided against up to it.
        """
        # Versions rise along the ledger, with forks too: what is no newer was read before.
        if self._after is not None and entry.version <= self._after:
            return
        self._after = entry.version
        values = {FORMER_METRICS.get(name, name): value for name, value in entry.metrics.items()}
        values |= drops_by_reason(entry) | {DROPPED_SO_FAR: float(dropped)} | slime_names(values)
        if not isinstance(entry.histograms, msgspec.UnsetType):
            values |= quantiles(known_lengths(entry.histograms))
        if entry.source != "warmup":
            values["tokens/trained_total"] = values.get("rollout/tokens_trained", 0.0)
        self._append(Row(time_s=entry.time_s, kind=BATCH, version=str(entry.version), step=step, values=known(values)))
        if live:
            self._deciding.update({name: int(count) for name, count in drops_by_reason(entry).items()})
            if entry.source != "warmup":
                self._deciding[TRAINED] += len(entry.staleness)

    def evaluation(self, one: Evaluation, *, step: int, live: bool = True, sequence: int = 0) -> None:
        """Held-out problems were asked; not `live`: before this session. `sequence` is that of the event."""
        if not live and self._evaluated(sequence, _finite(one.time_s)):
            return
        if values := known(values_of(one)):
            row = Row(time_s=one.time_s, kind=EVALUATION, version=str(one.version), step=step, values=values, sequence=sequence)
            self._append(row)

    def report(self, one: MetricReport) -> None:
        """A worker's report."""
        for part in self._attendance.taken(one, self._now_s):
            self._add(part)

    def _add(self, one: MetricReport) -> None:
        self._folds[RUN].add(one)
        if _NAME.fullmatch(one.worker) and (one.worker in self._folds or len(self._folds) <= MOST_WORKERS):
            self._folds.setdefault(one.worker, Fold()).add(one)

    def due(self, now_s: float) -> bool:
        """Whether the window is over at `now_s` (Unix seconds); one during which the clock went back begins anew."""
        self._now_s = now_s
        if self._began_s is None or now_s < self._began_s:
            self._began_s = now_s
        return now_s - self._began_s >= self._window_s

    def close(self, now_s: float, now: Mapping[str, Mapping[str, float]], *, step: int) -> None:
        """End the window; `now` has what is known at its end beside the reports, by whose it is."""
        self.window, self.decided, self._deciding = {}, self._deciding, Counter()
        for part in self._attendance.silent(now_s):
            self._add(part)
        for of in dict.fromkeys([*self._folds, *now]):
            fold = self._folds.get(of)
            values = fold.values if fold else {}
            if values := known({**values, **ratios(values), **shares(values), **now.get(of, {})}):
                self.window[of] = values
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
        self._rows.append(msgspec.structs.replace(row, time_s=_finite(row.time_s)))


def _finite(time_s: float) -> float:
    return time_s if math.isfinite(time_s) else 0.0


def values_of(one: Evaluation) -> dict[str, float]:
    """An evaluation by metric; what it has no value of is left out."""
    name = f"eval/{one.set}"
    values = {name: one.accuracy, f"{name}-truncated_ratio": one.truncated_ratio, f"{name}-failed_ratio": one.failed_ratio}
    values |= {f"{name}-response_len": one.response_len, f"{name}-took_s": one.took_s}
    if one.interval is not None:
        values |= {f"{name}-ci_low": one.interval[0], f"{name}-ci_high": one.interval[1]}
    values |= {f"{name}-pass@{k}": value for k, value in one.passes.items()}
    values |= {f"{name}-maj@{k}": value for k, value in one.majorities.items()}
    return {name: value for name, value in values.items() if value is not None}


def drops_by_reason(entry: LedgerLine) -> dict[str, float]:
    """Rollouts that were decided against with a batch, by metric."""
    amounts = Counter[str]()
    for reason, count in drops_of(entry).items():
        amounts[dropped_for(reason)] += count
    return {name: float(count) for name, count in amounts.items()}


def slime_names(values: Mapping[str, float]) -> dict[str, float]:
    """What a batch's entry has under another name than slime's, and what part of its time was waiting."""
    named = {"rollout/truncated": values["rollout/truncated_ratio"]} if "rollout/truncated_ratio" in values else {}
    wait_s, step_s = values.get("perf/wait_s"), values.get("perf/step_s")
    if wait_s is None or step_s is None:
        return named
    both_s = wait_s + step_s
    named |= {"perf/train_wait_time": wait_s, "perf/train_time": step_s, "perf/step_time": both_s}
    return named | ({"perf/wait_time_ratio": wait_s / both_s} if both_s > 0 else {})


_RATIOS = (
    ("rollout/spec_accept_rate", "engine/accepted_drafts_total", "engine/drafted_tokens_total", 0.0),
    ("rollout/spec_accept_length", "engine/accepted_drafts_total", "engine/verify_passes_total", 1.0),
    ("rollout/prefix_cache_hit_rate", "engine/cached_tokens_total", "engine/prompt_tokens_total", 0.0),
)
"""Name, amount above, amount below, and what is added to their quotient: a pass that verifies drafts samples a token itself."""


def ratios(values: Mapping[str, float]) -> dict[str, float]:
    """Quotients of a window's amounts, where there is something below."""
    return {name: values.get(above, 0.0) / values[below] + plus for name, above, below, plus in _RATIOS if values.get(below, 0.0) > 0}


def known(values: Mapping[str, float]) -> dict[str, float]:
    """Those that a row may have: under declared names, and finite."""
    return {name: value for name, value in values.items() if declared(name) is not None and math.isfinite(value)}
