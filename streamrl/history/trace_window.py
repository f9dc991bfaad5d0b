"""Reads what a stretch of versions was made of: its batches, their rollouts, and what engines and publisher did meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import msgspec

from streamrl.bus.protocol import Log, Message
from streamrl.bus.reading import stored_between, stretch
from streamrl.consumers.training.carried import fetch_messages
from streamrl.consumers.training.spilled_drops import whole
from streamrl.errors import ConfigError, LogTruncated, NotFound, SchemaError
from streamrl.history.ledger_search import epochs, first_entry, read_entry
from streamrl.schemas.codec import decode
from streamrl.schemas.decoding import decode_samples
from streamrl.schemas.events import Event, MetricReport
from streamrl.schemas.ledger import NO_MESSAGE, LedgerEntry, take_entry
from streamrl.schemas.samples import Sample
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
