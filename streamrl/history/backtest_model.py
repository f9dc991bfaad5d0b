"""What a back-test knows of a run: when records arrived, how long steps took, when versions were served. Read from the log alone."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np
from msgspec.structs import replace

from streamrl.bus.protocol import Log
from streamrl.bus.reading import stretch
from streamrl.consumers.training.reader import Incoming, open_message
from streamrl.core.fold import close, fold, trained
from streamrl.core.fold_config import NEVER
from streamrl.core.records import Poison, Record, Rollouts
from streamrl.core.state import FoldConfig, initial_state
from streamrl.errors import TrainingError
from streamrl.history.replay_log import PastLedger
from streamrl.schemas.ledger import LedgerEntry, decided_by
from streamrl.schemas.sample_batch import SampleBatch
from streamrl.schemas.subjects import SAMPLES

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
