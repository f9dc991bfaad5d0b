"""Streams on the server: names, settings, making them, their state."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from streamrl.bus.jetstream.connection import Connection
from streamrl.bus.jetstream.wire import ConsumerReply, Simple, StreamInfoReply, decode, error_of
from streamrl.bus.topology import (
    MEBIBYTE,
    StreamSpec,
    Topology,
    blobs_name,
    keys_name,
    sample_bucket,
    stored_subject,
    stream_name,
    turn_bucket,
)
from streamrl.config.tree import BusConfig
from streamrl.errors import NotFound
from streamrl.schemas.subjects import GRADING, MAIN_SOURCE, TASKS, WARMUP_SOURCE

logger = logging.getLogger(__name__)

_NANOSECONDS = 1_000_000_000
KEYS_BYTES = 64 * MEBIBYTE
MAX_WAITING = 4096
"""Claims that may wait at the server at the same time, for one source."""
_MENDED = ("num_replicas", "max_bytes", "republish", "allow_rollup_hdrs", "subject_delete_marker_ttl")
"""What is brought up to date in a stream that is there already; all else stays as it was made."""


def stream_config(topology: Topology, spec: StreamSpec, replicas: int) -> dict[str, Any]:
    """A stream as JetStream's API wants it."""
    return {
        "name": stream_name(topology.run, spec.name),
        "subjects": topology.subjects_of(spec),
        "retention": "workqueue" if spec.queue else "limits",
        "discard": "new" if spec.full == "refuse" else "old",
        "storage": "file",
        "num_replicas": replicas,
        "max_bytes": spec.max_bytes,
        "duplicate_window": int(spec.dedupe_s * _NANOSECONDS),
        "allow_direct": True,
        **({} if spec.queue else _repeated(stream_name(topology.run, spec.name))),
    }


def _repeated(stream: str) -> dict[str, Any]:
    """Repeat each message once it is stored, with its sequence: readers follow a stream without a consumer on it."""
    return {"republish": {"src": ">", "dest": stored_subject(stream)}}


def all_configs(topology: Topology, config: BusConfig) -> list[dict[str, Any]]:
    """Every stream of a run, those behind keys and blobs included."""
    run = topology.run
    plain: dict[str, Any] = {
        "retention": "limits",
        "discard": "new",
        "storage": "file",
        "num_replicas": config.replicas,
        "allow_direct": True,
        # A message with the header of a rollup removes others; the markers of expired keys would need it allowed.
        "allow_rollup_hdrs": False,
        "duplicate_window": 120 * _NANOSECONDS,
    }
    keyed: dict[str, Any] = {"max_msgs_per_subject": 1, "allow_msg_ttl": True}
    keys = plain | keyed | {"name": keys_name(run), "subjects": [f"$KV.{run}.>"], "max_bytes": KEYS_BYTES, **_repeated(keys_name(run))}
    # Nobody follows it: its entries are read when their task comes again, and never repeated to readers.
    bucket = turn_bucket(run)
    turns = plain | keyed | {"name": keys_name(bucket), "subjects": [f"$KV.{bucket}.>"], "max_bytes": config.turns_bytes}
    budgets = {run: config.blobs_bytes, sample_bucket(run): config.sample_blobs_bytes}
    blobs = [
        plain | {"name": blobs_name(bucket), "subjects": [f"$O.{bucket}.C.>", f"$O.{bucket}.M.>"], "max_bytes": size}
        for bucket, size in budgets.items()
    ]
    return [*(stream_config(topology, spec, config.replicas) for spec in topology.streams.values()), keys, turns, *blobs]


async def info(connection: Connection, name: str, request: dict[str, Any] | None = None) -> StreamInfoReply:
    """Describe a stream; raises NotFound when there is none of that name."""
    reply = decode((await connection.request(f"{connection.api}.STREAM.INFO.{name}", request or b"")).data, StreamInfoReply)
    if reply.error is not None:
        raise error_of(reply.error, doing=f"look up stream {name}")
    return reply


async def create(connection: Connection, topology: Topology, config: BusConfig) -> None:
    """Make the streams that are missing and bring byte budgets up to date. May be called again, and by several at once.

    The consumers of the run's queues are made too: those who claim need no right to make any.
    """
    # Together: making one takes the server some 20 ms of waiting for the disk.
    await asyncio.gather(*(_ensure(connection, wanted) for wanted in all_configs(topology, config)))
    await asyncio.gather(
        *(
            ensure_consumer(
                connection, stream_name(topology.run, queue), source, topology.claimed_subject(queue, source), config.ack_wait_s
            )
            for queue, source in ((TASKS, MAIN_SOURCE), (TASKS, WARMUP_SOURCE), (GRADING, MAIN_SOURCE))
        )
    )


async def ensure_consumer(connection: Connection, stream: str, source: str, subject: str, ack_wait_s: float) -> None:
    """Make the durable consumer that the messages of one source in a queue are claimed from, or bring its ack wait up to date.

    Raises:
        Forbidden: it is missing or has another ack wait, and the credentials do not allow to make it.
    """
    ack_wait = int(ack_wait_s * _NANOSECONDS)
    known = decode((await connection.request(f"{connection.api}.CONSUMER.INFO.{stream}.{source}")).data, ConsumerReply)
    if known.error is None and known.config.get("ack_wait") == ack_wait:
        return
    config = {
        "durable_name": source,
        "name": source,
        "filter_subject": subject,
        "ack_policy": "explicit",
        "ack_wait": ack_wait,
        "max_ack_pending": -1,
        "max_waiting": MAX_WAITING,
    }
    answer = await connection.request(
        f"{connection.api}.CONSUMER.CREATE.{stream}.{source}.{subject}", {"stream_name": stream, "config": config}
    )
    reply = decode(answer.data, ConsumerReply)
    if reply.error is not None:
        raise error_of(reply.error, doing=f"make the consumer {source} of {stream}")


async def _ensure(connection: Connection, wanted: dict[str, Any]) -> None:
    name = wanted["name"]
    try:
        found = (await info(connection, name)).config
    except NotFound:
        await change(connection, "CREATE", wanted)
        logger.info("event=bus_stream_created stream=%s max_bytes=%d", name, wanted["max_bytes"])
        return
    current = {key: wanted.get(key) for key in _MENDED}
    current["num_replicas"] = max(current["num_replicas"], found.get("num_replicas", 1))  # an administrator may have raised it
    if any((found.get(key) or None) != (value or None) for key, value in current.items()):
        kept = {key: value for key, value in found.items() if key not in _MENDED}
        await change(connection, "UPDATE", kept | {key: value for key, value in current.items() if value is not None})
        logger.info("event=bus_stream_updated stream=%s max_bytes=%d was=%s", name, wanted["max_bytes"], found.get("max_bytes"))


async def change(connection: Connection, verb: str, config: dict[str, Any]) -> None:
    """Have the server CREATE or UPDATE (`verb`) a stream; raises BusError where it refuses."""
    name = config["name"]
    reply = decode((await connection.request(f"{connection.api}.STREAM.{verb}.{name}", config, timeout_s=30.0)).data, StreamInfoReply)
    if reply.error is not None:
        raise error_of(reply.error, doing=f"{verb.lower()} stream {name}")


async def purge(connection: Connection, name: str, request: dict[str, Any]) -> None:
    """Remove messages: `seq` keeps those from that sequence on, `filter` names a subject."""
    reply = decode((await connection.request(f"{connection.api}.STREAM.PURGE.{name}", request, timeout_s=30.0)).data, Simple)
    if reply.error is not None:
        raise error_of(reply.error, doing=f"purge stream {name}")


async def delete(connection: Connection, topology: Topology, config: BusConfig) -> None:
    """Delete all streams of a run with everything in them."""
    for stream in all_configs(topology, config):
        reply = decode((await connection.request(f"{connection.api}.STREAM.DELETE.{stream['name']}", timeout_s=30.0)).data, Simple)
        if reply.error is not None and reply.error.code != 404:
            raise error_of(reply.error, doing=f"delete stream {stream['name']}")
