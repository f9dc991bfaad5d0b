"""What would be expanded while it is read is refused before, and metadata that lies is only an error."""

from __future__ import annotations

import contextlib

import numpy as np
import pyarrow as pa
import pytest

from streamrl.errors import SchemaError
from streamrl.schemas.columns import arrow_schema
from streamrl.schemas.decoding import decode_samples, decode_together
from streamrl.schemas.encoding import encode_samples
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


@pytest.mark.parametrize("codec", [*CODECS, None])
def test_only_compression_is_what_is_refused(codec: str | None) -> None:
    body = written(sample_rows(), codec)
    if codec is None:
        assert decode_samples(body).num_rows == sample_rows().num_rows
    else:
        with pytest.raises(SchemaError):
            decode_samples(body)


def test_a_second_schema_in_place_of_the_batch_is_refused() -> None:
    beginning = arrow_schema().serialize().to_pybytes()
    for body in (beginning, beginning + beginning, beginning + b"\xff\xff\xff\xff\x00\x00\x00\x00"):
        with pytest.raises(SchemaError):
            decode_samples(body)


def test_a_dictionary_before_the_batch_is_refused() -> None:
    table = sample_rows()
    words = pa.DictionaryArray.from_arrays(pa.array([0] * table.num_rows), pa.array(["w" * 1000]))
    with pytest.raises(SchemaError):
        decode_samples(written(added(table, "words", words)))


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
