"""Keys: the newest message of each subject of one stream, in NATS's key-value layout (`nats kv get <run> <key>` reads it).

A slash of a key is a dot of its subject, so that the server can select by prefix.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping, Sequence

from streamrl.bus.jetstream.connection import Connection, Interrupted
from streamrl.bus.jetstream.outbox import Outbox
from streamrl.bus.jetstream.pull import opened
from streamrl.bus.jetstream.wire import (
    HEADER_EXPECT_SUBJECT_LAST,
    HEADER_ID,
    HEADER_TTL,
    StoredMessage,
    StoredMessageReply,
    decode,
    error_of,
)
from streamrl.bus.protocol import KeyEntry
from streamrl.bus.topology import check_key, check_ttl, keys_name
from streamrl.errors import Conflict

logger = logging.getLogger(__name__)

OPERATION = "KV-Operation"
MARKER = "Nats-Marker-Reason"


class JetStreamKeys:
    """Key-value store of one run; see `streamrl.bus.protocol.KeyValue`."""

    def __init__(self, connection: Connection, outbox: Outbox, run: str) -> None:
        self._connection = connection
        self._outbox = outbox
        self._stream = keys_name(run)
        self._root = f"$KV.{run}."

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
        session, pending = await opened(self._connection, self._stream, self._selection(prefix) | {"headers_only": True}, follow=False)
        found: dict[str, bool] = {}
        try:
            while pending > 0 and (item := await session.next()) is not None:
                message, _ = item
                found[self._key(message.subject)] = not _gone(message.headers or {})
        except Interrupted:
            return await self.keys(prefix)
        finally:
            await session.close()
        return sorted(key for key, live in found.items() if live and key.startswith(prefix))

    async def watch(self, prefix: str) -> AsyncIterator[KeyEntry]:
        known: dict[str, int] = {}
        while True:
            session, pending = await opened(self._connection, self._stream, self._selection(prefix))
            unseen = set(known)
            try:
                while True:
                    if pending <= 0 and unseen:
                        # They went while the connection was down, and their markers with them.
                        for key in sorted(unseen):
                            yield KeyEntry(key, None, known.pop(key))
                        unseen = set()
                    item = await session.next()
                    if item is None:
                        break
                    message, facts = item
                    pending = min(pending - 1, facts.pending)
                    key = self._key(message.subject)
                    unseen.discard(key)
                    if not key.startswith(prefix) or known.get(key, 0) >= facts.stream_sequence:
                        continue
                    if not _gone(message.headers or {}):
                        known[key] = facts.stream_sequence
                        yield KeyEntry(key, message.data, facts.stream_sequence)
                    elif known.pop(key, None) is not None:
                        yield KeyEntry(key, None, facts.stream_sequence)
            except Interrupted as error:
                logger.debug("event=bus_watch_interrupted prefix=%s error=%s", prefix, error)
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
        answer = await self._connection.request(f"$JS.API.STREAM.MSG.GET.{self._stream}", {"last_by_subj": self._subject(key)})
        reply = decode(answer.data, StoredMessageReply)
        if reply.error is not None and reply.error.err_code != 10037:
            raise error_of(reply.error, doing=f"get key {key}")
        return reply.message

    def _selection(self, prefix: str) -> dict[str, str]:
        whole, _, _ = prefix.rpartition("/")
        subject = self._root + (check_key(whole).replace("/", ".") + ".>" if whole else ">")
        return {"deliver_policy": "last_per_subject", "filter_subject": subject}

    def _subject(self, key: str) -> str:
        return self._root + check_key(key).replace("/", ".")

    def _key(self, subject: str) -> str:
        return subject[len(self._root) :].replace(".", "/")


def _gone(headers: Mapping[str, str]) -> bool:
    """Whether a stored message says that its key was deleted or has expired."""
    return OPERATION in headers or MARKER in headers
