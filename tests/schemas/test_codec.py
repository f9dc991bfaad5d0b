"""MessagePack structs: round trips of any values, and errors that say where the bytes came from."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.errors import SchemaError
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.control import Grant, Latest
from streamrl.schemas.digests import body_digest
from streamrl.schemas.ledger import Drop, LedgerEntry, Used
from streamrl.schemas.samples import Mark, RewardUpdate, Tombstone
from streamrl.schemas.subjects import Subjects, kind_of, source_of
from streamrl.schemas.tasks import RolloutTask, Sampling
from streamrl.schemas.versions import Version
from tests.support.errors import raises

INDEX = st.integers(0, 2**62)
VERSION = st.builds(Version, INDEX, INDEX)


@settings(max_examples=40)
@given(
    record=st.builds(Tombstone, task=INDEX, reason=st.text(), rollout=st.none() | INDEX, group_size=INDEX, detail=st.text())
    | st.builds(RewardUpdate, task=INDEX, rollout=INDEX, reward=st.floats(allow_nan=False), revision=INDEX)
    | st.builds(Grant, INDEX, INDEX, INDEX, st.none() | INDEX)
    | st.builds(
        LedgerEntry,
        run=st.text(),
        trainer=st.text(),
        version=VERSION,
        source=st.text(),
        used=st.lists(st.builds(Used, INDEX, st.tuples(INDEX), st.tuples(INDEX))).map(tuple),
        drops=st.lists(st.builds(Drop, INDEX, st.integers(-1, 2**62), st.tuples(INDEX), st.text())).map(tuple),
        cursor=INDEX,
        granted=INDEX,
        retired=INDEX,
    )
)
def test_round_trip(record: Any) -> None:
    assert decode(encode(record), type(record)) == record


@given(data=st.binary(max_size=60), kind=st.sampled_from([Tombstone, RewardUpdate, Mark, LedgerEntry, RolloutTask, Latest]))
def test_random_bytes_are_schema_errors(data: bytes, kind: type) -> None:
    with raises(SchemaError, where="here"):
        decode(data, kind, where="here")


OUT_OF_RANGE = {"max_new_tokens": [0], "temperature": [-1.0, float("nan")], "top_p": [0.0, 1.5], "top_k": [0, -2]}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in OUT_OF_RANGE.items() for value in values])
def test_values_out_of_range_are_refused_on_the_wire_too(key: str, value: Any) -> None:
    with raises(SchemaError, key=f"sampling.{key}"):
        Sampling(**{key: value})
    body = msgspec.msgpack.encode({"run": "r", "index": 0, "source": "main", "sampling": {key: value}})
    with pytest.raises(SchemaError):
        decode(body, RolloutTask)


def test_one_kind_is_not_taken_for_another_and_versions_are_ordered() -> None:
    with raises(SchemaError, expected="Tombstone", where="sequence 3"):
        decode(encode(Mark(name="drain")), Tombstone, where="sequence 3")
    assert Version(0, 9) < Version(0, 10) < Version(1, 0)
    assert Version(2, 7).next() == Version(2, 8) == Version.parse("2.8")
    assert str(Version(2, 8)) == "2.8"
    for text in ("", "8", "2.8.1", "-1.0", "a.b", "2.8\n"):
        with raises(SchemaError, version=text):
            Version.parse(text)
    with pytest.raises(SchemaError):
        Version(-1, 0)


def test_subjects_are_told_apart_by_their_second_token() -> None:
    s = Subjects("my-run")
    assert (kind_of(s.samples("main")), source_of(s.samples("main"))) == ("samples", "main")
    assert (kind_of(s.rewards), source_of(s.rewards)) == ("rewards", "")
    kinds = "tasks tombstones marks ledger weights dead"
    assert [kind_of(x) for x in (s.tasks("a"), s.tombstones("a"), s.marks, s.ledger("t"), s.weights("p"), s.dead)] == kinds.split()
    for name in ("", "a.b", "a b", "a>", "*", "ü", "a/b", "a\n"):
        with raises(SchemaError, name=name):
            Subjects(name)
        with raises(SchemaError, kind="source", name=name):
            s.samples(name)


def test_digests_of_bodies_are_those_that_the_authors_of_xxh3_publish() -> None:
    # xxhsum -H2 of no bytes, and of "a".
    assert body_digest(b"") == "99aa06d3014798d86001c324468d497f"
    assert body_digest(b"a") == "a96faf705af16834e6c632b61e964e1f"
    assert body_digest(memoryview(b"xayz")[1:2]) == body_digest(b"a")
