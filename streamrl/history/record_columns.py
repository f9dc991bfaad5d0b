"""The tables of a recording: their Arrow schemas, and one message to one row.

| file             | a row is                      | exact bytes                                                                     |
|------------------|-------------------------------|---------------------------------------------------------------------------------|
| samples.parquet  | a sample of `samples/2`       | its columns, with the message's sequence and subject in front                   |
| messages.parquet | a message of the stream       | `body`, unless it is samples: then `num_samples` rows of samples.parquet are it |
| ledger.parquet   | a ledger entry                | `body`                                                                          |
| events.parquet   | a lifecycle event             | `body`                                                                          |
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import pyarrow as pa

from streamrl.bus.protocol import Message
from streamrl.core.records import Record, Rollouts
from streamrl.errors import SchemaError
from streamrl.schemas.codec import decode
from streamrl.schemas.columns import OPTIONAL, arrow_schema, with_columns
from streamrl.schemas.events import Event
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.sample_batch import SampleBatch
from streamrl.schemas.subjects import kind_of

_IDENTITY = [("sequence", pa.int64()), ("subject", pa.utf8()), ("time_s", pa.float64())]


@cache
def samples_schema() -> pa.Schema:
    """Sequence, subject, then all columns of `samples/2`, the optional ones too; the wire schema's metadata are kept."""
    wire = arrow_schema(*OPTIONAL)
    return pa.schema([pa.field("sequence", pa.int64()), pa.field("subject", pa.utf8()), *wire], metadata=wire.metadata)


@cache
def messages_schema() -> pa.Schema:
    """One row per message of the sample stream; columns that a kind has no value for are null."""
    columns = [
        *_IDENTITY,
        ("kind", pa.utf8()),
        ("headers", pa.map_(pa.utf8(), pa.utf8())),
        ("num_samples", pa.int32()),
        ("task", pa.int64()),
        ("rollout", pa.int32()),
        ("reason", pa.utf8()),
        ("detail", pa.utf8()),
        ("reward", pa.float64()),
        ("revision", pa.int32()),
        ("name", pa.utf8()),
        ("body", pa.binary()),
    ]
    return pa.schema(columns)


@cache
def ledger_schema() -> pa.Schema:
    """One row per entry, of every trainer."""
    drop = pa.struct([("sequence", pa.int64()), ("task", pa.int64()), ("rollouts", pa.list_(pa.int32())), ("reason", pa.utf8())])
    columns = [
        *_IDENTITY,
        ("trainer", pa.utf8()),
        ("epoch", pa.int32()),
        ("number", pa.int64()),
        ("source", pa.utf8()),
        ("tasks", pa.list_(pa.int64())),
        ("staleness", pa.list_(pa.int64())),
        ("drops", pa.list_(drop)),
        ("cursor", pa.int64()),
        ("granted", pa.int64()),
        ("retired", pa.int64()),
        ("warm", pa.bool_()),
        ("digest", pa.utf8()),
        ("fingerprint", pa.utf8()),
        ("num_samples", pa.int64()),
        ("num_tokens", pa.int64()),
        ("metrics", pa.map_(pa.utf8(), pa.float64())),
        ("body", pa.binary()),
    ]
    return pa.schema(columns)


@cache
def events_schema() -> pa.Schema:
    """One row per event."""
    return pa.schema([*_IDENTITY, ("kind", pa.utf8()), ("worker", pa.utf8()), ("detail", pa.utf8()), ("body", pa.binary())])


def sample_rows(message: Message, samples: SampleBatch) -> pa.RecordBatch:
    """The rows of samples.parquet that one message gives."""
    count = samples.num_rows
    front = [pa.array([message.sequence] * count, pa.int64()), pa.array([message.subject] * count, pa.utf8())]
    columns = with_columns(samples.batch, arrow_schema(*OPTIONAL)).columns
    return pa.RecordBatch.from_arrays([*front, *columns], schema=samples_schema())


def message_row(message: Message, record: Record, samples: SampleBatch | None) -> dict[str, Any]:
    """The row of messages.parquet: what the fold makes of the message, and its bytes unless its samples are rows of their own."""
    known = msgspec.structs.asdict(record)
    row = {name: known.get(name) for name in ("task", "rollout", "reason", "detail", "reward", "revision", "name")}
    return row | {
        **_identity(message),
        "kind": "unreadable" if type(record).__name__ == "Poison" else kind_of(message.subject),
        "headers": list(message.headers.items()),
        "num_samples": samples.num_rows if isinstance(record, Rollouts) and samples is not None else 0,
        "body": None if samples is not None else bytes(message.body),
    }


def ledger_row(message: Message, entry: LedgerEntry) -> dict[str, Any]:
    """The row of ledger.parquet. `entry` is the message's, with its drops in it also when they were spilled."""
    same = ("trainer", "source", "cursor", "granted", "retired", "warm", "digest", "fingerprint", "num_samples", "num_tokens")
    return {
        **_identity(message),
        **{name: getattr(entry, name) for name in same},
        "epoch": entry.version.epoch,
        "number": entry.version.number,
        "tasks": [group.task for group in entry.used],
        "staleness": list(entry.staleness),
        "drops": [{"sequence": d.sequence, "task": d.task, "rollouts": list(d.rollouts), "reason": d.reason} for d in entry.drops],
        "metrics": list(entry.metrics.items()),
        "body": bytes(message.body),
    }


def event_row(message: Message) -> dict[str, Any]:
    """The row of events.parquet; an event that cannot be read keeps its bytes only."""
    row = {**_identity(message), "kind": None, "worker": None, "detail": None, "body": bytes(message.body)}
    try:
        event = decode(message.body, Event)
    except SchemaError:
        return row
    return row | {"kind": event.kind, "worker": event.worker, "detail": msgspec.json.encode(event.detail).decode()}


def _identity(message: Message) -> dict[str, Any]:
    return {"sequence": message.sequence, "subject": message.subject, "time_s": message.time_s}
