"""A message body to samples: the checking and reading half of `streamrl.schemas.columns`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache

import numpy as np
import pyarrow as pa

from streamrl.errors import SchemaError
from streamrl.schemas.arrow_messages import read_plain_batch
from streamrl.schemas.column_checks import all_well, optional_problem, shape_problem, value_problem
from streamrl.schemas.columns import (
    FORMER_NAME,
    OPTIONAL,
    SCHEMA_KEY,
    SCHEMA_NAME,
    arrow_schema,
    canonical,
    former_schema,
    schema_bytes,
    with_columns,
)
from streamrl.schemas.sample_batch import SampleBatch

_LONGEST_SCHEMA = 1 << 16
_UNREADABLE = (pa.ArrowException, StopIteration, EOFError, OSError, ValueError, OverflowError, MemoryError)


def decode_together(bodies: Sequence[bytes | memoryview]) -> Sequence[SampleBatch] | None:
    """What `decode_samples` gives for each of several small messages, for a third of the time; their tokens are copied once.

    None when anything at all is wrong with one of them, or is unusual: decode them one by one then.
    """
    try:
        batches = [_open(body, "") for body in bodies]
        joined = pa.concat_batches(_alike(batches))
        starts = np.cumsum([0] + [batch.num_rows for batch in batches[:-1]])
        columns = joined.columns
        if not all(batch.num_rows for batch in batches) or any(_has_nulls(columns[index], is_list) for index, _, is_list in _never_null()):
            return None
        whole = SampleBatch(joined, columns, sum(map(len, bodies)))
        return whole.parts(starts, [len(body) for body in bodies]) if all_well(whole, starts) else None
    except (SchemaError, *_UNREADABLE):
        return None


def decode_samples(body: bytes | memoryview, *, where: str = "") -> SampleBatch:
    """Check and open one message body without copying its tokens.

    Raises:
        SchemaError: not Arrow, a foreign or newer schema, columns that do not fit together, log-probs that are not finite or above 0,
            a loss mask on a token that nothing predicts. The message names `where` the bytes came from.
    """
    place = f" at {where}" if where else ""
    try:
        batch = _open(body, place)
    except _UNREADABLE as error:
        raise SchemaError(f"expected an Arrow stream of {SCHEMA_NAME}{place}, got {len(body)} bytes that are none: {error}") from error
    if batch.num_rows == 0:
        raise SchemaError(f"expected at least one row of {SCHEMA_NAME}{place}, got none")
    columns = batch.columns
    nulls = [name for index, name, is_list in _never_null() if _has_nulls(columns[index], is_list)]
    if nulls:
        raise SchemaError(f"expected no nulls in {nulls}{place}")
    decoded = SampleBatch(batch, columns, len(body))
    problem = shape_problem(decoded) or value_problem(decoded) or optional_problem(decoded)
    if problem:
        raise SchemaError(f"{problem}{place}", hint="the producer built this sample wrongly; see streamrl.producers.episode")
    return decoded


def _open(body: bytes | memoryview, place: str) -> pa.RecordBatch:
    """The valid record batch of a message, with our columns: those that every message has, and the optional ones that hold something."""
    data = pa.py_buffer(body)
    head = _head(body)
    known = _known_schema(head)
    if known is not None:  # as our own encoder writes it: the schema need not be read
        batch = read_plain_batch(pa.ipc.read_message(data.slice(len(head))), known, place=place)
        batch.validate(full=True)
        return canonical(batch)
    source = pa.BufferReader(data)
    schema = pa.ipc.read_schema(source)
    name = (schema.metadata or {}).get(SCHEMA_KEY, b"").decode(errors="replace")
    if name not in (SCHEMA_NAME, FORMER_NAME):
        raise SchemaError(
            f"expected sample schema {SCHEMA_NAME}{place}, got {name or 'Arrow data without a schema name'}",
            hint="producer and trainer must run the same major version of streamrl",
        )
    return _with_our_columns(read_plain_batch(pa.ipc.read_message(source), schema, place=place), place)


def _head(body: bytes | memoryview) -> bytes:
    """A message's beginning up to the end of its schema, if that is no longer than ours may be.

    An Arrow IPC stream begins with ff ff ff ff, the length of the schema in four bytes, and the schema.
    """
    length = 8 + int.from_bytes(body[4:8], "little")
    return bytes(body[:length]) if length <= _LONGEST_SCHEMA else b""


@lru_cache(maxsize=64)
def _known_schema(head: bytes) -> pa.Schema | None:
    """The schema that our own encoder, of this version or an earlier one, writes as these bytes."""
    if head == former_schema().serialize().to_pybytes():
        return former_schema()
    try:
        names = pa.ipc.read_schema(pa.py_buffer(head)).names if head else []
    except _UNREADABLE:
        return None
    optional = [name for name in OPTIONAL if name in names]
    return arrow_schema(*optional) if head == schema_bytes(*optional) else None


def _alike(batches: Sequence[pa.RecordBatch]) -> Sequence[pa.RecordBatch]:
    """The batches with the same optional columns: what one lacks is null."""
    first = batches[0].schema
    if all([batch.schema.equals(first) for batch in batches]):
        return batches
    there = {name for batch in batches for name in batch.schema.names}
    schema = arrow_schema(*(name for name in OPTIONAL if name in there))
    return [with_columns(batch, schema) for batch in batches]


@cache
def _never_null() -> tuple[tuple[int, str, bool], ...]:
    """Position and name of each column that may hold no null, and whether it holds lists, which may hold none either."""
    fields = enumerate(arrow_schema())
    return tuple((index, field.name, pa.types.is_list(field.type)) for index, field in fields if not field.nullable)


def _has_nulls(column: pa.Array, is_list: bool) -> bool:
    return bool(column.null_count or (is_list and column.values.null_count))


def _with_our_columns(batch: pa.RecordBatch, place: str) -> pa.RecordBatch:
    """A batch of the same major version may have more nullable columns than ours, or lack nullable ones; nothing else."""
    ours, theirs = arrow_schema(*OPTIONAL), batch.schema
    if len(set(theirs.names)) != len(theirs.names):
        raise SchemaError(f"expected columns of different names{place}, got {theirs.names}")
    wrong = [
        field.name
        for field in ours
        if (field.name not in theirs.names and not field.nullable)
        or (field.name in theirs.names and not theirs.field(field.name).equals(field))
    ]
    if wrong:
        raise SchemaError(f"expected the columns of {SCHEMA_NAME}{place}, these are missing or of another type: {wrong}")
    new = [field.name for field in theirs if field.name not in ours.names and not field.nullable]
    if new:
        raise SchemaError(f"expected added columns of {SCHEMA_NAME} to be nullable{place}, these are not: {new}")
    # Only what is kept is looked through, and only a number of rows that it really has is made room for.
    known = batch.select([field.name for field in ours if field.name in theirs.names])
    known.validate(full=True)
    return canonical(with_columns(known, ours))
