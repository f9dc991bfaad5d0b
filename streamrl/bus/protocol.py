"""The bus seam: durable streams, a task queue, keys and blobs of one run.

All methods are coroutines of one event loop.
Sequences count from 1 within a stream, without holes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

import msgspec

from streamrl.schemas.subjects import TASKS


class Receipt(msgspec.Struct, frozen=True):
    """What the bus says of a stored message; `duplicate` when the id was stored before (at `sequence`)."""

    sequence: int
    duplicate: bool = False


class Message(msgspec.Struct, frozen=True):
    """One stored message. `body` may be a view; copy it to keep it beyond the message."""

    subject: str
    sequence: int
    body: bytes
    headers: Mapping[str, str] = {}
    time_s: float = 0.0
    """Unix seconds at which the server stored it: for people, for metrics, and to tell it from another that has its sequence after a loss;
    never for a decision of the fold."""


class StreamState(msgspec.Struct, frozen=True):
    """`identity` changes when a stream is deleted and made again. An empty stream has first == last + 1."""

    identity: str
    first: int
    last: int
    bytes: int
    messages: int
    max_bytes: int = -1


class KeyEntry(msgspec.Struct, frozen=True):
    """One key's newest value. `value` is None when the key was deleted or has expired."""

    key: str
    value: bytes | None
    revision: int


class Lease(Protocol):
    """A claimed task. Unless `done` or `retry` is awaited, or `keep` within the ack wait, it is delivered again."""

    @property
    def body(self) -> bytes: ...
    @property
    def sequence(self) -> int: ...
    @property
    def deliveries(self) -> int:
        """1 at the first delivery."""
        ...

    @property
    def stored_s(self) -> float:
        """Unix seconds at which the bus stored it; for people and metrics only."""
        ...

    async def keep(self) -> None:
        """Tell the bus that the task is still being worked on (resets the ack wait)."""
        ...

    async def done(self) -> None:
        """Take the task off the queue; returns when the server has confirmed it."""
        ...

    async def retry(self, delay_s: float = 0.0) -> None:
        """Give the task back, to be delivered again after `delay_s`."""
        ...


class KeyValue(Protocol):
    """Small values by name; a key is `[A-Za-z0-9_/-]+`."""

    async def get(self, key: str) -> KeyEntry | None:
        """Newest value, or None if there is none."""
        ...

    async def put(self, key: str, value: bytes, *, expect: int | None = None, ttl_s: float | None = None) -> int:
        """Store and return the new revision. `expect` is the revision that must be current (0: no such key); raises Conflict.

        With `ttl_s` (whole seconds, >= 1) the key vanishes unless it is put again in time.
        """
        ...

    async def delete(self, key: str) -> None: ...

    async def keys(self, prefix: str = "") -> Sequence[str]:
        """Names of the live keys that begin with `prefix`, sorted."""
        ...

    async def values(self, prefix: str) -> Mapping[str, bytes]:
        """The live keys that begin with `prefix`, a folder (`5/`), with their present values."""
        ...

    async def remove(self, prefix: str) -> None:
        """Remove the keys that begin with `prefix`, a folder, so that nothing of them stays. No error if there is none."""
        ...

    async def size(self) -> int:
        """Bytes that the stored values take, those of all keys together; a server counts what it stores beside them too."""
        ...

    def watch(self, prefix: str) -> AsyncIterator[KeyEntry]:
        """The present values of the keys that begin with `prefix`, then every change, for ever; survives reconnects.

        A prefix may end within a name (`workers/producer-`); what is read for it is the whole folder that it lies in.
        """
        ...

    def watch_key(self, key: str) -> AsyncIterator[KeyEntry]:
        """The same of this one key: nothing of any other is sent to the reader."""
        ...


class Blobs(Protocol):
    """Byte strings of any size by name. A name is written once and never reused; unknown names raise NotFound."""

    async def put(self, name: str, data: bytes | memoryview) -> str:
        """Store and return the SHA-256 (hex). A reader sees all of it or nothing. Raises StreamFull."""
        ...

    async def get(self, name: str) -> bytes:
        """Read and check against the stored digest; raises BusError when it does not match."""
        ...

    async def delete(self, name: str) -> None:
        """Remove; no error if it is gone already."""
        ...

    async def names(self) -> Sequence[str]: ...

    async def room(self) -> tuple[int, int]:
        """Bytes that are used, and the budget; -1: none."""
        ...

    async def sweep(self, orphan_s: float) -> None:
        """Remove what writers have left behind that were killed: parts of no blob, to which nothing was added for this many seconds."""
        ...


class Bus(Protocol):
    """Durable streams of one run. One real adapter (JetStream) and one in process; one contract suite for both."""

    @property
    def kv(self) -> KeyValue: ...
    @property
    def blobs(self) -> Blobs: ...
    @property
    def sample_blobs(self) -> Blobs:
        """What samples name (`streamrl.schemas.samples.BlobRef`): producers store them, before their samples."""
        ...

    @property
    def turns(self) -> KeyValue:
        """Journals of a gateway's open sessions: `streamrl.producers.gateway.journal`. Raises StreamFull."""
        ...

    async def publish(
        self,
        subject: str,
        body: bytes,
        *,
        id: str | None = None,
        headers: Mapping[str, str] | None = None,
        expect_last: int | None = None,
        expect_subject_last: int | None = None,
    ) -> Receipt:
        """Store a message; returns once the server has it on its stream.

        Retried inside over reconnects with the same `id`, so that it is stored once. Messages published one after the other
        by one caller that does not await between them are stored in that order.

        Args:
            subject: its second token picks the stream (`streamrl.bus.topology`).
            body: the payload, stored as it is; with the headers at most the server's `max_payload` (8 MiB when embedded).
            headers: text by name, stored with it; names of letters, digits and '-', not beginning with `Nats-`.
            id: de-duplication id, unique per stream; a repeat returns the first receipt with `duplicate=True`.
            expect_last: the stream's last sequence must be this (compare-and-set on the whole stream). After a retry whose first
                attempt was stored, the repeat is recognised by `id` and is no Conflict.
            expect_subject_last: the same for the newest message of this subject (0: there is none yet).

        Raises:
            Conflict: `expect_last` did not hold; `values["actual"]` has the stream's last sequence where known.
            StreamFull: the stream's byte budget is used up; nothing was stored.
            BusUnavailable: the bus stayed away for longer than the configured patience.
        """
        ...

    def read(self, stream: str, *, after: int, subject: str | None = None) -> AsyncIterator[Message]:
        """Every message of `stream` with a sequence above `after`, in order, waiting for new ones for ever; no acks.

        Survives reconnects without loss or repeat. With `subject`, only that subject's messages (holes in the sequences are then
        expected). Raises LogTruncated when a message above `after` has been trimmed; with `subject` only at the start, and whatever the
        subject of the trimmed message was. What is gone from the middle is passed over, and logged: a server that lost the end of a
        stream in a power cut may know that there was one, and goes on behind it.
        """
        ...

    async def fetch(self, stream: str, sequence: int) -> Message:
        """One message by its sequence; raises NotFound."""
        ...

    async def first_from(self, stream: str, sequence: int, *, subject: str | None = None) -> Message | None:
        """The first message that is there at or above a sequence, of `subject` if that is given; None where there is none."""
        ...

    async def last(self, subject: str) -> Message | None:
        """The newest message of a subject, or None."""
        ...

    async def claim(self, source: str, *, max: int, wait_s: float, stream: str = TASKS) -> Sequence[Lease]:
        """Up to `max` tasks of a source; waits at most `wait_s` for the first, then returns what is there (maybe nothing).

        With `stream` messages of another queue: requests for rewards (`grading`).
        """
        ...

    async def state(self, stream: str) -> StreamState: ...

    async def trim(self, stream: str, *, through: int) -> None:
        """Remove all messages with a sequence <= `through`."""
        ...

    async def close(self) -> None: ...


class BlobReader(Protocol):
    """The half of `Blobs` that reads."""

    async def get(self, name: str) -> bytes:
        """Read and check; raises NotFound, BusError."""
        ...


class Log(Protocol):
    """The half of a `Bus` that reads. A connected bus has it, and so has a recording on disk."""

    @property
    def blobs(self) -> BlobReader:
        """The drops of ledger entries that were too many for a message."""
        ...

    @property
    def sample_blobs(self) -> BlobReader:
        """What samples name."""
        ...

    def read(self, stream: str, *, after: int, subject: str | None = None) -> AsyncIterator[Message]:
        """Every message above `after` in order; a bus then waits for more, a recording raises LogTruncated."""
        ...

    async def fetch(self, stream: str, sequence: int) -> Message:
        """One message; raises NotFound."""
        ...

    async def first_from(self, stream: str, sequence: int, *, subject: str | None = None) -> Message | None:
        """The first message at or above a sequence, of `subject` if that is given; None where there is none."""
        ...

    async def last(self, subject: str) -> Message | None:
        """The newest message of a subject, or None."""
        ...

    async def state(self, stream: str) -> StreamState: ...
