"""Bytes and words of earlier builds are read for ever; see `tests/golden/generate.py`."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
from msgspec.structs import replace

from streamrl.monitor.decoded import LedgerLine
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.columns import OPTIONAL, arrow_schema, former_schema
from streamrl.schemas.control import Grant
from streamrl.schemas.decoding import decode_samples, decode_together
from streamrl.schemas.encoding import encode_samples
from streamrl.schemas.ledger import Decisive, Drop, LedgerEntry, SpilledDrops, decided_by
from streamrl.schemas.samples import Sample
from streamrl.schemas.versions import Version
from tests.golden.generate import records
from tests.support import golden_rows as golden
from tests.support.rows import plain

AGENTS, NEWEST = ("agent", "agent_reward"), ("image_sha256", "image_media_type", "image_num_bytes", "candidates")
LATER = ("issued_s", "began_s", "deliveries", "sampling", *AGENTS, "grading", *NEWEST)
"""Columns that `samples/2` did not have at first."""
ROWS: dict[str, tuple[Callable[[], list[Sample]], tuple[str, ...]]] = {
    "samples-2": (golden.samples, LATER),
    "samples-2-claimed": (golden.claimed_samples, LATER[3:]),
    "samples-2-sampling": (golden.sampled_samples, LATER[4:]),
    "samples-2-agents": (golden.agents_samples, LATER[6:]),
    "samples-2-grading": (golden.graded_samples, (*AGENTS, *NEWEST)),
    "samples-2-images": (golden.image_samples, ()),
}
"""Rows of each file, and the columns that its schema lacks; what a file uses of them is not asked of the last one."""
GOLDEN = Path(__file__).parent.parent / "golden"


@pytest.mark.parametrize("name", sorted(records()))
def test_messagepack_reads_and_writes_the_golden_bytes(name: str) -> None:
    """Fields are named on the wire, and unknown ones are ignored."""
    expected, data = records()[name], (GOLDEN / f"{name}.bin").read_bytes()
    assert decode(data, type(expected)) == expected
    assert encode(expected) == data
    named = msgspec.msgpack.decode(data)
    assert {field for field in expected.__struct_fields__ if getattr(expected, field) is not msgspec.UNSET} <= set(named)
    assert decode(msgspec.msgpack.encode(named | {"added_later": [1, 2]}), type(expected)) == expected


def schema_of(data: bytes) -> pa.Schema:
    with pa.ipc.open_stream(data) as reader:
        return reader.schema


def test_arrow_reads_and_writes_the_golden_bytes() -> None:
    former = (GOLDEN / "samples-1.bin").read_bytes()
    assert [plain(row) for row in decode_samples(former).rows()] == [plain(row) for row in golden.former_samples()]
    assert schema_of(former).equals(former_schema(), check_metadata=True)
    for name, (rows, lacks) in ROWS.items():
        data = (GOLDEN / f"{name}.bin").read_bytes()
        assert [plain(row) for row in decode_samples(data).rows()] == [plain(row) for row in rows()], name
        assert encode_samples(rows()) == data, name
        if lacks:
            assert schema_of(data).equals(arrow_schema(*(one for one in OPTIONAL if one not in lacks)), check_metadata=True), name


def test_old_and_new_golden_bytes_are_decoded_together() -> None:
    old = (GOLDEN / "samples-1.bin").read_bytes()
    bodies = [old, encode_samples(golden.former_samples()[1:]), encode_samples(golden.samples()[:1])]
    found = decode_together(bodies)
    assert found is not None
    for body, together in zip(bodies, found, strict=True):
        assert [plain(row) for row in together.rows()] == [plain(row) for row in decode_samples(body).rows()]
        assert together.batch.equals(decode_samples(body).batch, check_metadata=True)


def test_fields_that_are_missing_take_their_defaults_and_every_file_has_its_record() -> None:
    assert decode(msgspec.msgpack.encode({"granted": 4, "version": 1, "retired": 2}), Grant) == Grant(4, 1, 2, 0)
    assert {path.stem for path in GOLDEN.glob("*.bin")} == {*records(), "samples-1", *ROWS}


ENTRY = LedgerEntry(run="run", trainer="main", version=Version(0, 4), source="main", used=(), cursor=9, granted=4, retired=2)
EARLIER = {"train/answer_probability": 0.75, "rollout/raw_reward": 0.25}
CASES = {
    "new": ({"score": 0.5, "reward": -1.0}, {}, Decisive(0.5, -1.0)),
    "earlier": ({}, EARLIER, Decisive(0.75, 0.25)),
    "zero is a number": ({"score": 0.0, "reward": 0.0}, EARLIER, Decisive(0.0, 0.0)),
    "one of them": ({"reward": 0.5}, EARLIER, Decisive(0.75, 0.5)),
    "neither": ({}, {"train/loss": 0.5}, Decisive(0.0, None)),
}


@pytest.mark.parametrize("name", CASES)
def test_fields_come_before_metrics(name: str) -> None:
    fields, metrics, expected = CASES[name]
    entry = replace(ENTRY, metrics=metrics, **fields)
    assert decided_by(decode(encode(entry), LedgerEntry)) == expected
    assert decided_by(decode(encode(entry), LedgerLine)) == expected, "what a view decodes of it"


def test_what_is_not_set_is_not_on_the_wire() -> None:
    assert b"score" not in encode(ENTRY) and b"reward" not in encode(ENTRY)


def test_words_of_earlier_entries_are_read_as_what_they_mean_now() -> None:
    spilled = SpilledDrops(blob="b", sha256="", number=2, reasons={"zero_variance": 2, "late": 1})
    drops = (Drop(1, 0, (0, 1), "zero_variance"),)
    entry = replace(ENTRY, drops=drops, metrics={"rollout/zero_variance": 0.5}, spilled=spilled)
    former = (
        encode(entry).replace(b"\xadzero_variance", b"\xabzero_spread").replace(b"\xb5rollout/zero_variance", b"\xb3rollout/zero_spread")
    )
    assert former.count(b"zero_spread") == 3 and b"zero_variance" not in former
    assert decode(former, LedgerEntry) == entry
