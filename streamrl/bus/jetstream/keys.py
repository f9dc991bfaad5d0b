"""Keys: the newest message of each subject of one stream, in NATS's key-value layout (`nats kv get <run> <key>` reads it).

A slash of a key is a dot of its subject, so that the server can select by prefix.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

from streamrl.bus.jetstream import admin
from streamrl.bus.jetstream.connection import Connection, Interrupted
from streamrl.bus.jetstream.outbox import Outbox
from streamrl.bus.jetstream.session import opened
from streamrl.bus.jetstream.wire import (
    HEADER_EXPECT_SUBJECT_LAST,
    HEADER_ID,
    HEADER_TTL,
    Stored,
    StoredMessage,
    StoredMessageReply,
    decode,
    error_of,
)
from streamrl.bus.protocol import KeyEntry
from streamrl.bus.topology import check_key, check_ttl, is_key, keys_name
from streamrl.errors import Conflict

logger = logging.getLogger(__name__)

OPERATION = "KV-Operation"
MARKER = "Nats-Marker-Reason"
LATE_S = 0.05
"""How much later than promised a server may remove a key that has expired."""
AGAIN_S = 0.5
"""After which a key that should be gone and is not is looked at again."""


class JetStreamKeys:
    """One bucket of keys; see `streamrl.bus.protocol.KeyValue`."""

    def __init__(self, connection: Connection, outbox: Outbox, bucket: str) -> None:
        self._connection = connection
        self._outbox = outbox
        self._stream = keys_name(bucket)
        self._root = f"$KV.{bucket}."

    async def get(self, key: str) -> KeyEntry | None:
        stored = await self._stored(key)
        return None if stored is None or _gone(stored.headers()) else KeyEntry(key, stored.data, stored.seq)

    async def put(self, key: str, value: bytes, *, expect: int | None = None, ttl_s: float | None = None) -> int:
        headers = {HEADER_TTL: f"{check_ttl(ttl_s)}s"} if ttl_s is not None else {}
        return await self._store(key, value, headers, expect)

    async def delete(self, key: str) -> None:
        if await self.get(key) is not None:
            await self._store(key, b"", {OPERATION: "DEL"}, None)

    async def keys(self, prefix: str = "") -> Sequence[str]:
        return sorted(key for key, message in (await self._all(prefix)).items() if not _gone(message.headers))

    async def values(self, prefix: str) -> Mapping[str, bytes]:
        return {key: bytes(message.data) for key, message in sorted((await self._all(prefix)).items()) if not _gone(message.headers)}

    async def remove(self, prefix: str) -> None:
        await admin.purge(self._connection, self._stream, {"filter": self._selection(prefix)})

    async def _all(self, prefix: str) -> dict[str, Stored]:
        """The newest message of each key that begins with `prefix`."""
        session = await opened(self._connection, self._stream, after=0, subject=self._selection(prefix), follow=False)
        found: dict[str, Stored] = {}
        try:
            while (message := await session.next()) is not None:
                key = self._key(message.subject)
                if is_key(key):
                    found[key] = message
        except Interrupted:
            return await self._all(prefix)
        finally:
            await session.close()
        return {key: message for key, message in found.items() if key.startswith(prefix)}

    async def size(self) -> int:
        return (await admin.info(self._connection, self._stream)).state.bytes

    def watch(self, prefix: str) -> AsyncGenerator[KeyEntry]:
        return self._watch(self._selection(prefix), lambda key: key.startswith(prefix))

    def watch_key(self, key: str) -> AsyncGenerator[KeyEntry]:
        return self._watch(self._subject(key), key.__eq__)

    async def _watch(self, subject: str, wanted: Callable[[str], bool]) -> AsyncGenerator[KeyEntry]:
        live = _LiveKeys()
        while True:
            session = await opened(self._connection, self._stream, after=0, subject=subject)
            unseen = set(live.revisions)
            try:
                while True:
                    if session.at_end and unseen:
                        # They went while the connection was down.
                        for key in sorted(unseen & set(live.revisions)):
                            yield KeyEntry(key, None, live.forget(key))
                        unseen = set()
                    message = await session.next(live.next_end_s)
                    if message is None:
                        for key in live.ended():
                            if await self.get(key) is None:
                                yield KeyEntry(key, None, live.forget(key))
                        continue
                    key = self._key(message.subject)
                    unseen.discard(key)
                    if not wanted(key) or not is_key(key) or live.revisions.get(key, 0) >= message.sequence:
                        continue
                    if not _gone(message.headers):
                        live.note(key, message)
                        yield KeyEntry(key, message.data, message.sequence)
                    elif key in live.revisions:
                        live.forget(key)
                        yield KeyEntry(key, None, message.sequence)
            except Interrupted as error:
                logger.debug("event=bus_watch_interrupted subject=%s error=%s", subject, error)
            finally:
                await session.close()

    async def _store(self, key: str, value: bytes, headers: dict[str, str], expect: int | None) -> int:
        if expect is not None:
            headers = headers | {HEADER_EXPECT_SUBJECT_LAST: str(expect)}
        message_id = self._outbox.new_id()
        ack, _ = await self._outbox.publish(self._subject(key), value, id=message_id, headers=headers)
        if ack.error is None:
            return ack.seq
        error = error_of(ack.error, doing=f"put key {key}", expected=expect)
        if not isinstance(error, Conflict):
            raise error
        stored = await self._stored(key)
        if stored is not None and stored.headers().get(HEADER_ID) == message_id:
            return stored.seq
        if stored is not None and expect == 0 and _gone(stored.headers()):
            # No such key for the caller; for the server its deletion is the newest message.
            return await self._store(key, value, headers, stored.seq)
        raise error

    async def _stored(self, key: str) -> StoredMessage | None:
        answer = await self._connection.request(
            f"{self._connection.api}.STREAM.MSG.GET.{self._stream}", {"last_by_subj": self._subject(key)}
        )
        reply = decode(answer.data, StoredMessageReply)
        if reply.error is not None and reply.error.err_code != 10037:
            raise error_of(reply.error, doing=f"get key {key}")
        return reply.message

    def _selection(self, prefix: str) -> str:
        whole, _, _ = prefix.rpartition("/")
        return self._root + (check_key(whole).replace("/", ".") + ".>" if whole else ">")

    def _subject(self, key: str) -> str:
        return self._root + check_key(key).replace("/", ".")

    def _key(self, subject: str) -> str:
        return subject[len(self._root) :].replace(".", "/")


class _LiveKeys:
    """The keys that a watcher has told of, and when they end unless they are put again: the server says nothing then."""

    def __init__(self) -> None:
        self.revisions: dict[str, int] = {}
        self._ends: dict[str, float] = {}

    @property
    def next_end_s(self) -> float | None:
        """When the next key may be gone, by the loop's clock."""
        return min(self._ends.values(), default=None)

    def note(self, key: str, message: Stored) -> None:
        """The key has this value now."""
        self.revisions[key] = message.sequence
        lasts = message.headers.get(HEADER_TTL, "").removesuffix("s")
        if lasts.isdigit():
            # What was stored before it was first read ends earlier; another host's clock may be wrong, ours here is not.
            age_s = min(max(0.0, time.time() - message.time_s), float(lasts))
            self._ends[key] = asyncio.get_running_loop().time() + float(lasts) - age_s + LATE_S
        else:
            self._ends.pop(key, None)

    def ended(self) -> list[str]:
        """Keys whose time is over, to be looked at; they are named again a little later, unless they are forgotten or put anew."""
        now = asyncio.get_running_loop().time()
        over = [key for key, end in self._ends.items() if end <= now]
        self._ends.update(dict.fromkeys(over, now + AGAIN_S))
        return over

    def forget(self, key: str) -> int:
        """The key is gone; returns its last revision."""
        self._ends.pop(key, None)
        return self.revisions.pop(key)


def _gone(headers: Mapping[str, str]) -> bool:
    """Whether a stored message says that its key was deleted or has expired."""
    return OPERATION in headers or MARKER in headers
