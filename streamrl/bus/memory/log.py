"""One stream in memory: sequences, byte budget, remembered ids, compare-and-set, removal."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Collection, Mapping

from streamrl.bus.protocol import Message, Receipt, StreamState
from streamrl.bus.topology import StreamSpec, message_bytes
from streamrl.errors import Conflict, StreamFull

OVERHEAD_BYTES = 30
"""What JetStream's file store adds to each message, about."""


class Log:
    """Messages of one stream by sequence. All methods but the waits are plain functions of one event loop."""

    def __init__(self, spec: StreamSpec) -> None:
        self.spec = spec
        self.identity = secrets.token_hex(8)
        self.last = 0
        self.changed = asyncio.Condition()
        self._messages: dict[int, Message] = {}
        self._sizes: dict[int, int] = {}
        self._bytes = 0
        self._newest: dict[str, int] = {}
        self._ids: dict[str, tuple[float, int]] = {}

    def append(
        self,
        subject: str,
        body: bytes,
        *,
        id: str | None = None,
        headers: Mapping[str, str] | None = None,
        expect_last: int | None = None,
        expect_subject_last: int | None = None,
    ) -> Receipt:
        """Store a message; see `Bus.publish`. Wake readers afterwards with `notify`."""
        self._forget_ids()
        if id is not None and id in self._ids:
            return Receipt(self._ids[id][1], duplicate=True)
        self._expect(subject, expect_last, expect_subject_last)
        own = dict(headers or {})
        size = message_bytes(body, own) + len(subject) + OVERHEAD_BYTES
        self._make_room(subject, size)
        self.last += 1
        self._messages[self.last] = Message(subject, self.last, bytes(body), own, time.time())
        self._sizes[self.last] = size
        self._bytes += size
        self._newest[subject] = self.last
        if id is not None:
            self._ids[id] = (time.monotonic(), self.last)
        return Receipt(self.last)

    def _expect(self, subject: str, expect_last: int | None, expect_subject_last: int | None) -> None:
        newest = self._newest.get(subject, 0)
        for expected, actual in ((expect_last, self.last), (expect_subject_last, newest if newest in self._messages else 0)):
            if expected is not None and expected != actual:
                raise Conflict(
                    f"publish to {subject}: expected the last sequence {expected}, got {actual}",
                    hint="another writer was first",
                    expected=expected,
                    actual=actual,
                )

    def _make_room(self, subject: str, size: int) -> None:
        if self.spec.max_bytes < 0:
            return
        if self.spec.full == "drop_oldest":
            while self._messages and self._bytes + size > self.spec.max_bytes:
                self.remove(next(iter(self._messages)))
        if self._bytes + size > self.spec.max_bytes:
            raise StreamFull(
                f"publish to {subject}: the byte budget is used up ({self._bytes} of {self.spec.max_bytes} bytes)",
                hint="trim the stream, or raise its budget in [bus]",
            )

    def _forget_ids(self) -> None:
        """Ids are kept in the order in which they came, so the expired ones are in front."""
        limit = time.monotonic() - self.spec.dedupe_s
        while self._ids:
            oldest = next(iter(self._ids))
            if self._ids[oldest][0] > limit:
                return
            del self._ids[oldest]

    async def notify(self) -> None:
        """Wake everybody who waits for a change."""
        async with self.changed:
            self.changed.notify_all()

    async def wait_beyond(self, sequence: int) -> None:
        """Wait until there is, or has been, a message above a sequence."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.last > sequence)

    def get(self, sequence: int) -> Message | None:
        """Message by sequence."""
        return self._messages.get(sequence)

    def newest(self, subject: str) -> Message | None:
        """Newest message of a subject."""
        return self._messages.get(self._newest.get(subject, 0))

    def remove(self, sequence: int) -> None:
        """Remove one message, if it is there."""
        if self._messages.pop(sequence, None) is not None:
            self._bytes -= self._sizes.pop(sequence)

    def lose(self, sequences: Collection[int], *, known_end: bool = False) -> None:
        """Remove messages as a power cut does: where they were the last ones, their sequences are given again, unless the end is known."""
        for sequence in sequences:
            self.remove(sequence)
        self._ids = {id: known for id, known in self._ids.items() if known[1] not in sequences}
        self._newest = {message.subject: sequence for sequence, message in sorted(self._messages.items())}
        if self.last in sequences and not known_end:
            self.last = max(self._messages, default=0)

    def trim(self, through: int) -> None:
        """Remove all messages up to a sequence."""
        for sequence in [sequence for sequence in self._messages if sequence <= through]:
            self.remove(sequence)

    @property
    def first(self) -> int:
        """Sequence of the oldest message; last + 1 when there is none."""
        return next(iter(self._messages), self.last + 1)

    def state(self) -> StreamState:
        """See `Bus.state`."""
        return StreamState(self.identity, self.first, self.last, self._bytes, len(self._messages), self.spec.max_bytes)
