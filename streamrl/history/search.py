"""Finds what a run's log says of one task or one version, and reads as little as it can.

```text
ledger    bisected for the first entry that grants the task (`granted` > its index); read on from there until it has ended; the
          same for each epoch, for a later one may have trained the task again
samples   what is the task's lies above the cursor of the entry before that one, and up to the cursor of its end
dead      the letters among its drops
presence  who has it in hand now
```
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from streamrl.bus.protocol import Bus, Log, Message
from streamrl.bus.reading import read_key, stretch
from streamrl.consumers.training.spilled_drops import whole
from streamrl.core.records import judge
from streamrl.errors import ConfigError, LogTruncated, NotFound
from streamrl.history.dead_letters import DeadLetters, task_of
from streamrl.schemas.codec import decode
from streamrl.schemas.control import WorkerPresence
from streamrl.schemas.dead import DeadRecord
from streamrl.schemas.ledger import NO_MESSAGE, LedgerEntry
from streamrl.schemas.subjects import DEAD, HEADER_TASK, LEDGER, PREFIX_PRESENCE, SAMPLES, TASKS, Subjects, kind_of
from streamrl.schemas.versions import Version

LATER = 32
"""Entries after a task's end that are looked through for what came too late."""
_SAY_EVERY = 5000


class Close(msgspec.Struct, frozen=True):
    """One entry of the ledger, of which only this is needed: its batch closed with `cursor` folded."""

    cursor: int
    version: Version
    time_s: float


class TaskLog(msgspec.Struct, kw_only=True):
    """What the log says of one task. Sequences are those of the sample stream."""

    task: int
    entries: list[LedgerEntry] = []
    """Those of the ledger that name it, whole, in stream order."""
    credit: LedgerEntry | None = None
    """The newest entry before it was granted; None: the credits that a run begins with, or not known (`gap`)."""
    gap: bool = False
    """Whether entries of the ledger are lost, so that it may have been granted before the entries that are there."""
    closes: list[Close] = []
    """Entries in stream order from its grant on, as far as they were read."""
    messages: list[Message] = []
    """Its messages in stream order, unreadable ones too."""
    letters: dict[int, DeadRecord] = {}
    """Dead letters among them, by sequence."""
    trimmed: int = 0
    """First sequence that the stream still has, where some before it might have been the task's; else 0."""
    holders: list[str] = []
    """Workers that say that they have it in hand."""
    queued: bool | None = None
    """Whether its message is still in the task stream; None: not known."""

    @property
    def end(self) -> LedgerEntry | None:
        """The entry that ended it."""
        return next((entry for entry in reversed(self.entries) if ends(entry, self.task)), None)

    def folded(self, sequence: int) -> Close | None:
        """The first batch that closed with this message folded."""
        return next((close for close in self.closes if close.cursor >= sequence), None)


def names(entry: LedgerEntry, task: int) -> bool:
    """Whether an entry says anything of the task."""
    return any(group.task == task for group in entry.used) or any(drop.task == task for drop in entry.drops)


def ends(entry: LedgerEntry, task: int) -> bool:
    """Whether the task was trained, or dropped as a whole, with this entry."""
    return any(group.task == task for group in entry.used) or any(drop.task == task and drop.retires for drop in entry.drops)


class TaskFinder:
    """Reads the log for one task after the other; writes nothing.

    Args:
        log: of a run, or of a recording.
        bus: of the run; None: it is a recording, which has no letters, tasks and workers.
        subjects: of the run.
        trainer: whose ledger counts.
        say: told in words how far a long reading is.
    """

    def __init__(self, log: Log, bus: Bus | None, subjects: Subjects, trainer: str, *, say: Callable[[str], object] = str) -> None:
        self._log = log
        self._bus = bus
        self._subjects = subjects
        self._ledger = subjects.ledger(trainer)
        self._say = say

    async def check_issued(self, task: int) -> None:
        """Raise ConfigError for a task that has not been issued."""
        issued = (await self._log.state(TASKS)).last
        if not issued and (newest := await self._log.last(self._ledger)) is not None:  # a recording has no tasks
            issued = read_entry(newest).granted
        if not 0 <= task < issued:
            there = f"0 to {issued - 1} have been issued" if issued else "none has been issued yet"
            raise ConfigError(f"expected a task of run {self._subjects.run!r}, of which {there}, got {task}", hint="count from 0")

    async def find(self, task: int) -> TaskLog:
        """Everything that the log has of a task that has been issued."""
        found = TaskLog(task=task)
        after = await self._read_ledger(found)
        end = found.end
        await self._read_samples(found, after, None if end is None else end.cursor)
        if self._bus is not None:
            await self._read_letters(found, self._bus)
            if end is None:
                await self._look_now(found, self._bus)
        return found

    async def _read_ledger(self, found: TaskLog) -> int:
        """Fill in what the ledger has; returns the sequence above which the task's messages are."""
        newest = await self._log.last(self._ledger)
        if newest is None:
            return 0
        granted, before = False, None
        for span in await epochs(self._log, self._ledger, newest.sequence):  # a later one may have trained it again
            found.gap = found.gap or span.entry.gap is not msgspec.UNSET
            begin, below = await first_entry(self._log, self._ledger, span.last, lambda entry: entry.granted > found.task, first=span.first)
            if not granted:
                granted, before = begin <= span.last, below or before
            await self._read_epoch(found, span, begin)
        if granted and not found.gap:  # behind a gap fewer tasks may be granted than had been: this one may have been issued long before
            found.credit = before
        return 0 if found.credit is None else found.credit.cursor

    async def _read_epoch(self, found: TaskLog, span: EpochSpan, begin: int) -> None:
        """The entries of an epoch from `begin` on, until the task has ended and what came too late has been seen."""
        ended = any(ends(entry, found.task) and entry.version.number < span.entry.version.number for entry in found.entries)
        later = 0
        async for message in stretch(self._log, LEDGER, first=begin, last=span.last, subject=self._ledger):
            entry = read_entry(message)
            found.closes.append(Close(entry.cursor, entry.version, entry.time_s))
            if not isinstance(entry.spilled, msgspec.UnsetType):
                entry = await whole(self._log.blobs, entry)
            if names(entry, found.task):
                found.entries.append(entry)
                ended = ended or ends(entry, found.task)
            later += ended
            if later > LATER:
                return
            if len(found.closes) % _SAY_EVERY == 0:
                self._say(f"reading the ledger: version {entry.version}")

    async def _read_samples(self, found: TaskLog, after: int, through: int | None) -> None:
        """The task's messages above `after`, up to `through` (None: the end) and what the ledger names beyond."""
        state = await self._log.state(SAMPLES)
        if state.first > after + 1:
            found.trimmed, after = state.first, state.first - 1
        last = state.last if through is None else min(through, state.last)
        messages: dict[int, Message] = {}
        num_read = 0
        try:
            async for message in stretch(self._log, SAMPLES, first=after + 1, last=last):
                if _is_of(message, found.task):
                    messages[message.sequence] = message
                num_read += 1
                if num_read % _SAY_EVERY == 0:
                    self._say(f"reading the samples: {message.sequence} of {last}")
        except LogTruncated:  # trimmed while it is read, or single messages are gone
            found.trimmed = (await self._log.state(SAMPLES)).first
        dropped = {drop.sequence for entry in found.entries for drop in entry.drops if drop.task == found.task}
        for sequence in dropped - {NO_MESSAGE}:
            if sequence not in messages:
                try:
                    messages[sequence] = await self._log.fetch(SAMPLES, sequence)
                except NotFound:
                    found.trimmed = found.trimmed or state.first
        found.messages = [messages[sequence] for sequence in sorted(messages)]

    async def _read_letters(self, found: TaskLog, bus: Bus) -> None:
        mine = {message.sequence for message in found.messages}
        if mine and (await bus.state(DEAD)).messages:
            letters = DeadLetters(bus, self._subjects).letters()
            found.letters = {letter.sequence: letter async for letter in letters if letter.sequence in mine}

    async def _look_now(self, found: TaskLog, bus: Bus) -> None:
        """Who has it in hand, and whether it is still to be done."""
        tasks = await self._log.state(TASKS)
        found.queued = found.task + 1 >= tasks.first
        for key in await bus.kv.keys(f"{PREFIX_PRESENCE}workers/"):
            worker = await read_key(bus.kv, key, WorkerPresence)
            if worker is not None and found.task in (worker.detail.get("tasks") or ()):
                found.holders.append(worker.worker)


def _is_of(message: Message, task: int) -> bool:
    named = message.headers.get(HEADER_TASK)
    if named is not None:
        return named == str(task)
    kind = kind_of(message.subject)
    if kind not in ("samples", "tombstones", "rewards"):
        return False
    return task_of(judge(message.subject, message.sequence, message.body, None)[0]) == task


class EpochSpan(msgspec.Struct, frozen=True):
    """Where the entries of one epoch are. Within it versions rise, and the tasks granted with them; the next one may begin lower."""

    first: int
    """Sequence of its first entry."""
    last: int
    """No later entry is of this epoch; the entry at this sequence may be of another ledger."""
    entry: LedgerEntry
    """The first; where an epoch begins with a gap, that one."""


def read_entry(message: Message) -> LedgerEntry:
    """A stored entry of a ledger; raises SchemaError."""
    return decode(message.body, LedgerEntry, where=f"{message.subject} sequence {message.sequence}")


async def first_entry(
    log: Log, ledger: str, last: int, past: Callable[[LedgerEntry], bool], *, first: int = 0
) -> tuple[int, LedgerEntry | None]:
    """The sequence from which on entries are `past` (beyond `last`: none is), and the entry before; by bisection.

    Args:
        log: the log.
        ledger: subject of the ledger; entries of others, such as a tap's, lie between.
        last: sequence of the last one that is looked at.
        past: false for the first entries, true from one on.
        first: sequence of the first one that is looked at.
    """
    found = await log.first_from(LEDGER, first, subject=ledger)
    low, high, below = last + 1 if found is None else found.sequence, last + 1, None
    while low < high:
        middle = (low + high) // 2
        message = await log.first_from(LEDGER, middle, subject=ledger)
        if message is None or message.sequence >= high or past(entry := read_entry(message)):
            high = middle
        else:
            low, below = message.sequence + 1, entry
    return low, below


async def epochs(log: Log, ledger: str, last: int) -> list[EpochSpan]:
    """The epochs of a ledger up to a sequence, in order."""
    found: list[EpochSpan] = []
    begin = 0
    while (message := await log.first_from(LEDGER, begin, subject=ledger)) is not None and message.sequence <= last:
        entry = read_entry(message)
        epoch = entry.version.epoch
        begin, _ = await first_entry(log, ledger, last, lambda one, epoch=epoch: one.version.epoch > epoch, first=message.sequence)
        found.append(EpochSpan(message.sequence, begin - 1, entry))
    return found
