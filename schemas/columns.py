"""Samples on the wire: one Arrow IPC stream with one record batch per message; a row is a sample.

`streamrl.schemas.encoding` writes it, `streamrl.schemas.decoding` checks it and gives a `SampleBatch`: numpy views of the message's own
bytes, no token is copied.
Letters: `N` rows, `T` tokens of the whole message. Schema name and major version are in the schema's metadata; within a major
version columns may only be added, and must be nullable.

`samples/2` has columns that every message has, and `OPTIONAL` ones that are there only when a row has something in them: what is not
said costs nothing. `samples/1`, which is read for ever, has two of those in each message and none of the others.
"""

from __future__ import annotations

from functools import cache

import pyarrow as pa

SCHEMA_NAME = "samples/2"
FORMER_NAME = "samples/1"
TOKEN_BYTES = 9
"""What a token takes at least: its id, its log-prob and its place in the loss mask."""
SCHEMA_KEY = b"streamrl.schema"
_BLOB = pa.struct([("name", pa.utf8()), ("sha256", pa.utf8()), ("start_row", pa.int64()), ("num_rows", pa.int64())])
TURNS = {
    "start": pa.int32(),
    "length": pa.int32(),
    "inexact": pa.bool_(),
    "finish_reason": pa.utf8(),
    "engine": pa.utf8(),
    "asked_s": pa.float64(),
    "began_s": pa.float64(),
    "finished_s": pa.float64(),
    "sampling": pa.utf8(),
}
"""Fields of a `TurnSpan`; each is a column `turn_<field>` of lists, which are equally long in a row."""
IMAGES = {"sha256": pa.utf8(), "media_type": pa.utf8(), "num_bytes": pa.int64()}
"""Fields of an `Image`; each is a column `image_<field>` of lists, which are as long as `images` has rows."""
BLOBS = ("routed_experts", "candidates", "images")
"""Columns that name rows of a blob."""
OPTIONAL = {
    **{f"turn_{name}": pa.list_(kind) for name, kind in TURNS.items()},
    "branch_parent": pa.int32(),
    "branch_shared": pa.int32(),
    "routed_experts": _BLOB,
    "images": _BLOB,
    "claimed_s": pa.float64(),
    "scored_s": pa.float64(),
    "counters": pa.map_(pa.utf8(), pa.float64()),
    "issued_s": pa.float64(),
    "began_s": pa.float64(),
    "deliveries": pa.int32(),
    "sampling": pa.utf8(),
    "agent": pa.utf8(),
    "agent_reward": pa.float64(),
    "grading": pa.int64(),
    "candidates": _BLOB,
    **{f"image_{name}": pa.list_(kind) for name, kind in IMAGES.items()},
}
"""Columns of `samples/2` that a message has only when a row has something in them; null elsewhere."""
SCALARS = ("issued_s", "claimed_s", "deliveries", "began_s", "scored_s", "grading")
"""Those of them that hold one number a row."""


@cache
def arrow_schema(*optional: str) -> pa.Schema:
    """The Arrow schema of a `samples/2` message with these of the `OPTIONAL` columns, in their order."""
    fields = [
        pa.field("run", pa.utf8(), nullable=False),
        pa.field("policy", pa.utf8(), nullable=False),
        pa.field("source", pa.utf8(), nullable=False),
        pa.field("task", pa.int64(), nullable=False),
        pa.field("rollout", pa.int32(), nullable=False),
        pa.field("sample", pa.int32(), nullable=False),
        pa.field("group_size", pa.int32(), nullable=False),
        pa.field("num_samples", pa.int32(), nullable=False),
        pa.field("data_epoch", pa.int32(), nullable=False),
        pa.field("tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.uint8()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("span_length", pa.list_(pa.int32()), nullable=False),
        pa.field("span_epoch", pa.list_(pa.int32()), nullable=False),
        pa.field("span_number", pa.list_(pa.int64()), nullable=False),
        pa.field("logprob_mode", pa.utf8(), nullable=False),
        pa.field("reward", pa.float64()),
        pa.field("reward_parts", pa.map_(pa.utf8(), pa.float64())),
        pa.field("status", pa.utf8(), nullable=False),
        pa.field("finish_reason", pa.utf8(), nullable=False),
        pa.field("temperature", pa.float32(), nullable=False),
        pa.field("top_p", pa.float32(), nullable=False),
        pa.field("top_k", pa.int32(), nullable=False),
        pa.field("max_new_tokens", pa.int32(), nullable=False),
        pa.field("stop_token_ids", pa.list_(pa.int32())),
        pa.field("ignore_eos", pa.bool_()),
        pa.field("seed", pa.int64(), nullable=False),
        pa.field("label", pa.utf8()),
        pa.field("metadata", pa.utf8()),
        pa.field("engine", pa.utf8()),
        pa.field("producer", pa.utf8()),
        pa.field("started_s", pa.float64()),
        pa.field("finished_s", pa.float64()),
        *(pa.field(name, OPTIONAL[name]) for name in optional),
    ]
    return pa.schema(fields, metadata={SCHEMA_KEY: SCHEMA_NAME.encode()})


@cache
def former_schema() -> pa.Schema:
    """The Arrow schema of `samples/1`: its columns are among those of `samples/2`, whether a row has something in them or not."""
    return arrow_schema("routed_experts", "images").with_metadata({SCHEMA_KEY: FORMER_NAME.encode()})


@cache
def schema_bytes(*optional: str) -> bytes:
    """How a message with these `OPTIONAL` columns begins: the schema, as an Arrow IPC stream has it."""
    return arrow_schema(*optional).serialize().to_pybytes()


def canonical(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A batch of our columns as our own encoder would have laid it out: without the `OPTIONAL` columns that hold nothing."""
    base, names = len(arrow_schema()), batch.schema.names
    kept = [name for place, name in enumerate(names[base:], base) if batch.column(place).null_count < batch.num_rows]
    if len(kept) == len(names) - base and (batch.schema.metadata or {}).get(SCHEMA_KEY) == SCHEMA_NAME.encode():
        return batch  # making it anew takes longer than all checks
    columns = [*batch.columns[:base], *(batch.column(name) for name in kept)]
    return pa.RecordBatch.from_arrays(columns, schema=arrow_schema(*kept))


def with_columns(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The columns of `schema`, null where the batch has none of that name."""
    names = set(batch.schema.names)
    columns = [batch.column(field.name) if field.name in names else pa.nulls(batch.num_rows, field.type) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
