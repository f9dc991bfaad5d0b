"""The operator's side of the dead letters: list them, look at one, publish it again."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from streamrl.bus.protocol import Bus, Receipt
from streamrl.core.records import Ended, Marked, Poison, Record, Rewarded, Rollouts, judge
from streamrl.errors import LogTruncated, NotFound, SchemaError
from streamrl.schemas.codec import decode
from streamrl.schemas.columns import SCHEMA_NAME
from streamrl.schemas.dead import DeadRecord
from streamrl.schemas.digests import body_digest
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
