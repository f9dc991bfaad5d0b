"""Bytes that were cut, changed or never were a message are refused, or are a valid one; what would be expanded is refused before."""

import contextlib

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.errors import SchemaError
from streamrl.schemas.columns import arrow_schema
from streamrl.schemas.decoding import decode_samples, decode_together
from streamrl.schemas.encoding import encode_samples
from streamrl.schemas.sample_batch import SampleBatch
from streamrl.schemas.samples import TurnSpan
from tests.support.rows import sample

CODECS = ["zstd", "lz4"]


def sample_rows() -> pa.RecordBatch:
    with pa.ipc.open_stream(encode_samples([sample(0), sample(1)])) as reader:
        return reader.read_next_batch()


def written(table: pa.RecordBatch, codec: str | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
        writer.write_batch(table)
    return sink.getvalue().to_pybytes()


def added(table: pa.RecordBatch, name: str, column: pa.Array) -> pa.RecordBatch:
    schema = table.schema.append(pa.field(name, column.type)).with_metadata(table.schema.metadata)
    return pa.RecordBatch.from_arrays([*table.columns, column], schema=schema)


def long(table: pa.RecordBatch, tokens: int) -> pa.RecordBatch:
    """The first row with so many tokens, as a column of zeros that packs to nothing."""
    row = table.slice(0, 1)
    zeros = {"tokens": np.int32, "loss_mask": np.uint8, "logprobs": np.float32}
    offsets = pa.array([0, tokens], pa.int32())
    columns = [
        pa.ListArray.from_arrays(offsets, pa.array(np.zeros(tokens, zeros[field.name]))) if field.name in zeros else row.column(field.name)
        for field in row.schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=row.schema)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("foreign", [False, True])
def test_compressed_buffers_are_refused_before_they_are_expanded(codec: str, foreign: bool) -> None:
    table = sample_rows()
    table = added(table.slice(0, 1), "more", pa.array(["x"])) if foreign else long(table, 20_000_000)
    if foreign:
        table = added(table, "huge", pa.array(["0" * 180_000_000]))
    body = written(table, codec)
    assert len(body) < 2_000_000
    pool, usual = pa.proxy_memory_pool(pa.default_memory_pool()), pa.default_memory_pool()
    pa.set_memory_pool(pool)
    try:
        with pytest.raises(SchemaError):
            decode_samples(body)
        assert decode_together([body, body]) is None
        peak = pool.max_memory()
    finally:
        pa.set_memory_pool(usual)
    assert peak is not None
    assert peak < 10 * len(body)


def test_what_is_no_plain_batch_is_refused() -> None:
    table, beginning = sample_rows(), arrow_schema().serialize().to_pybytes()
    assert decode_samples(written(table)).num_rows == table.num_rows
    words = pa.DictionaryArray.from_arrays(pa.array([0] * table.num_rows), pa.array(["w" * 1000]))
    second_schemas = (beginning, beginning + beginning, beginning + b"\xff\xff\xff\xff\x00\x00\x00\x00")
    for body in (*(written(table, codec) for codec in CODECS), *second_schemas, written(added(table, "words", words))):
        with pytest.raises(SchemaError):
            decode_samples(body)


def test_more_rows_than_there_are_make_no_room_for_themselves() -> None:
    """A batch without the nullable columns gets them as nulls, as many as it has rows."""
    table = sample_rows().select([field.name for field in arrow_schema() if not field.nullable])
    assert decode_samples(written(table)).num_rows == table.num_rows
    body = bytearray(written(table))
    rows = table.num_rows.to_bytes(8, "little")
    place = len(arrow_schema().serialize())
    changed = 0
    while (place := body.find(rows, place)) != -1 and changed < 200:
        lying = bytearray(body)
        lying[place : place + 8] = (10**11).to_bytes(8, "little")
        changed += 1
        with contextlib.suppress(SchemaError):
            decode_samples(bytes(lying))
        place += 8
    assert changed > 3


def test_every_bit_of_the_metadata_may_be_wrong() -> None:
    body = written(sample_rows())
    first = len(arrow_schema().serialize())
    for place in range(first, first + 700):
        for value in (0, 0xFF, body[place] ^ 0x80):
            damaged = body[:place] + bytes([value]) + body[place + 1 :]
            with contextlib.suppress(SchemaError):
                decode_samples(damaged)


def opened(data: bytes) -> SampleBatch | None:
    """A valid batch, all of whose rows can be read, or None."""
    try:
        batch = decode_samples(data, where="here")
        batch.rows()
    except SchemaError as error:
        assert "here" in error.message or "JSON" in error.message
        return None
    assert len(batch.tokens) == len(batch.token_versions()) == len(batch.loss_mask) == len(batch.logprobs)
    return batch


def test_truncated_bytes() -> None:
    body = encode_samples([sample(0), sample(1)])
    assert [end for end in range(0, len(body) - 8, 37) if opened(body[:end]) is not None] == []


@given(data=st.binary(max_size=300))
def test_random_bytes(data: bytes) -> None:
    assert opened(data) is None


@given(seed=st.integers(0, 2**32), count=st.integers(1, 6))
@settings(max_examples=250, deadline=None)
def test_mutated_bytes_are_refused_or_valid(seed: int, count: int) -> None:
    said = {"turns": (TurnSpan(start=2, length=2, inexact=True, asked_s=1.0),), "counters": {"a": 1.0}} if seed % 2 else {}
    body = bytearray(encode_samples([sample(0), sample(1, label={"a": 1}, **said)]))
    random = np.random.default_rng(seed)
    for place in random.integers(0, len(body), count):
        body[place] = random.choice([0, 1, 127, 128, 255, body[place] ^ (1 << int(random.integers(8)))])
    opened(bytes(body))
    together = decode_together([encode_samples([sample(0)]), bytes(body)])
    if together is not None:
        alone, among_others = decode_samples(bytes(body)).batch, together[1].batch
        # Their text: a mutated time may be NaN, which equals nothing.
        assert repr(alone.to_pydict()) == repr(among_others.to_pydict()), "what passes among others passes by itself"
