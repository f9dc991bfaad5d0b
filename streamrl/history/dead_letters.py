"""The operator's side of the dead letters: list them, look at one, publish it again, and see what has become of a message or a task."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Literal

import msgspec

from streamrl.bus.protocol import Bus, Receipt
from streamrl.consumers.training.ledger import Ledger, open_ledger
from streamrl.consumers.training.spilled_drops import whole
from streamrl.core.records import Ended, Marked, Poison, Record, Rewarded, Rollouts, judge
from streamrl.errors import LogTruncated, NotFound, SchemaError
from streamrl.schemas.codec import decode
from streamrl.schemas.columns import SCHEMA_NAME
from streamrl.schemas.dead import DeadRecord
from streamrl.schemas.digests import body_digest
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.subjects import DEAD, HEADER_DIGEST, HEADER_SCHEMA, HEADER_TASK, Subjects, kind_of

_SHOWN = 12
"""How many sequences an error names."""


class Replayed(msgspec.Struct, frozen=True):
    """A dead letter that was published again. `task` is the one that its body is about, if any."""

    letter: int
    """Sequence of the message that was quarantined."""
    sequence: int
    """Sequence of its replay."""
    duplicate: bool
    """Whether the same bytes had been replayed before, a short while ago; nothing new was stored then."""
    task: int | None


class DeadLetters:
    """Dead letters by the sequence that the quarantined message has on the sample stream.

    Args:
        bus: connected to the run.
        subjects: of the run.
    """

    def __init__(self, bus: Bus, subjects: Subjects) -> None:
        self._bus = bus
        self._subjects = subjects

    async def letters(self) -> AsyncIterator[DeadRecord]:
        """All that there are now, in the order in which they were quarantined, each once; large bodies stay in their blobs (`get`)."""
        state = await self._bus.state(DEAD)
        after, seen = state.first - 1, set[int]()
        while after < state.last:
            try:
                async for message in self._bus.read(DEAD, after=after):
                    after = message.sequence
                    record = decode(message.body, DeadRecord, where=f"{DEAD} sequence {message.sequence}")
                    # A trainer that resumes long after it died publishes the same message again.
                    if record.sequence not in seen:
                        seen.add(record.sequence)
                        yield record
                    if after >= state.last:
                        return
            except LogTruncated:
                state = await self._bus.state(DEAD)
                after = max(after, state.first - 1)

    async def find(self, sequence: int) -> DeadRecord | None:
        """The letter as it lies on the stream, or None."""
        async for record in self.letters():
            if record.sequence == sequence:
                return record
        return None

    async def get(self, sequence: int) -> DeadRecord:
        """A letter with its bytes and headers; raises NotFound, which names the letters that there are."""
        found: list[int] = []
        async for record in self.letters():
            if record.sequence == sequence:
                return decode(await self._bus.blobs.get(record.blob), DeadRecord, where=record.blob) if record.blob else record
            found.append(record.sequence)
        shown = ", ".join(map(str, found[-_SHOWN:]))
        there = f"there are {len(found)}: {'... ' if len(found) > _SHOWN else ''}{shown}" if found else "there are none"
        raise NotFound(
            f"expected the sequence of a dead letter of run {self._subjects.run}, got {sequence}; {there}",
            hint=f"`streamrl dead list {self._subjects.run}` lists them",
            sequence=sequence,
        )

    async def replay(self, sequence: int, *, body: bytes | None = None) -> Replayed:
        """Publish a letter again on its subject, under a new id; what becomes of it is the fold's to say.

        Without `body` the original bytes and headers go out as they were; with one, headers are written anew for it.

        Raises:
            NotFound: there is no such letter.
            SchemaError: what would be published cannot be read, so it would be quarantined again; nothing was published.
            StreamFull: the sample stream has no room.
        """
        letter = await self.get(sequence)
        sent = letter.body if body is None else body
        headers = dict(letter.headers) if body is None else _headers_for(letter, body)
        record = _judge(letter.subject, sent, headers)
        if isinstance(record, Poison):
            raise SchemaError(
                f"letter {sequence} would be quarantined again: {record.reason}",
                hint=f"repair its body (`streamrl dead show {self._subjects.run} {sequence} --out FILE`) and replay it with --body FILE",
                sequence=sequence,
            )
        receipt: Receipt = await self._bus.publish(letter.subject, sent, id=f"r{sequence}.{body_digest(sent)[:16]}", headers=headers)
        return Replayed(sequence, receipt.sequence, receipt.duplicate, task_of(record))


def task_of(record: Record) -> int | None:
    """The task that a record is about."""
    return record.task if isinstance(record, Rollouts | Ended | Rewarded | Poison) else None


def _headers_for(letter: DeadRecord, body: bytes) -> dict[str, str]:
    ours = (HEADER_TASK, HEADER_DIGEST, HEADER_SCHEMA)
    headers = {name: value for name, value in letter.headers.items() if name not in ours}
    headers[HEADER_DIGEST] = body_digest(body)
    if kind_of(letter.subject) == "samples":
        headers[HEADER_SCHEMA] = SCHEMA_NAME
    record = _judge(letter.subject, body, {})
    task = None if isinstance(record, Poison | Marked) else task_of(record)
    return headers if task is None else {**headers, HEADER_TASK: str(task)}


def _judge(subject: str, body: bytes, headers: dict[str, str]) -> Record:
    task = headers.get(HEADER_TASK)
    return judge(subject, 0, body, task, digest=headers.get(HEADER_DIGEST), schema=headers.get(HEADER_SCHEMA))[0]


POLL_S = 0.2


class Fate(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the message at `sequence`."""

    sequence: int
    state: Literal["waiting", "accepted", "trained", "dropped", "quarantined"]
    """`waiting`: no ledger entry reaches it yet. `accepted`: the fold has taken it in and decided nothing against it, so far."""
    detail: str = ""

    @property
    def line(self) -> str:
        """For a person."""
        return f"sequence {self.sequence}: {self.state}{', ' + self.detail if self.detail else ''}"


class Fates:
    """Reads a run's ledger and dead letters as often as asked; writes nothing.

    Args:
        bus: connected to the run.
        subjects: of the run.
        trainer: whose ledger counts.
    """

    def __init__(self, bus: Bus, subjects: Subjects, trainer: str) -> None:
        self._bus = bus
        self._subjects = subjects
        self._trainer = trainer
        self._whole: dict[str, LedgerEntry] = {}
        """Entries whose drops were in a blob, by its name."""

    async def of_message(self, sequence: int, *, task: int | None = None, wait_s: float = 0.0) -> Fate:
        """The fate of a message, waiting at most `wait_s` for the trainer to decide on it.

        Args:
            sequence: on the sample stream.
            task: the task that it belongs to, if known: what comes for a task that had ended before needs no wait.
            wait_s: seconds.
        """
        deadline = time.monotonic() + wait_s
        while True:
            fate = await self._look(sequence, task)
            if fate.state != "waiting" or time.monotonic() >= deadline:
                return fate
            await asyncio.sleep(POLL_S)

    async def _ledger(self) -> Ledger:
        ledger = await open_ledger(self._bus, self._subjects, self._trainer)
        for number, entry in ledger.entries.items():
            if not isinstance(entry.spilled, msgspec.UnsetType):
                blob = entry.spilled.blob
                self._whole[blob] = ledger.entries[number] = self._whole.get(blob) or await whole(self._bus.blobs, entry)
        return ledger

    async def _look(self, sequence: int, task: int | None) -> Fate:
        ledger = await self._ledger()
        reached = False
        for number, entry in sorted(ledger.entries.items()):
            for group in entry.used:
                if sequence in group.sequences:
                    return Fate(sequence=sequence, state="trained", detail=f"task {group.task} into version {entry.version}")
            drops = [drop for drop in entry.drops if drop.sequence == sequence]
            if drops:
                reasons = "; ".join(f"{drop.reason}{': ' + drop.detail if drop.detail else ''}" for drop in drops)
                poison = any(drop.reason == "poison" and not drop.rollouts for drop in drops)
                return Fate(sequence=sequence, state="quarantined" if poison else "dropped", detail=f"{reasons} (before version {number})")
            reached = reached or entry.cursor >= sequence
        letter = await DeadLetters(self._bus, self._subjects).find(sequence)
        if letter is not None:
            return Fate(sequence=sequence, state="quarantined", detail=letter.reason)
        if reached:
            return Fate(sequence=sequence, state="accepted", detail="it is in the books with its group, whose batch is still to come")
        ended = _end_of(ledger, task) if task is not None else ""
        if ended:
            return Fate(sequence=sequence, state="dropped", detail=f"it comes after the end of its task {task}, which was {ended}")
        return Fate(sequence=sequence, state="waiting", detail="the ledger has not come to it yet")


def _end_of(ledger: Ledger, task: int) -> str:
    for _, entry in sorted(ledger.entries.items()):
        if any(group.task == task for group in entry.used):
            return f"trained into version {entry.version}"
        for drop in entry.drops:
            if drop.task == task and drop.retires:
                return f"dropped as {drop.reason} before version {entry.version}"
    return ""
