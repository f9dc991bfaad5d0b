"""Read every stored message of a run from the server with plain nats-py."""

import base64
import contextlib
import json
from dataclasses import dataclass, field
from pathlib import Path

import nats
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from tests.support.audit.msgpack import unpack

FETCH = 64
FETCH_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Stored:
    """One message as the server has it."""

    sequence: int
    subject: str
    body: bytes
    headers: dict[str, str]
    time_s: float
    """Unix seconds of the server's clock."""


@dataclass
class Stream:
    """One stream: its messages, and its first and last sequence (first = last + 1 when it is empty)."""

    first: int
    last: int
    discard: str
    messages: list[Stored] = field(default_factory=list)


@dataclass
class Raw:
    """A run's streams and keys."""

    run: str
    tasks: Stream
    samples: Stream
    ledger: Stream
    weights: Stream
    dead: Stream
    keys: dict[str, Stored]
    """The newest value of each live key, read before the ledger; `sequence` is its revision. `granted` was read after the queue."""
    later: dict[str, Stored]
    """The same keys, read after the samples."""
    blobs: dict[str, bytes] = field(default_factory=dict)
    """Blobs that the ledger's entries name, by name; one that is not there is left out."""
    carried: list[Stored] = field(default_factory=list)
    """Messages of the sample stream that the newest checkpoints carry, so that they may have been trimmed."""


async def read_run(url: str, user: str, password: str, run: str, directory: Path | None = None) -> Raw:
    """Everything an audit needs; `directory` is the run's, whose checkpoints may carry messages."""
    client = await nats.connect(url, user=user or None, password=password or None, allow_reconnect=False)
    try:
        jetstream = client.jetstream(timeout=10)
        weights = await _stream(jetstream, f"{run}-weights")
        keys = await _keys(jetstream, run)
        ledger = await _stream(jetstream, f"{run}-ledger")
        tasks = await _queue(jetstream, f"{run}-tasks")
        granted = (await _keys(jetstream, run)).get("granted")
        samples = await _stream(jetstream, f"{run}-samples")
        later = await _keys(jetstream, run)
        dead = await _stream(jetstream, f"{run}-dead")
        blobs = await _blobs(jetstream, run, ledger)
    finally:
        await _close(client)
    if granted is not None:
        keys["granted"] = granted
    carried = _carried(directory, [*keys.items(), *later.items()]) if directory is not None else []
    return Raw(run, tasks, samples, ledger, weights, dead, keys, later, blobs, carried)


def _carried(directory: Path, keys: list[tuple[str, Stored]]) -> list[Stored]:
    files = {directory / unpack(key.body)["path"] / "carried.msgpack" for name, key in keys if name.startswith("latest/")}
    found = [message for file in files if file.exists() for message in unpack(file.read_bytes())]
    return [Stored(m["sequence"], m["subject"], m["body"], m["headers"], m["time_s"]) for m in found]


async def _close(client: Client) -> None:
    with contextlib.suppress(nats.errors.Error):
        await client.close()


async def _bounds(jetstream: JetStreamContext, name: str) -> Stream:
    info = await jetstream.stream_info(name)
    state = info.state
    first = state.first_seq if state.messages else state.last_seq + 1
    return Stream(first, state.last_seq, str(info.config.discard))


async def _stream(jetstream: JetStreamContext, name: str) -> Stream:
    """All messages up to the stream's present end; what is trimmed meanwhile is left out."""
    found = await _bounds(jetstream, name)
    messages = await _read(jetstream, name)
    found.first = (await _bounds(jetstream, name)).first
    found.messages = [message for message in messages if found.first <= message.sequence <= found.last]
    found.first = min(found.first, found.last + 1)
    return found


async def _read(jetstream: JetStreamContext, name: str, subject: str | None = None) -> list[Stored]:
    config = ConsumerConfig(
        ack_policy=AckPolicy.NONE, deliver_policy=DeliverPolicy.ALL, mem_storage=True, inactive_threshold=30.0, filter_subject=subject
    )
    consumer = await jetstream.add_consumer(name, config)
    subscription = await jetstream.pull_subscribe_bind(consumer=consumer.name, stream=name)
    messages: list[Stored] = []
    left = consumer.num_pending or 0
    while left > 0:
        try:
            batch = await subscription.fetch(min(FETCH, left), timeout=FETCH_TIMEOUT_S)
        except nats.errors.TimeoutError:
            # What was waiting has been trimmed or replaced.
            left = (await subscription.consumer_info()).num_pending or 0
            continue
        for message in batch:
            facts = message.metadata
            headers = dict(message.headers or {})
            messages.append(Stored(facts.sequence.stream, message.subject, message.data, headers, facts.timestamp.timestamp()))
            left = facts.num_pending
    await subscription.unsubscribe()
    await jetstream.delete_consumer(name, consumer.name)
    return messages


async def _queue(jetstream: JetStreamContext, name: str) -> Stream:
    """A work queue allows no second reader, so what is left of it is fetched one by one."""
    found = await _bounds(jetstream, name)
    sequence = found.first
    while sequence <= found.last:
        try:
            message = await jetstream.get_msg(name, sequence, subject=">", next=True)
        except nats.js.errors.NotFoundError:
            break
        assert message.seq is not None
        found.messages.append(Stored(message.seq, message.subject or "", message.data or b"", dict(message.headers or {}), 0.0))
        sequence = message.seq + 1
    return found


async def _blobs(jetstream: JetStreamContext, run: str, ledger: Stream) -> dict[str, bytes]:
    """Blobs that entries name: NATS's object-store layout, whose chunks may lie in any order and have their index in their message id."""
    found: dict[str, bytes] = {}
    for stored in ledger.messages:
        name = (unpack(stored.body).get("spilled") or {}).get("blob")
        if name is None:
            continue
        try:
            token = base64.urlsafe_b64encode(name.encode()).decode()
            described = await jetstream.get_last_msg(f"OBJ_{run}", f"$O.{run}.M.{token}")
        except nats.js.errors.NotFoundError:
            continue
        chunks = await _read(jetstream, f"OBJ_{run}", f"$O.{run}.C.{json.loads(described.data or b'')['nuid']}")
        chunks.sort(key=lambda chunk: int(chunk.headers["Nats-Msg-Id"].rpartition(".")[2]))
        found[name] = b"".join(chunk.body for chunk in chunks)
    return found


async def _keys(jetstream: JetStreamContext, run: str) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    for message in await _read(jetstream, f"KV_{run}"):
        key = message.subject.removeprefix(f"$KV.{run}.").replace(".", "/")
        if "KV-Operation" in message.headers or "Nats-Marker-Reason" in message.headers:
            found.pop(key, None)
        else:
            found[key] = message
    return found
