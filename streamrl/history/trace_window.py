"""A window of a run in Chrome's trace event format (JSON), which Perfetto and chrome://tracing open.

```text
trainer            batches: wait, step; publish
<engine>           versions served; staging
<producer>         a lane for each sample in work: wait, generate (decode within it), tools, reward, store
sample stream      a lane for each message in the queue, until its batch begins
```

`WindowReader` reads what a stretch of versions was made of, and what engines and publisher did meanwhile; `WindowEvents` writes it. An
arrow leads from each sample to the batch that trained it. Slices of a lane lie one behind the other or within one another, as the format
wants; times are whole microseconds since 1970. The format: "Trace Event Format" of the Chromium project.
"""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from streamrl.bus.protocol import Log, Message
from streamrl.bus.reading import stored_between, stretch
from streamrl.consumers.training.carried import fetch_messages
from streamrl.consumers.training.spilled_drops import whole
from streamrl.errors import ConfigError, LogTruncated, NotFound, SchemaError
from streamrl.history.search import epochs, first_entry, read_entry
from streamrl.schemas.codec import decode
from streamrl.schemas.decoding import decode_samples
from streamrl.schemas.events import Event, MetricReport
from streamrl.schemas.ledger import NO_MESSAGE, LedgerEntry, take_entry
from streamrl.schemas.samples import Sample, TurnSpan
from streamrl.schemas.subjects import EVENTS, LEDGER, METRICS, SAMPLES, Subjects, kind_of

MOST_VERSIONS = 10_000
_BEFORE_S = 600.0
"""How far before the window swaps of engines are looked for, to know what they served when it began."""


class Arrival(msgspec.Struct, frozen=True):
    """One message of samples that the ledger names."""

    sequence: int
    stored_s: float
    samples: tuple[Sample, ...]


class Swap(msgspec.Struct, frozen=True):
    """An engine has committed a version."""

    engine: str
    version: str
    time_s: float
    stage_s: float


class WindowReader:
    """Reads a stretch of versions; writes nothing.

    Args:
        log: of a run, or of a recording.
        subjects: of the run.
        trainer: whose ledger counts.
        say: told in words how far a long reading is.
    """

    def __init__(self, log: Log, subjects: Subjects, trainer: str, *, say: Callable[[str], object] = str) -> None:
        self._log = log
        self._subjects = subjects
        self._trainer = trainer
        self._say = say

    async def entries(self, first: int, last: int) -> list[LedgerEntry]:
        """The entries of versions `first` to `last` on the line that counts, whole.

        Raises:
            ConfigError: the run has not made them, or there are too many.
        """
        subject = self._subjects.ledger(self._trainer)
        newest = await self._log.last(subject)
        made = read_entry(newest).version if newest is not None else None
        if newest is None or made is None or not 1 <= first <= last <= made.number:
            there = f"versions 1 to {made.number} have been made" if made is not None else "no version has been made yet"
            raise ConfigError(
                f"expected --window FROM..TO of versions of run {self._subjects.run!r}, of which {there}, got {first}..{last}",
                hint="the batch that made version 7 is batch 7",
            )
        if last - first >= MOST_VERSIONS:
            raise ConfigError(f"expected a window of at most {MOST_VERSIONS} versions, got {last - first + 1}", hint="choose fewer")
        found: dict[int, LedgerEntry] = {}
        gaps: dict[int, LedgerEntry] = {}
        for span in await epochs(self._log, subject, newest.sequence):
            take_entry(found, gaps, span.entry)
            begin, _ = await first_entry(self._log, subject, span.last, lambda one: one.version.number >= first, first=span.first)
            async for message in stretch(self._log, LEDGER, first=begin, last=span.last, subject=subject):
                entry = read_entry(message)
                if entry.version.number > last:
                    break
                take_entry(found, gaps, entry)
        return [await whole(self._log.blobs, found[number]) for number in range(first, last + 1) if number in found]

    async def arrivals(self, entry: LedgerEntry) -> list[Arrival]:
        """The messages of samples that an entry names and that can still be read, in stream order."""
        wanted = {sequence for group in entry.used for sequence in group.sequences}
        wanted |= {drop.sequence for drop in entry.drops if drop.reason != "poison"} - {NO_MESSAGE}
        first = (await self._log.state(SAMPLES)).first
        found = [_arrival(message) async for message in self._messages(sorted(one for one in wanted if one >= first))]
        return [arrival for arrival in found if arrival is not None]

    async def _messages(self, sequences: list[int]) -> AsyncIterator[Message]:
        try:
            messages = await fetch_messages(self._log, sequences)
        except NotFound:  # trimmed meanwhile, or a hole: one by one
            messages = {}
            for sequence in sequences:
                try:
                    messages[sequence] = await self._log.fetch(SAMPLES, sequence)
                except NotFound:
                    continue
        for sequence in sorted(messages):
            if kind_of(messages[sequence].subject) == "samples":
                yield messages[sequence]

    async def swaps(self, start_s: float, end_s: float) -> list[Swap]:
        """Versions that engines committed, by time; from a while before `start_s` on."""
        found: list[Swap] = []
        async for message in self._during(EVENTS, self._subjects.events("weights"), start_s - _BEFORE_S, end_s):
            event = decode(message.body, Event, where=f"{message.subject} sequence {message.sequence}")
            detail = event.detail
            if "engine" in detail and "version" in detail:
                staged = detail.get("stage_s")
                stage_s = float(staged) if isinstance(staged, int | float) else 0.0
                found.append(Swap(str(detail["engine"]), str(detail["version"]), event.time_s, stage_s))
        return found

    async def publications(self, start_s: float, end_s: float) -> list[tuple[float, float]]:
        """(began, ended) of publications of weights that the trainer reports, by time; those whose reports are gone are missing."""
        found: list[tuple[float, float]] = []
        async for message in self._during(METRICS, self._subjects.metrics("trainer-0"), start_s, end_s):
            report = decode(message.body, MetricReport, where=f"{message.subject} sequence {message.sequence}")
            took_s = report.mean.get("weights/publish_s")
            if took_s is not None and took_s >= 0:
                found.append((report.time_s - took_s, report.time_s))
        return found

    async def _during(self, stream: str, subject: str, start_s: float, end_s: float) -> AsyncIterator[Message]:
        """Messages of a subject that were stored between two times."""
        try:
            async for message in stored_between(self._log, stream, start_s, end_s, subject=subject):
                yield message
        except LogTruncated:  # the oldest go while they are read
            self._say(f"the stream {stream} was trimmed while it was read: some of the window is missing")


def _arrival(message: Message) -> Arrival | None:
    try:
        return Arrival(message.sequence, message.time_s, tuple(decode_samples(message.body).rows()))
    except SchemaError:
        return None


MOST_EVENTS = 250_000
"""Some 30 MB of JSON, and 180 MB of memory while it is made."""
_TRAINER, _STREAM, _ENGINES, _PRODUCERS = 1, 2, 10, 1000
"""Process ids: of the trainer, of the sample stream, of the first engine and the first producer."""
_BATCHES, _PUBLISH = 1, 2
_SERVED, _STAGING = 1, 2
"""Thread ids."""
_RED = "terrible"
"""Chrome's name of it, for what was not trained."""


class Slice(msgspec.Struct, frozen=True):
    """Something that took time, in microseconds."""

    name: str
    start: int
    end: int
    args: dict[str, Any] = {}
    color: str = ""


class Work(msgspec.Struct, frozen=True):
    """Slices that need a lane for themselves: the first has the others within it."""

    slices: tuple[Slice, ...]
    batch: Slice | None = None
    """That an arrow leads to."""


class WindowEvents:
    """Takes a window in, batch by batch, and gives its events.

    Args:
        run: its name.
        most: events that it takes.
    """

    def __init__(self, run: str, *, most: int = MOST_EVENTS) -> None:
        self._run = run
        self._most = most
        self._producers: dict[str, list[Work]] = {}
        self._queue: list[Work] = []
        self._batches: list[Slice] = []
        self._num_events = 0
        self.start, self.end = 0, 0
        """Of the batches taken in, in microseconds."""

    def batch(self, entry: LedgerEntry, arrivals: Iterable[Arrival]) -> None:
        """Take in the next batch with the messages that its entry names.

        Raises:
            ConfigError: there are more events than the file may have.
        """
        step = self._step(entry)
        trained = {(sequence, one) for group in entry.used for one, sequence in zip(group.rollouts, group.sequences, strict=True)}
        why = {(drop.sequence, rollout): drop.reason for drop in entry.drops for rollout in drop.rollouts or (-1,)}
        for arrival in arrivals:
            for sample in arrival.samples:
                place = (arrival.sequence, sample.rollout)
                reason = "" if place in trained else why.get(place, why.get((arrival.sequence, -1), ""))
                work = _sample_work(sample, arrival, entry, step if place in trained else None, reason)
                if work is not None:
                    self._producers.setdefault(sample.producer or "producer", []).append(work)
                    self._num_events += len(work.slices) + 2
            first = arrival.samples[0]
            stored = _us(arrival.stored_s)
            if stored < step.start and any((arrival.sequence, sample.rollout) in trained for sample in arrival.samples):
                name = f"task {first.task}"
                self._queue.append(Work((Slice(name, stored, step.start, {"sequence": arrival.sequence}),)))
                self._num_events += 1
        if self._num_events > self._most:
            raise ConfigError(
                f"expected a window of at most {self._most} events, got more up to version {entry.version}",
                hint=f"end it before version {entry.version.number}",
            )

    def _step(self, entry: LedgerEntry) -> Slice:
        step_s, wait_s = (max(0.0, entry.metrics.get(name, 0.0)) for name in ("perf/step_s", "perf/wait_s"))
        end = max(_us(entry.time_s), self.end)
        begun = max(end - _us(step_s), self.end)
        waited = max(begun - _us(wait_s), self.end)
        if waited < begun:
            self._batches.append(Slice("wait", waited, begun))
        args = {"version": str(entry.version), "groups": len(entry.used), "tokens": entry.num_tokens, "dropped": dict(entry.dropped)}
        step = Slice(f"batch {entry.version.number}", begun, max(end, begun + 1), args)
        self._batches.append(step)
        self.start, self.end = self.start or waited, step.end
        return step

    def events(self, swaps: Sequence[Swap], publications: Sequence[tuple[float, float]]) -> Iterator[dict[str, Any]]:
        """All events; those of a lane in order of time.

        Args:
            swaps: of all engines, by time.
            publications: (began, ended) in Unix seconds, by time.
        """
        yield from _process(_TRAINER, f"{self._run}: trainer", {_BATCHES: "batches", _PUBLISH: "publish"})
        yield from (_event(_TRAINER, _BATCHES, one) for one in self._batches)
        published = _behind(Slice("publish", _us(began), _us(ended)) for began, ended in publications)
        yield from (_event(_TRAINER, _PUBLISH, one) for one in published)
        for number, engine in enumerate(sorted({swap.engine for swap in swaps})):
            pid = _ENGINES + number
            yield from _process(pid, f"{self._run}: {engine}", {_SERVED: "version served", _STAGING: "staging"})
            yield from self._engine(pid, [swap for swap in swaps if swap.engine == engine])
        arrows = 0
        for number, producer in enumerate(sorted(self._producers)):
            pid, lanes = _PRODUCERS + number, _lanes(self._producers[producer])
            yield from _process(pid, f"{self._run}: {producer}", {lane: f"slot {lane}" for lane in range(1, len(lanes) + 1)})
            for tid, lane in enumerate(lanes, 1):
                for work in lane:
                    yield from (_event(pid, tid, one) for one in work.slices)
                    if work.batch is not None and work.slices[0].start < work.batch.end:  # not so where clocks differ much
                        arrows += 1
                        yield from _arrow(arrows, pid, tid, work.slices[0], work.batch)
        lanes = _lanes(self._queue)
        yield from _process(_STREAM, f"{self._run}: sample stream", {lane: f"queue {lane}" for lane in range(1, len(lanes) + 1)})
        for tid, lane in enumerate(lanes, 1):
            yield from (_event(_STREAM, tid, one) for work in lane for one in work.slices)

    def _engine(self, pid: int, swaps: Sequence[Swap]) -> Iterator[dict[str, Any]]:
        ends = [*(_us(later.time_s) for _, later in pairwise(swaps)), max(self.end, _us(swaps[-1].time_s))]
        served = [Slice(swap.version, max(self.start, _us(swap.time_s)), end) for swap, end in zip(swaps, ends, strict=True)]
        yield from (_event(pid, _SERVED, one) for one in _behind(one for one in served if one.end > self.start))
        staged = [Slice(f"stage {swap.version}", _us(swap.time_s - swap.stage_s), _us(swap.time_s)) for swap in swaps]
        yield from (_event(pid, _STAGING, one) for one in _behind(one for one in staged if one.end > self.start))


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _sample_work(sample: Sample, arrival: Arrival, entry: LedgerEntry, batch: Slice | None, reason: str) -> Work | None:
    """None where not even the sample's own times were recorded."""
    at = start = _us(sample.claimed_s or sample.started_s or sample.finished_s)
    if not start:
        return None
    inner: list[Slice] = []

    def until(name: str, time_s: float, **args: Any) -> None:
        nonlocal at
        if (end := _us(time_s)) > at:
            inner.append(Slice(name, at, end, args))
            at = end

    alone = TurnSpan(start=0, length=1, asked_s=sample.started_s, began_s=sample.began_s, finished_s=sample.finished_s)
    for number, turn in enumerate(sample.turns or (alone,), 1):
        until("wait" if number == 1 else "tools", turn.asked_s)
        asked = at
        until("generate", turn.finished_s, turn=number, engine=turn.engine or sample.engine, tokens=turn.length if sample.turns else None)
        if asked < (began := _us(turn.began_s)) < at:
            inner.append(Slice("decode", began, at))
    until("reward", sample.scored_s)
    until("store", arrival.stored_s)
    versions = sorted({str(span.version) for span in sample.spans if span.version is not None})
    args = {"sequence": arrival.sequence, "versions": versions, "reward": sample.trained_reward, "tokens": len(sample.tokens)}
    args |= {"trained into": str(entry.version)} if batch is not None else {"not trained": reason or "of another batch"}
    name = f"task {sample.task}/{sample.rollout}" + (f".{sample.sample}" if sample.num_samples > 1 else "")
    whole = Slice(name, start, max(at, start + 1), args, "" if batch is not None or not reason else _RED)
    return Work((whole, *inner), batch)


def _lanes(works: Sequence[Work]) -> list[list[Work]]:
    """As few lanes as there are works at the same time; in each they lie one behind the other."""
    lanes: list[list[Work]] = []
    free: list[tuple[int, int]] = []
    for work in sorted(works, key=lambda one: (one.slices[0].start, one.slices[0].end)):
        lane = heapq.heappop(free)[1] if free and free[0][0] <= work.slices[0].start else len(lanes)
        if lane == len(lanes):
            lanes.append([])
        lanes[lane].append(work)
        heapq.heappush(free, (work.slices[0].end, lane))
    return lanes


def _behind(slices: Iterable[Slice]) -> Iterator[Slice]:
    """The slices, each cut where the one before it ends; those of which nothing is left are left out."""
    end = 0
    for one in slices:
        start = max(one.start, end)
        if one.end > start:
            yield msgspec.structs.replace(one, start=start)
            end = one.end


def _event(pid: int, tid: int, one: Slice) -> dict[str, Any]:
    event: dict[str, Any] = {
        "ph": "X",
        "name": one.name,
        "cat": "streamrl",
        "pid": pid,
        "tid": tid,
        "ts": one.start,
        "dur": one.end - one.start,
    }
    if one.args:
        event["args"] = {name: value for name, value in one.args.items() if value is not None}
    if one.color:
        event["cname"] = one.color
    return event


def _arrow(number: int, pid: int, tid: int, work: Slice, batch: Slice) -> Iterator[dict[str, Any]]:
    same = {"name": "trained", "cat": "streamrl", "id": number}
    left = min(work.end, batch.end) - 1
    yield {"ph": "s", "pid": pid, "tid": tid, "ts": left, **same}
    yield {"ph": "f", "bp": "e", "pid": _TRAINER, "tid": _BATCHES, "ts": max(batch.start, left), **same}


def _process(pid: int, name: str, threads: dict[int, str]) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    for tid, thread in threads.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": thread}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
