"""Bytes written by earlier builds are read for ever; see `tests/golden/generate.py`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest

from streamrl.schemas.codec import decode, encode
from streamrl.schemas.columns import OPTIONAL, arrow_schema, former_schema
from streamrl.schemas.control import Grant
from streamrl.schemas.decoding import decode_samples, decode_together
from streamrl.schemas.encoding import encode_samples
from streamrl.schemas.samples import Sample
from tests.golden.generate import records
from tests.support.golden_rows import (
    agents_samples,
    claimed_samples,
    former_samples,
    graded_samples,
    image_samples,
    sampled_samples,
    samples,
)
from tests.support.rows import plain

AGENTS = ("agent", "agent_reward")
IMAGES = ("image_sha256", "image_media_type", "image_num_bytes")
CANDIDATES = ("candidates",)
LATER = ("issued_s", "began_s", "deliveries", "sampling", *AGENTS, "grading", *IMAGES, *CANDIDATES)
"""Columns that `samples/2` did not have at first."""
ROWS: dict[str, Callable[[], list[Sample]]] = {
    "samples-2": samples,
    "samples-2-claimed": claimed_samples,
    "samples-2-sampling": sampled_samples,
    "samples-2-agents": agents_samples,
    "samples-2-grading": graded_samples,
    "samples-2-images": image_samples,
}
GOLDEN = Path(__file__).parent.parent / "golden"


@pytest.mark.parametrize("name", sorted(records()))
def test_messagepack_reads_and_writes_the_golden_bytes(name: str) -> None:
    expected, data = records()[name], (GOLDEN / f"{name}.bin").read_bytes()
    assert decode(data, type(expected)) == expected
    assert encode(expected) == data


@pytest.mark.parametrize("name", sorted(records()))
def test_fields_are_named_on_the_wire_and_unknown_ones_are_ignored(name: str) -> None:
    expected, data = records()[name], (GOLDEN / f"{name}.bin").read_bytes()
    named = msgspec.msgpack.decode(data)
    given = {field for field in expected.__struct_fields__ if getattr(expected, field) is not msgspec.UNSET}
    assert given <= set(named)
    assert decode(msgspec.msgpack.encode(named | {"added_later": [1, 2]}), type(expected)) == expected


def test_fields_that_are_missing_take_their_defaults() -> None:
    assert decode(msgspec.msgpack.encode({"granted": 4, "version": 1, "retired": 2}), Grant) == Grant(4, 1, 2, 0)


def test_arrow_reads_the_golden_bytes() -> None:
    data = (GOLDEN / "samples-1.bin").read_bytes()
    assert [plain(row) for row in decode_samples(data).rows()] == [plain(row) for row in former_samples()]
    with pa.ipc.open_stream(data) as reader:
        assert reader.schema.equals(former_schema(), check_metadata=True)
    data = (GOLDEN / "samples-2.bin").read_bytes()
    assert [plain(row) for row in decode_samples(data).rows()] == [plain(row) for row in samples()]
    with pa.ipc.open_stream(data) as reader:
        assert reader.schema.equals(arrow_schema(*(name for name in OPTIONAL if name not in LATER)), check_metadata=True)
    data = (GOLDEN / "samples-2-claimed.bin").read_bytes()
    assert [plain(row) for row in decode_samples(data).rows()] == [plain(row) for row in claimed_samples()]
    with pa.ipc.open_stream(data) as reader:
        younger = ("sampling", *AGENTS, "grading", *IMAGES, *CANDIDATES)
        assert reader.schema.equals(arrow_schema(*(name for name in OPTIONAL if name not in younger)), check_metadata=True)
    data = (GOLDEN / "samples-2-sampling.bin").read_bytes()
    assert [plain(row) for row in decode_samples(data).rows()] == [plain(row) for row in sampled_samples()]
    with pa.ipc.open_stream(data) as reader:
        assert reader.schema.equals(
            arrow_schema(*(name for name in OPTIONAL if name not in (*AGENTS, "grading", *IMAGES, *CANDIDATES))), check_metadata=True
        )
    data = (GOLDEN / "samples-2-agents.bin").read_bytes()
    assert [plain(row) for row in decode_samples(data).rows()] == [plain(row) for row in agents_samples()]
    with pa.ipc.open_stream(data) as reader:
        assert reader.schema.equals(
            arrow_schema(*(name for name in OPTIONAL if name not in ("grading", *IMAGES, *CANDIDATES))), check_metadata=True
        )
    data = (GOLDEN / "samples-2-grading.bin").read_bytes()
    assert [plain(row) for row in decode_samples(data).rows()] == [plain(row) for row in graded_samples()]
    with pa.ipc.open_stream(data) as reader:
        assert reader.schema.equals(
            arrow_schema(*(name for name in OPTIONAL if name not in (*AGENTS, *IMAGES, *CANDIDATES))), check_metadata=True
        )


@pytest.mark.parametrize("name", ROWS)
def test_arrow_writes_the_golden_bytes(name: str) -> None:
    assert encode_samples(ROWS[name]()) == (GOLDEN / f"{name}.bin").read_bytes()


def test_old_and_new_golden_bytes_are_decoded_together() -> None:
    old = (GOLDEN / "samples-1.bin").read_bytes()
    bodies = [old, encode_samples(former_samples()[1:]), encode_samples(samples()[:1])]
    found = decode_together(bodies)
    assert found is not None
    for body, together in zip(bodies, found, strict=True):
        assert [plain(row) for row in together.rows()] == [plain(row) for row in decode_samples(body).rows()]
        assert together.batch.equals(decode_samples(body).batch, check_metadata=True)


def test_every_golden_file_has_its_record() -> None:
    assert {path.stem for path in GOLDEN.glob("*.bin")} == {*records(), "samples-1", *ROWS}
