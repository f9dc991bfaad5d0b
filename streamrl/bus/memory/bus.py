"""The bus of one run in process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence

from streamrl.bus.memory.blobs import MemoryBlobs
from streamrl.bus.memory.keys import MemoryKeys
from streamrl.bus.memory.log import Log
from streamrl.bus.memory.queue import MemoryLease, TaskQueue
from streamrl.bus.protocol import Message, Receipt, StreamState
from streamrl.bus.topology import MAX_PAYLOAD_BYTES, Topology, check_headers, check_size, message_bytes, sample_bucket, truncated
from streamrl.config.tree import BusConfig
from streamrl.errors import NotFound
from streamrl.schemas import subjects


class MemoryBus:
    """See `streamrl.bus.protocol.Bus`. One instance is shared by all that would connect to the same run; one event loop.

    Args:
        run: run id.
        config: byte budgets and the ack wait.
    """

    def __init__(self, run: str, config: BusConfig | None = None) -> None:
        chosen = config or BusConfig()
        self._topology = Topology.of(run, chosen)
        self._logs = {name: Log(spec) for name, spec in self._topology.streams.items()}
        queues = [spec.name for spec in self._topology.streams.values() if spec.queue]
        self._queues = {name: TaskQueue(self._logs[name], chosen.ack_wait_s) for name in queues}
        self._keys = MemoryKeys()
        self._blobs = MemoryBlobs(run, chosen.blobs_bytes)
        self._sample_blobs = MemoryBlobs(sample_bucket(run), chosen.sample_blobs_bytes, "bus.sample_blobs_bytes")
        self._turns = MemoryKeys(chosen.turns_bytes)

    @property
    def kv(self) -> MemoryKeys:
        return self._keys

    @property
    def blobs(self) -> MemoryBlobs:
        return self._blobs

    @property
    def sample_blobs(self) -> MemoryBlobs:
        return self._sample_blobs

    @property
    def turns(self) -> MemoryKeys:
        return self._turns

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
        log = self._logs[self._topology.stream_of(subject).name]
        check_headers(headers)
        check_size(subject, message_bytes(body, headers or {}), MAX_PAYLOAD_BYTES)
        receipt = log.append(subject, body, id=id, headers=headers, expect_last=expect_last, expect_subject_last=expect_subject_last)
        await log.notify()
        return receipt

    async def read(self, stream: str, *, after: int, subject: str | None = None) -> AsyncIterator[Message]:
        log = self._logs[self._topology.readable(stream).name]
        position = after
        if log.first > position + 1:
            raise truncated(stream, position + 1, log.first)
        while True:
            while position < log.last:
                message = log.get(position + 1)
                if message is None and subject is None and log.first > position + 1:
                    raise truncated(stream, position + 1, log.first)
                position += 1
                if message is not None and subject in (None, message.subject):
                    yield message
            await log.wait_beyond(position)

    async def fetch(self, stream: str, sequence: int) -> Message:
        message = self._logs[self._topology.spec(stream).name].get(sequence)
        if message is None:
            raise NotFound(f"expected message {sequence} of stream {stream}, got none", stream=stream, sequence=sequence)
        return message

    async def first_from(self, stream: str, sequence: int, *, subject: str | None = None) -> Message | None:
        log = self._logs[self._topology.spec(stream).name]
        for number in range(max(sequence, log.first), log.last + 1):
            message = log.get(number)
            if message is not None and subject in (None, message.subject):
                return message
        return None

    async def last(self, subject: str) -> Message | None:
        return self._logs[self._topology.stream_of(subject).name].newest(subject)

    async def claim(self, source: str, *, max: int, wait_s: float, stream: str = subjects.TASKS) -> Sequence[MemoryLease]:
        subject = self._topology.claimed_subject(stream, source)
        return await self._queues[stream].claim(subject, max=max, wait_s=wait_s)

    async def state(self, stream: str) -> StreamState:
        return self._logs[self._topology.spec(stream).name].state()

    async def trim(self, stream: str, *, through: int) -> None:
        self._logs[self._topology.spec(stream).name].trim(through)

    def lose(self, stream: str, *sequences: int, known_end: bool = False) -> None:
        """Messages are gone, as after a power cut; where they were the last ones, their sequences are given again.

        With `known_end` they are not: nats-server keeps the end of a stream in a file of its own, which may be newer than what is left.
        """
        self._logs[self._topology.spec(stream).name].lose(sequences, known_end=known_end)

    async def close(self) -> None:
        self._keys.close()
