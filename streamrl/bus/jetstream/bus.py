"""The bus of one run on NATS JetStream."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping, Sequence

from streamrl.bus.address import BusAddress
from streamrl.bus.jetstream import admin
from streamrl.bus.jetstream.blobs import JetStreamBlobs
from streamrl.bus.jetstream.connection import NO_RESPONDER_S, Connection, Interrupted
from streamrl.bus.jetstream.keys import JetStreamKeys
from streamrl.bus.jetstream.outbox import Outbox
from streamrl.bus.jetstream.queue import JetStreamLease, TaskQueue
from streamrl.bus.jetstream.session import opened
from streamrl.bus.jetstream.wire import (
    HEADER_EXPECT_LAST,
    HEADER_EXPECT_SUBJECT_LAST,
    HEADER_ID,
    Stored,
    StoredMessage,
    StoredMessageReply,
    decode,
    error_of,
    own_headers,
    stored,
    unix_seconds,
)
from streamrl.bus.protocol import Message, Receipt, StreamState
from streamrl.bus.topology import Topology, check_headers, sample_bucket, stream_name, truncated, turn_bucket
from streamrl.config.tree import BusConfig
from streamrl.errors import BusError, Conflict, NotFound
from streamrl.schemas import subjects

logger = logging.getLogger(__name__)


class JetStreamBus:
    """See `streamrl.bus.protocol.Bus`. Made with `open`; lives on the event loop that opened it."""

    def __init__(self, connection: Connection, topology: Topology, config: BusConfig) -> None:
        self._connection = connection
        self._topology = topology
        self._config = config
        self._outbox = Outbox(connection, config.patience_s)
        queues = [spec.name for spec in topology.streams.values() if spec.queue]
        self._queues = {name: TaskQueue(connection, self._name(name), config.ack_wait_s) for name in queues}
        self._keys = JetStreamKeys(connection, self._outbox, topology.run)
        self._blobs = JetStreamBlobs(connection, self._outbox, topology.run)
        self._sample_blobs = JetStreamBlobs(connection, self._outbox, sample_bucket(topology.run), tidy=False)
        self._turns = JetStreamKeys(connection, self._outbox, turn_bucket(topology.run))

    @classmethod
    async def open(
        cls,
        address: BusAddress,
        run: str,
        config: BusConfig,
        *,
        create: bool = True,
        name: str = "",
        patience_s: float | None = None,
        gather: bool = False,
    ) -> JetStreamBus:
        """Connect and, unless told otherwise, make the streams that are missing; see `streamrl.bus.connect`."""
        topology = Topology.of(run, config)
        # In a cluster nobody listens while a stream has no leader, which may take as long as a server is away.
        unheard_s = config.patience_s if config.replicas > 1 else NO_RESPONDER_S
        connection = Connection(address, name=name, patience_s=config.patience_s, unheard_s=unheard_s, gather=gather)
        await connection.open(patience_s)
        try:
            if create:
                await admin.create(connection, topology, config)
            return cls(connection, topology, config)
        except BaseException:
            await connection.close()
            raise

    @property
    def connection(self) -> Connection:
        """For who administers streams past what a bus offers."""
        return self._connection

    @property
    def outbox(self) -> Outbox:
        """The outbox that all its messages leave by."""
        return self._outbox

    @property
    def topology(self) -> Topology:
        """The run's streams."""
        return self._topology

    @property
    def kv(self) -> JetStreamKeys:
        return self._keys

    @property
    def blobs(self) -> JetStreamBlobs:
        return self._blobs

    @property
    def sample_blobs(self) -> JetStreamBlobs:
        return self._sample_blobs

    @property
    def turns(self) -> JetStreamKeys:
        return self._turns

    @property
    def connected(self) -> bool:
        """Whether the server is there right now; operations wait for it by themselves."""
        return self._connection.connected

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
        self._topology.stream_of(subject)
        check_headers(headers)
        own = dict(headers) if headers else {}
        if expect_last is not None:
            own[HEADER_EXPECT_LAST] = str(expect_last)
        if expect_subject_last is not None:
            own[HEADER_EXPECT_SUBJECT_LAST] = str(expect_subject_last)
        message_id = id or self._outbox.new_id()
        ack, attempts = await self._outbox.publish(subject, body, id=message_id, headers=own)
        if ack.error is None:
            return Receipt(ack.seq, ack.duplicate and id is not None)
        expected = expect_last if expect_last is not None else expect_subject_last
        error = error_of(ack.error, doing=f"publish to {subject}", expected=expected)
        if isinstance(error, Conflict) and (id is not None or attempts > 1):
            # The server looks at the expected sequence before it looks at the id.
            sequence = await self._stored_as(subject, message_id, expect_last)
            if sequence is not None:
                return Receipt(sequence, id is not None)
        raise error

    async def _stored_as(self, subject: str, message_id: str, expect_last: int | None) -> int | None:
        """Sequence of the message with this id if it is the one right behind `expect_last`, or the newest of its subject."""
        selector = {"last_by_subj": subject} if expect_last is None else {"seq": expect_last + 1}
        found = await self._stored(self._topology.stream_of(subject).name, selector)
        return found.seq if found is not None and found.headers().get(HEADER_ID) == message_id else None

    async def read(self, stream: str, *, after: int, subject: str | None = None) -> AsyncGenerator[Message]:
        name = self._name(self._topology.readable(stream).name)
        position = after
        checked = False
        while True:
            if subject is None or not checked:
                await self._require(stream, position + 1)
                checked = True
            session = await opened(self._connection, name, after=position, subject=subject)
            try:
                while (message := await session.next()) is not None:
                    if subject is None and message.sequence != position + 1:
                        await self._require(stream, position + 1)
                        await self._require_gone(stream, position + 1, message.sequence)
                        logger.warning("event=messages_lost stream=%s first=%d last=%d", name, position + 1, message.sequence - 1)
                    position = message.sequence
                    yield _read(message)
            except Interrupted as error:
                logger.debug("event=bus_read_interrupted stream=%s position=%d error=%s", name, position, error)
            finally:
                await session.close()

    async def _require(self, stream: str, needed: int) -> None:
        """Raise LogTruncated when the stream begins after `needed`."""
        first = (await self.state(stream)).first
        if first > needed:
            raise truncated(stream, needed, first)

    async def _require_gone(self, stream: str, sequence: int, given: int) -> None:
        """Raise BusError when a message that a reader was not given, from `sequence` to below `given`, is there."""
        found = await self._stored(stream, {"seq": sequence, "next_by_subj": ">"})
        if found is not None and found.seq < given:
            raise BusError(
                f"expected message {found.seq} of stream {stream} next, got a later one, and it is there",
                hint="nothing was lost: start the worker again",
                stream=stream,
            )

    async def fetch(self, stream: str, sequence: int) -> Message:
        message = await self._get(stream, {"seq": sequence}) if sequence >= 1 else None
        if message is None:
            raise NotFound(f"expected message {sequence} of stream {stream}, got none", stream=stream, sequence=sequence)
        return message

    async def first_from(self, stream: str, sequence: int, *, subject: str | None = None) -> Message | None:
        return await self._get(stream, {"seq": max(1, sequence), "next_by_subj": subject or ">"})

    async def _get(self, stream: str, selector: Mapping[str, object]) -> Message | None:
        name = self._name(self._topology.spec(stream).name)
        # The message as it is, which spares the server its encoding.
        answer = await self._connection.request(f"{self._connection.api}.DIRECT.GET.{name}", selector)
        if (message := stored(name, answer.data, answer.headers)) is not None:
            return _read(message)
        # Direct answers may come from a replica that lags; the stream's leader knows.
        single = await self._stored(stream, selector)
        return None if single is None else _message(single)

    async def last(self, subject: str) -> Message | None:
        found = await self._stored(self._topology.stream_of(subject).name, {"last_by_subj": subject})
        return None if found is None else _message(found)

    async def _stored(self, stream: str, selector: Mapping[str, object]) -> StoredMessage | None:
        answer = await self._connection.request(f"{self._connection.api}.STREAM.MSG.GET.{self._name(stream)}", selector)
        reply = decode(answer.data, StoredMessageReply)
        if reply.error is not None and reply.error.err_code not in (10037, 10043):
            raise error_of(reply.error, doing=f"fetch from {stream}")
        return reply.message

    async def claim(self, source: str, *, max: int, wait_s: float, stream: str = subjects.TASKS) -> Sequence[JetStreamLease]:
        subject = self._topology.claimed_subject(stream, source)
        return await self._queues[stream].claim(subject, source, max=max, wait_s=wait_s)

    async def state(self, stream: str) -> StreamState:
        info = await admin.info(self._connection, self._name(self._topology.spec(stream).name))
        state = info.state
        first = state.first_seq if state.messages else state.last_seq + 1
        return StreamState(info.created, first, state.last_seq, state.bytes, state.messages, info.config.get("max_bytes", -1))

    async def clock_s(self) -> float | None:
        """Unix seconds by the server's clock; None where it does not say (before version 2.10)."""
        reply = await admin.info(self._connection, self._name(subjects.SAMPLES))
        return unix_seconds(reply.ts) if reply.ts else None

    async def trim(self, stream: str, *, through: int) -> None:
        # A purge beyond the end would move the end, and one from sequence 0 would remove everything.
        through = min(through, (await self.state(stream)).last)
        if through >= 1:
            await admin.purge(self._connection, self._name(stream), {"seq": through + 1})

    async def remove(self) -> None:
        """Delete the run's streams, keys and blobs from the server."""
        await admin.delete(self._connection, self._topology, self._config)

    async def close(self) -> None:
        await self._outbox.close()
        await self._connection.close()

    def _name(self, stream: str) -> str:
        return stream_name(self._topology.run, stream)


def _message(found: StoredMessage) -> Message:
    return Message(found.subject, found.seq, found.data, own_headers(found.headers()), unix_seconds(found.time))


def _read(message: Stored) -> Message:
    return Message(message.subject, message.sequence, message.data, own_headers(message.headers), message.time_s)
