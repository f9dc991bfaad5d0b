"""Blobs in chunks, in NATS's object-store layout, written and read many chunks at a time.

Chunks lie under `$O.<run>.C.<upload>`, the description under `$O.<run>.M.<name>`; it is written last, so that a blob is there
whole or not at all. An upload's id begins with its time.

A writer that is killed leaves chunks that no description names. Whoever stores blobs and may remove some looks for them before its first
one, and again every hour, and removes those that nothing was added to for an hour: an upload that is alive gives up long before.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import secrets
import time
from collections.abc import Sequence

import msgspec

from streamrl.bus.jetstream import admin
from streamrl.bus.jetstream.connection import Connection, Interrupted
from streamrl.bus.jetstream.outbox import Outbox
from streamrl.bus.jetstream.session import opened
from streamrl.bus.jetstream.wire import (
    HEADER_EXPECT_SUBJECT_LAST,
    HEADER_ID,
    StoredMessage,
    StoredMessageReply,
    blob_name,
    blob_token,
    decode,
    error_of,
    unix_seconds,
)
from streamrl.bus.topology import PAYLOAD_ROOM_BYTES, blobs_name
from streamrl.errors import BusError, Conflict, NotFound, StreamFull

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20
_LOOKS, _LOOK_S = 50, 0.1
"""How often, and with which pause, a copy of a blob's stream is asked that has not got all of the blob."""
CHUNKS_UNDER_WAY = 24
ORPHAN_S = 3600.0
"""Chunks without a description are of a dead writer when the newest is so old by the server's clock; looked for as often."""


class Description(msgspec.Struct, frozen=True):
    """What is stored under a blob's name; the field names are NATS's."""

    name: str
    bucket: str
    nuid: str
    size: int
    chunks: int
    digest: str
    """`SHA-256=` and the URL-safe base64 of the digest."""
    deleted: bool = False


class JetStreamBlobs:
    """Blobs of one bucket; see `streamrl.bus.protocol.Blobs`.

    Args:
        connection: to the server.
        outbox: that publishes.
        bucket: the run's, or that of its samples.
        tidy: writers may remove something, too, and remove what dead ones have left. Else it is somebody else who calls `sweep`, and a blob
            that finds no room is not begun.
    """

    def __init__(self, connection: Connection, outbox: Outbox, bucket: str, *, tidy: bool = True) -> None:
        self._connection = connection
        self._outbox = outbox
        self._bucket = bucket
        self._stream = blobs_name(bucket)
        self._tidy = tidy
        self._swept_s: float | None = None

    async def put(self, name: str, data: bytes | memoryview) -> str:
        """Store under a new name. The same bytes under the same name again are no error (a writer that was restarted)."""
        view = memoryview(data).cast("B")
        if self._tidy and (self._swept_s is None or time.monotonic() - self._swept_s > ORPHAN_S):
            self._swept_s = time.monotonic()
            await self.sweep(ORPHAN_S)
        digest = await asyncio.to_thread(hashlib.sha256, view)
        described = f"SHA-256={base64.urlsafe_b64encode(digest.digest()).decode()}"
        present = await self._describe(name)
        if present is None:
            if not self._tidy:
                await self._check_room(name, len(view))
            upload = f"{int(time.time() * 1000):013x}{secrets.token_hex(8)}"
            chunk = min(CHUNK_BYTES, self._connection.max_payload - PAYLOAD_ROOM_BYTES - 256)
            chunks = await self._upload(name, upload, view, chunk)
            fresh = Description(name=name, bucket=self._bucket, nuid=upload, size=len(view), chunks=chunks, digest=described)
            present = await self._publish_description(fresh)
        if present.digest != described:
            raise Conflict(
                f"blob {name!r} is there already with other bytes (expected {described}, got {present.digest})",
                hint="blob names are never reused: put the version into the name",
                name=name,
            )
        return digest.hexdigest()

    async def _upload(self, name: str, upload: str, view: memoryview, chunk: int) -> int:
        """Send the chunks, some at a time; what was sent is removed again when one is refused."""
        room = asyncio.Semaphore(CHUNKS_UNDER_WAY)

        async def send(index: int) -> None:
            async with room:
                body = bytes(view[index * chunk : (index + 1) * chunk])
                ack, _ = await self._outbox.publish(self._chunks(upload), body, id=f"{upload}.{index}")
                if ack.error is not None:
                    raise error_of(ack.error, doing=f"put blob {name!r} ({len(view)} bytes)")

        count = -(-len(view) // chunk)
        try:
            async with asyncio.TaskGroup() as group:
                for index in range(count):
                    group.create_task(send(index))
        except BaseExceptionGroup as failures:
            await self._take_back(upload)
            raise failures.exceptions[0] from None
        return count

    async def _publish_description(self, fresh: Description) -> Description:
        """Make the blob visible; returns the description that counts, another writer's if that was first."""
        ack, _ = await self._outbox.publish(
            self._meta(fresh.name), msgspec.json.encode(fresh), id=fresh.nuid, headers={HEADER_EXPECT_SUBJECT_LAST: "0"}
        )
        if ack.error is None:
            return fresh
        error = error_of(ack.error, doing=f"put blob {fresh.name!r}")
        present = await self._describe(fresh.name) if isinstance(error, Conflict) else None
        if present is None or present.nuid != fresh.nuid:
            await self._take_back(fresh.nuid)
        if present is None:
            raise error
        return present

    async def _take_back(self, upload: str) -> None:
        if self._tidy:
            await admin.purge(self._connection, self._stream, {"filter": self._chunks(upload)})

    async def _check_room(self, name: str, size: int) -> None:
        """Raise StreamFull where a blob does not fit: its first chunks would stay there, and take the room that is left."""
        used, budget = await self.room()
        if 0 <= budget < used + size + size // 64:  # with what the server keeps beside each chunk
            raise StreamFull(
                f"put blob {name!r} ({size} bytes): the byte budget is used up ({used} of {budget} bytes)",
                hint="raise bus.sample_blobs_bytes",
            )

    async def sweep(self, orphan_s: float) -> None:
        """See `Blobs.sweep`; what does not succeed is left for the next time."""
        try:
            # In this order: an upload that ends meanwhile has a description by then, or a chunk that is new.
            uploads, now_s = await self._tokens("C")
            described = {found.nuid for name in await self.names() if (found := await self._describe(name)) is not None}
            for upload in uploads:
                newest = await self._last(self._chunks(upload)) if upload not in described else None
                if newest is not None and now_s - unix_seconds(newest.time) > orphan_s:
                    await admin.purge(self._connection, self._stream, {"filter": self._chunks(upload)})
                    logger.info("event=bus_orphans_removed upload=%s", upload)
        except BusError as error:
            logger.warning("event=bus_orphans_left error=%s", error.message)

    async def get(self, name: str) -> bytes:
        description = await self._describe(name)
        if description is None:
            raise NotFound(f"expected a blob {name!r} in {self._bucket}, got none", hint="was its version retired already?", name=name)
        chunks: dict[int, bytes] = {}
        looks = 0
        while len(chunks) < description.chunks:
            before = len(chunks)
            interrupted = await self._collect(description, chunks)
            if len(chunks) < description.chunks and not interrupted and len(chunks) == before:
                present = await self._describe(name)
                looks += 1
                if present is None or present.nuid != description.nuid or looks > _LOOKS:
                    raise NotFound(
                        f"blob {name!r} was deleted while it was read ({len(chunks)} of {description.chunks} chunks are there)", name=name
                    )
                # In a cluster any copy of the stream answers, and this one has not heard of them yet.
                await asyncio.sleep(_LOOK_S)
        data = b"".join(chunks[index] for index in range(description.chunks))
        digest = base64.urlsafe_b64encode((await asyncio.to_thread(hashlib.sha256, data)).digest()).decode()
        if len(data) != description.size or f"SHA-256={digest}" != description.digest:
            raise BusError(
                f"blob {name!r}: expected {description.size} bytes with {description.digest}, got {len(data)} with SHA-256={digest}",
                hint="the server's store is damaged, or somebody else writes to it",
                name=name,
            )
        return data

    async def _collect(self, description: Description, chunks: dict[int, bytes]) -> bool:
        """Read chunks in whatever order they lie; returns whether the reading was interrupted."""
        subject = self._chunks(description.nuid)
        session = await opened(self._connection, self._stream, after=0, subject=subject, follow=False)
        try:
            while len(chunks) < description.chunks and (message := await session.next()) is not None:
                index = message.headers.get(HEADER_ID, "").rpartition(".")[2]
                chunks[int(index) if index.isdigit() else len(chunks)] = message.data
        except Interrupted as error:
            logger.debug("event=bus_blob_read_interrupted name=%s error=%s", description.name, error)
            return True
        finally:
            await session.close()
        return False

    async def delete(self, name: str) -> None:
        description = await self._describe(name)
        if description is not None:
            await admin.purge(self._connection, self._stream, {"filter": self._meta(name)})
            await admin.purge(self._connection, self._stream, {"filter": self._chunks(description.nuid)})

    async def names(self) -> Sequence[str]:
        return sorted(map(blob_name, (await self._tokens("M"))[0]))

    async def room(self) -> tuple[int, int]:
        found = await admin.info(self._connection, self._stream)
        return found.state.bytes, found.config.get("max_bytes", -1)

    async def _tokens(self, kind: str) -> tuple[list[str], float]:
        """Last tokens of the subjects of chunks (`C`) or descriptions (`M`), and the Unix seconds by the server's clock."""
        root = f"$O.{self._bucket}.{kind}."
        found: list[str] = []
        while True:  # the server lists subjects in pages
            reply = await admin.info(self._connection, self._stream, {"subjects_filter": root + ">", "offset": len(found)})
            found.extend(subject[len(root) :] for subject in reply.state.subjects)
            if not reply.state.subjects or len(found) >= reply.total:
                return found, unix_seconds(reply.ts) if reply.ts else 0.0

    async def _last(self, subject: str) -> StoredMessage | None:
        answer = await self._connection.request(f"{self._connection.api}.STREAM.MSG.GET.{self._stream}", {"last_by_subj": subject})
        reply = decode(answer.data, StoredMessageReply)
        if reply.error is not None and reply.error.err_code != 10037:
            raise error_of(reply.error, doing=f"look up {subject}")
        return reply.message

    async def _describe(self, name: str) -> Description | None:
        message = await self._last(self._meta(name))
        if message is None:
            return None
        description = decode(message.data, Description)
        return None if description.deleted else description

    def _chunks(self, upload: str) -> str:
        return f"$O.{self._bucket}.C.{upload}"

    def _meta(self, name: str) -> str:
        return f"$O.{self._bucket}.M.{blob_token(name)}"
