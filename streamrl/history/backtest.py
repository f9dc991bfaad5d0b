"""Back-test: what other bounds and policies would have done with the records of a run, in seconds and without a trainer.

The recorded run gives when records came, how long steps took and how long new weights took to be served; all of it is read from the log. A
simulated trainer folds the records at their times and closes batches by its own rules (the fold's own functions). A task cannot begin
before the simulation has granted it and made the version that it needs: else its records come that much later. They never come earlier,
since nobody knows what engines with more credits would have made. A token's version becomes the one that is served in the simulation when
it was sampled.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from streamrl.bus.protocol import Log
from streamrl.bus.reading import stretch
from streamrl.config.load import override, override_keys
from streamrl.consumers.training.reader import Incoming, open_message
from streamrl.core.assembly import ages
from streamrl.core.fold import Batch, close, fold, trained
from streamrl.core.fold_config import NEVER, fold_config
from streamrl.core.records import Poison, Record, Rollouts, RolloutView
from streamrl.core.state import FoldConfig, initial_state
from streamrl.data.vocabulary import vocab_size
from streamrl.errors import ConfigError, TrainingError
from streamrl.history.replay_log import PastLedger, read_past
from streamrl.history.source import Source
from streamrl.schemas.ledger import Drop, LedgerEntry, decided_by
from streamrl.schemas.sample_batch import SampleBatch
from streamrl.schemas.subjects import SAMPLES, Subjects

OUTLIER = 10.0
"""A step that kept the trainer busy for more than this many medians (a restart, a checkpoint on a slow disk) counts as the median."""


class Arrival(msgspec.Struct, frozen=True):
    """One record of the stream. Times are Unix seconds, of the bus's server and of the producer."""

    record: Record
    time_s: float
    task: int | None
    """None when it belongs to no task that the run had granted."""
    first_s: float
    """When its first token was sampled; 0 when no model sampled any."""
    last_s: float
    """When its last token was sampled."""


class History(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded stretch of a run."""

    arrivals: tuple[Arrival, ...]
    """In stream order."""
    began_s: float
    granted_s: tuple[tuple[int, float], ...]
    """(granted, when) in rising order: a task below `granted` could be issued from then on."""
    busy_s: tuple[float, ...]
    """Time that each step kept the trainer from taking the next batch, by version."""
    batch_tasks: int
    lag_s: float
    """From a version's ledger entry to the first token that it samples."""
    warmup_batches: int
    warmup_end: int | None

    def issued_s(self, task: int) -> float:
        """When the recorded run could issue a task; its beginning for one that it never granted."""
        place = bisect_right(self.granted_s, task, key=lambda grant: grant[0])
        return self.granted_s[place][1] if place < len(self.granted_s) else self.began_s

    def step_s(self, index: int, groups: int) -> float:
        """Time of the step number `index` (from 0) over `groups` groups: the recorded one of that number, else the median."""
        one = self.busy_s[index] if index < len(self.busy_s) else statistics.median(self.busy_s)
        return one * groups / self.batch_tasks


async def read_history(log: Log, past: PastLedger, config: FoldConfig) -> History:
    """Read a run's stream once, folding it by the run's ledger to learn when tasks were granted.

    Raises:
        TrainingError: nothing was trained.
        LogTruncated: the stream does not go back to its beginning.
    """
    entries = past.between(0, None)
    if not entries:
        raise TrainingError("expected a run that has trained at least one batch, its ledger is empty", hint="let the run train first")
    made_s = [entry.time_s for entry in entries]
    state, grants = initial_state(config), list[tuple[int, float]]()
    arrivals: list[Arrival] = []
    async for message in stretch(log, SAMPLES, first=1, last=(await log.state(SAMPLES)).last):
        # What came after the run's last batch, such as a reward hours later, is no part of what its trainer had to choose from.
        if message.sequence > entries[-1].cursor and message.time_s > made_s[-1]:
            break
        incoming = open_message(message)
        if not arrivals:
            grants.append((state.granted, message.time_s))
        before = state.granted
        state, effects = fold(state, incoming.record, config)
        if state.granted > before:
            grants.append((state.granted, message.time_s))
        dead = next((letter for letter in effects.dead if letter.sequence == message.sequence), None)
        record = incoming.record if dead is None else Poison(message.sequence, getattr(incoming.record, "task", None), dead.reason)
        arrivals.append(_arrival(record, incoming, message.time_s, made_s, state.granted))
        while (entry := past.at(state.version.number + 1)) is not None and state.cursor >= entry.cursor:
            batch = close(state, config)
            if batch is None:
                raise TrainingError(f"the stream does not give the batch of version {entry.version}", hint="see `replay --verify`")
            after = trained(state, batch, config, warm=entry.warm, score=decided_by(entry).score)
            state = replace(after, version=entry.version)
            if state.granted > grants[-1][0]:
                grants.append((state.granted, entry.time_s))
    # One that had not ended by the last entry does not end: that of a run of kind `sft` never does, however its batches are cut.
    warmup = next((n for n, entry in enumerate(entries, start=1) if entry.warm), NEVER) if config.warmup_steps else 0
    return History(
        arrivals=tuple(arrivals),
        began_s=arrivals[0].time_s if arrivals else 0.0,
        granted_s=tuple(grants),
        busy_s=_busy(entries),
        batch_tasks=config.batch_tasks,
        lag_s=_lag(arrivals, made_s),
        warmup_batches=warmup,
        warmup_end=state.warmup_end,
    )


def _arrival(record: Record, incoming: Incoming, time_s: float, made_s: Sequence[float], granted: int) -> Arrival:
    first, last = 0.0, time_s
    if isinstance(record, Rollouts) and incoming.samples is not None:
        first, last = _sampled(record, incoming.samples, time_s, made_s)
    task: int | None = getattr(record, "task", None)
    if isinstance(record, Rollouts) and record.tails is not None:
        record = replace(record, tails=record.tails.settled())  # else the whole stream would stay in memory
    return Arrival(record, time_s, task if task is not None and task < granted else None, first, last)


def _sampled(record: Rollouts, samples: SampleBatch, time_s: float, made_s: Sequence[float]) -> tuple[float, float]:
    """When the first and the last token were sampled: within the life of their versions, and near what the producer noted."""
    oldest = min((r.oldest for r in record.rollouts if r.oldest >= 0), default=-1)
    newest = max((r.newest for r in record.rollouts), default=-1)
    if oldest < 0:
        return 0.0, time_s
    started = _times(samples, "started_s")
    finished = _times(samples, "finished_s")
    begin = max(_made(oldest, made_s), float(started.min()) if len(started) else 0.0)
    end = min(_made(newest + 1, made_s) if newest < len(made_s) else time_s, float(finished.max()) if len(finished) else time_s, time_s)
    return min(begin, time_s), max(min(begin, time_s), end)


def _times(samples: SampleBatch, name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    values = samples.batch.column(name).drop_null().to_numpy(zero_copy_only=False)
    return values[values > 0]


def _made(number: int, made_s: Sequence[float]) -> float:
    """When a version was made; version 0 was there from the start."""
    return made_s[number - 1] if number > 0 else 0.0


def _busy(entries: Sequence[LedgerEntry]) -> tuple[float, ...]:
    """From the ledger's times, less the waits in between: publishing and checkpoints are in, which `perf/step_s` leaves out."""
    steps = [entry.metrics.get("perf/step_s", 0.0) for entry in entries]
    between = [steps[0]] + [b.time_s - a.time_s - b.metrics.get("perf/wait_s", 0.0) for a, b in pairwise(entries)]
    busy = [max(step, gap) for step, gap in zip(steps, between, strict=True)]
    usual = statistics.median(busy)
    return tuple(usual if value > OUTLIER * usual else value for value in busy)


def _lag(arrivals: Sequence[Arrival], made_s: Sequence[float]) -> float:
    """Median over versions of the time until one of them sampled a first token."""
    soonest: dict[int, float] = {}
    for arrival in arrivals:
        if isinstance(arrival.record, Rollouts) and arrival.first_s > 0:
            oldest = min(r.oldest for r in arrival.record.rollouts if r.oldest >= 0)
            if 0 < oldest <= len(made_s):
                soonest[oldest] = min(soonest.get(oldest, float("inf")), arrival.first_s - made_s[oldest - 1])
    return statistics.median(soonest.values()) if soonest else 0.0


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one bound and policy came to. Ages are of a group's oldest token, in versions; the warm-up is left out."""

    max_staleness: int
    stale: str
    batches: int
    staleness_mean: float
    staleness_p50: float
    staleness_max: int
    stale_rollouts: int
    """Rollouts dropped for their age; with `mask`, those all of whose tokens were too old."""
    masked_tokens: float
    """With `mask`: share of the trained groups' tokens that were masked, if a rollout's versions have equal shares."""
    waste: float
    """Share of the rollouts (and, with `mask`, tokens) that arrived and were not trained because of their age."""
    wait_s: float
    """Time in which the trainer had no batch."""
    wait: float
    """The same as a share of the whole time."""
    total_s: float


def check_supported(config: FoldConfig) -> None:
    """Raise ConfigError for rules that a back-test does not model."""
    if config.delay_versions:
        raise ConfigError(
            f"a back-test does not model engines that lag on purpose, got debug.delay_versions = {config.delay_versions}",
            hint="back-test a run without it; `replay --set tasks.max_staleness=...` trains this one's samples under another bound",
            key="debug.delay_versions",
        )


def backtest(history: History, config: FoldConfig) -> Outcome:
    """One bound and policy over a recorded history; raises ConfigError for rules that it does not model."""
    check_supported(config)
    return Simulation(history, config).run()


class Simulation:
    """One simulated trainer over a history. `run` is called once."""

    def __init__(self, history: History, config: FoldConfig) -> None:
        self._history = history
        self._config = config
        self._state = initial_state(config)
        self._grants = [(self._state.grant, history.began_s)]
        self._served = [0.0]
        """When each version is first served, by number."""
        self._coming: list[tuple[float, int, Arrival, float]] = []
        """Heap of (time, place in the stream, arrival, by how much it is late)."""
        self._held: list[tuple[int, int, Arrival]] = []
        """Heap of (task, place, arrival) for tasks that have not been granted yet."""
        self._unserved: list[tuple[int, int, Arrival]] = []
        """Heap of (version needed, place, arrival) for tasks whose version has not been made yet."""
        self._folded = 0
        self._ages: list[int] = []
        self._rollouts = 0
        self._stale = 0
        self._expired: set[int] = set()
        """Tasks whose rollouts came too late because they had expired."""
        self._masked = 0.0
        self._tokens = 0.0
        self._wait_s = 0.0

    def run(self) -> Outcome:
        """Simulate to the last record."""
        now = self._history.began_s
        for place, arrival in enumerate(self._history.arrivals):
            self._admit(place, arrival, now)
        batches = 0
        while True:
            while self._coming and self._coming[0][0] <= now:
                self._fold(now)
            batch = close(self._state, self._config)
            if batch is None:
                if not self._coming:
                    break
                self._wait_s += self._coming[0][0] - now
                now = self._coming[0][0]
                continue
            now += self._history.step_s(batches, len(batch.groups))
            self._train(batch, now)
            batches += 1
        return self._outcome(batches, now - self._history.began_s)

    def _admit(self, place: int, arrival: Arrival, now: float) -> None:
        """Put an arrival where it belongs: it comes at its time, or it waits for a grant or for a version."""
        task = arrival.task
        if task is None:
            heapq.heappush(self._coming, (max(arrival.time_s, now), place, arrival, 0.0))
            return
        issue = bisect_right(self._grants, task, key=lambda known: known[0].granted)
        if issue == len(self._grants):
            heapq.heappush(self._held, (task, place, arrival))
            return
        grant, when = self._grants[issue]
        late = max(0.0, when - (arrival.first_s or self._history.issued_s(task)))
        if arrival.first_s > 0:
            needed = grant.min_version(task, batch_tasks=self._config.batch_tasks, max_staleness=self._config.max_staleness)
            if needed >= len(self._served):
                heapq.heappush(self._unserved, (needed, place, arrival))
                return
            late = max(late, self._served[needed] - arrival.first_s)
        heapq.heappush(self._coming, (max(arrival.time_s + late, now), place, arrival, late))

    def _fold(self, now: float) -> None:
        _, _, arrival, late = heapq.heappop(self._coming)
        self._folded += 1
        record: Record = replace(arrival.record, sequence=self._folded)
        if isinstance(record, Rollouts):
            record = replace(record, rollouts=tuple(self._translated(view, arrival, late) for view in record.rollouts))
            self._rollouts += len(record.rollouts)
        before = self._state.num_drops
        self._state, effects = fold(self._state, record, self._config)
        self._count(self._state.drops_after(before))
        if effects.grant is not None:
            self._granted(now)

    def _train(self, batch: Batch, now: float) -> None:
        before = self._state
        in_warmup = before.in_warmup(batch.groups[0].task)
        if not in_warmup:
            self._ages += ages(batch, before)["total"]
            self._mask(batch)
        warm = before.warmup_steps + 1 >= self._history.warmup_batches
        self._state = trained(before, batch, self._config, warm=warm)
        if before.warmup_end is None and self._state.warmup_end is not None and self._history.warmup_end is not None:
            self._state = replace(self._state, warmup_end=self._history.warmup_end)
        self._count(self._state.drops)
        self._served.append(now + self._history.lag_s)
        if self._state.granted > self._grants[-1][0].granted:
            self._granted(now)
        while self._unserved and self._unserved[0][0] < len(self._served):
            _, place, arrival = heapq.heappop(self._unserved)
            self._admit(place, arrival, now)

    def _granted(self, now: float) -> None:
        self._grants.append((self._state.grant, now))
        while self._held and self._held[0][0] < self._state.granted:
            _, place, arrival = heapq.heappop(self._held)
            self._admit(place, arrival, now)

    def _translated(self, view: RolloutView, arrival: Arrival, late: float) -> RolloutView:
        if view.highest < 0 and view.oldest < 0:
            return view
        oldest, newest = self._serving(arrival.first_s + late), self._serving(arrival.last_s + late)
        if view.oldest < 0:
            oldest, newest = -1, -1
        elif view.oldest == view.newest:
            newest = oldest
        newest = max(oldest, newest)
        shares = tuple(replace(share, oldest=oldest, newest=newest) for share in view.shares)
        return replace(view, oldest=oldest, newest=newest, highest=newest, epochs=(), shares=shares)

    def _serving(self, time_s: float) -> int:
        return max(0, bisect_right(self._served, time_s) - 1)

    def _count(self, drops: Sequence[Drop]) -> None:
        for drop in drops:
            if drop.reason == "expired":
                self._expired.add(drop.task)
            if drop.reason in ("stale", "expired") or (drop.reason == "late" and drop.task in self._expired):
                self._stale += len(drop.rollouts)

    def _mask(self, batch: Batch) -> None:
        if self._config.stale != "mask":
            return
        limit = self._state.version.number - self._config.max_staleness
        for group in batch.groups:
            for rollout in group.rollouts.values():
                versions = rollout.newest - rollout.oldest + 1
                too_old = min(versions, max(0, limit - rollout.oldest))
                self._tokens += rollout.num_tokens
                self._masked += rollout.num_tokens * too_old / versions

    def _outcome(self, batches: int, total_s: float) -> Outcome:
        masked = self._masked / self._tokens if self._tokens else 0.0
        dropped = self._stale / self._rollouts if self._rollouts else 0.0
        return Outcome(
            max_staleness=self._config.max_staleness,
            stale=self._config.stale,
            batches=batches,
            staleness_mean=statistics.fmean(self._ages) if self._ages else 0.0,
            staleness_p50=float(statistics.median(self._ages)) if self._ages else 0.0,
            staleness_max=max(self._ages, default=0),
            stale_rollouts=self._stale,
            masked_tokens=masked,
            waste=dropped + (1 - dropped) * masked,
            wait_s=self._wait_s,
            wait=self._wait_s / total_s if total_s > 0 else 0.0,
            total_s=total_s,
        )


KEYS = ("tasks.max_staleness", "tasks.stale", "tasks.batch_tasks", "tasks.expire_versions", "tasks.drop_zero_variance")
BOUNDS = (1, 2, 4, 8)
POLICIES = ("drop", "mask", "wait")


class BacktestReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was recorded, and what each bound and policy would have come to."""

    run: str
    recorded: Outcome
    """The run's own bound and policy, simulated; compare it with `recorded_staleness_mean` to see how good the model is."""
    recorded_staleness_mean: float
    """Mean age of the trained groups by the run's ledger."""
    recorded_wait_s: float
    """Time in which the run's trainer waited for a batch, by its ledger."""
    outcomes: tuple[Outcome, ...]


async def backtest_grid(source: Source, overrides: Sequence[str]) -> BacktestReport:
    """Simulate every combination of the values given (`tasks.max_staleness=1,2,4`); without any, of the usual bounds and policies.

    Raises:
        ConfigError: another key than those of `KEYS`, or a value that it cannot have; or the run's engines lagged on purpose.
        TrainingError: the run has trained nothing.
    """
    num_tokens = vocab_size(source.model_dir)
    configs = _grid(source, overrides, num_tokens)
    own = fold_config(source.config, num_tokens)
    check_supported(own)
    past = await read_past(source.log, Subjects(source.config.run.name), source.config.trainer.name)
    history = await read_history(source.log, past, own)
    entries = past.between(0, None)
    learned = [age for entry in entries if entry.source != "warmup" for age in entry.staleness]

    def simulate() -> tuple[Outcome, tuple[Outcome, ...]]:
        return backtest(history, own), tuple(backtest(history, config) for config in configs)

    recorded, outcomes = await asyncio.to_thread(simulate)
    return BacktestReport(
        run=source.config.run.name,
        recorded=recorded,
        recorded_staleness_mean=sum(learned) / len(learned) if learned else 0.0,
        recorded_wait_s=sum(entry.metrics.get("perf/wait_s", 0.0) for entry in entries),
        outcomes=outcomes,
    )


def print_backtest(report: BacktestReport) -> None:
    """The table, to stdout."""
    table = Table(box=None, padding=(0, 1))
    titles = ("bound", "policy", "batches", "age", "p50", "max", "stale", "waste", "wait", "time")
    for title in titles:
        table.add_column(title, justify="right")
    recorded = [("the run's", report.recorded)]
    for label, one in [*recorded, *((str(one.max_staleness), one) for one in report.outcomes)]:
        ages = (f"{one.staleness_mean:.2f}", f"{one.staleness_p50:g}", str(one.staleness_max))
        shares = (f"{one.waste:.1%}", f"{one.wait:.1%}", f"{one.total_s:.1f} s")
        table.add_row(label, one.stale, str(one.batches), *ages, str(one.stale_rollouts), *shares)
    Console().print(table)
    waited = f"the trainer waited {report.recorded_wait_s:.1f} s"
    print(f"the ledger of {report.run}: staleness mean {report.recorded_staleness_mean:.2f}, {waited}")


def _grid(source: Source, overrides: Sequence[str], num_tokens: int) -> list[FoldConfig]:
    for key in override_keys(overrides):
        if key not in KEYS:
            raise ConfigError(
                f"{key} has no part in a back-test", hint=f"it takes {', '.join(KEYS)}, each with one or more values", key=key
            )
    values = {key: text.partition("=")[2].split(",") for key, text in zip(override_keys(overrides), overrides, strict=True)}
    if "tasks.max_staleness" not in values:
        values["tasks.max_staleness"] = [str(bound) for bound in sorted({source.config.tasks.max_staleness, *BOUNDS})]
    if "tasks.stale" not in values:
        values["tasks.stale"] = list(POLICIES)
    combinations = itertools.product(*([f"{key}={value.strip()}" for value in many] for key, many in values.items()))
    return [fold_config(override(source.config, chosen), num_tokens) for chosen in combinations]
