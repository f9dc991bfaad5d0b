"""Samples on the wire: nothing is lost, nothing is copied, nothing broken gets through, and what is not said costs nothing."""

import itertools
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.errors import SchemaError
from streamrl.schemas.columns import OPTIONAL, arrow_schema, schema_bytes
from streamrl.schemas.decoding import decode_samples, decode_together
from streamrl.schemas.encoding import encode_samples
from streamrl.schemas.sample_batch import SampleBatch
from streamrl.schemas.samples import BlobRef, Branch, LogprobMode, Sample, Status, TurnSpan, VersionSpan
from streamrl.schemas.tasks import Sampling
from streamrl.schemas.versions import Version
from tests.support.rows import message, plain, sample, table

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=5), lambda kids: st.lists(kids, max_size=3), max_leaves=4
)
TEXT = st.text(max_size=8)


@st.composite
def groups(draw: st.DrawFn) -> list[Sample]:
    """The samples of one message: some rollouts of a task, each with one or several samples."""
    size = draw(st.integers(1, 4))
    rows = []
    for rollout in draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=size, unique=True)):
        num_samples = draw(st.integers(1, 2))
        rows += [draw(a_sample(size, rollout, index, num_samples)) for index in range(num_samples)]
    return rows


@st.composite
def a_sample(draw: st.DrawFn, group_size: int, rollout: int, index: int, num_samples: int) -> Sample:
    prompt = draw(st.integers(1, 4))
    spans = [VersionSpan(prompt, None)]
    for _ in range(draw(st.integers(0, 3))):
        known = draw(st.booleans())
        spans.append(VersionSpan(draw(st.integers(1, 5)), Version(draw(st.integers(0, 2)), draw(st.integers(0, 2**40))) if known else None))
    sampled = np.concatenate([np.full(span.length, span.version is not None) for span in spans])
    length = len(sampled)
    trained = sampled & np.array(draw(st.lists(st.booleans(), min_size=length, max_size=length)))
    logprobs = -np.array(draw(st.lists(st.floats(0, 100, width=32), min_size=length, max_size=length)), np.float32)
    return Sample(
        run=draw(TEXT),
        policy=draw(TEXT),
        source=draw(TEXT),
        task=2**40,
        rollout=rollout,
        sample=index,
        group_size=group_size,
        num_samples=num_samples,
        data_epoch=draw(st.integers(0, 9)),
        tokens=np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length)), np.int32),
        loss_mask=trained.astype(np.uint8),
        logprobs=np.where(sampled, logprobs, 0).astype(np.float32),
        spans=tuple(spans),
        logprob_mode=draw(st.sampled_from(LogprobMode)),
        reward=draw(st.none() | st.floats(allow_nan=False, allow_infinity=False)),
        reward_parts=draw(st.dictionaries(TEXT, st.floats(allow_nan=False), max_size=2)),
        status=draw(st.sampled_from(Status)),
        finish_reason=draw(TEXT),
        sampling=Sampling(
            max_new_tokens=draw(st.integers(1, 99)),
            temperature=draw(st.sampled_from([0.5, 1.0])),
            top_k=draw(st.sampled_from([-1, 5])),
            min_p=draw(st.sampled_from([0.0, 0.05])),
            stop=draw(st.just(()) | st.just(("a", "\U0001f600"))),
            logit_bias=draw(st.just({}) | st.dictionaries(st.integers(0, 99), st.floats(-100, 100), max_size=3)),
        ),
        seed=draw(st.integers(0, 2**63 - 1)),
        label=draw(JSON),
        metadata=draw(st.dictionaries(TEXT, JSON, max_size=2)),
        engine=draw(TEXT),
        producer=draw(TEXT),
        started_s=draw(st.floats(0, 1e10)),
        finished_s=draw(st.floats(0, 1e10)),
        **draw(more(length, trained)),
    )


SECONDS = st.just(0.0) | st.floats(1, 1e10)


@st.composite
def more(draw: st.DrawFn, length: int, trained: np.ndarray) -> dict[str, Any]:
    """What may be said of a sample of `length` tokens, and mostly is not."""
    turns = []
    cuts = sorted(draw(st.sets(st.integers(1, length), max_size=4))) if draw(st.booleans()) and not trained[:1].any() else []
    for start, end in itertools.pairwise(cuts):
        turn = TurnSpan(
            start=start,
            length=end - start,
            inexact=draw(st.booleans()),
            finish_reason=draw(st.sampled_from(["", "stop"])),
            engine=draw(TEXT),
            asked_s=draw(SECONDS),
            began_s=draw(SECONDS),
            finished_s=draw(SECONDS),
            sampling=draw(st.just({}) | st.just({"temperature": 0.5, "stop": ["a"], "logit_bias": {"3": 1.0}})),
        )
        turns += [turn] * draw(st.integers(0, 1))
    inside = sum(int(trained[turn.start : turn.start + turn.length].sum()) for turn in turns)
    blobs = st.none() | st.builds(BlobRef, st.text(min_size=1, max_size=8), st.just("ab" * 32), st.integers(0, 99), st.integers(0, 99))
    return {
        "turns": tuple(turns) if inside == trained.sum() else (),
        "routed_experts": draw(blobs),
        "images": draw(blobs),
        "issued_s": draw(SECONDS),
        "claimed_s": draw(SECONDS),
        "began_s": draw(SECONDS),
        "deliveries": draw(st.integers(0, 9)),
        "scored_s": draw(SECONDS),
        "counters": draw(st.dictionaries(TEXT, st.floats(0, 1e9), max_size=2)),
    }


@given(rows=groups())
@settings(deadline=None, max_examples=30)
def test_round_trip(rows: list[Sample]) -> None:
    batch = decode_samples(encode_samples(rows))
    assert [plain(row) for row in batch.rows()] == [plain(row) for row in rows]
    assert batch.tokens.tolist() == [token for row in rows for token in row.tokens]
    versions = [-1 if span.version is None else span.version.number for row in rows for span in row.spans for _ in range(span.length)]
    assert batch.token_versions().tolist() == versions


def test_columns_of_one_value_and_trained_tokens_in_each_span() -> None:
    same = [sample(0, policy="a", engine="x"), sample(1, policy="a", engine="x")]
    other = [sample(0, policy="b", engine="x"), sample(1, policy="b", engine="y", sampling=Sampling(temperature=0.5, stop_token_ids=(7,)))]
    for rows in (same, other, same[:1], same):
        assert [plain(row) for row in decode_samples(encode_samples(rows)).rows()] == [plain(row) for row in rows]
    spans = (VersionSpan(1, None), VersionSpan(2, Version(0, 1)), VersionSpan(1, Version(0, 2)))
    rows = [sample(0, spans=spans), sample(1)]
    assert decode_samples(encode_samples(rows)).trained_in_spans.tolist() == [0, 1, 1, 0, 2]


def test_one_bad_log_prob_is_found_wherever_it_is() -> None:
    for value, position in itertools.product((np.nan, np.inf, -np.inf, 0.5, -1e30), (0, 2, 3)):
        logprobs = np.full(4, -0.5, np.float32)
        logprobs[position] = value
        with pytest.raises(SchemaError, match="finite log-probs"):
            decode_samples(encode_samples([sample(logprobs=logprobs)]))


def test_tokens_are_not_copied_nor_take_memory() -> None:
    body = encode_samples([sample(0), sample(1)])
    batch = decode_samples(body)
    whole = np.frombuffer(body, np.uint8)
    for column in (batch.tokens, batch.loss_mask, batch.logprobs, batch.span_number, batch.rows()[1].tokens):
        assert np.shares_memory(column, whole)
        assert not column.flags.writeable
    tokens = decode_samples(bytes(encode_samples([sample(0)]))).rows()[0].tokens
    assert tokens.tolist() == [5, 6, 7, 8], "a view outlives its batch"
    length = 1 << 20
    zeros: Any = {
        name: np.zeros(length, dtype) for name, dtype in (("tokens", np.int32), ("loss_mask", np.uint8), ("logprobs", np.float32))
    }
    body = encode_samples([sample(**zeros, spans=(VersionSpan(length, None),))])
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    batch = decode_samples(body)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(batch.tokens) == length and len(body) > 9 * length
    assert kept < length // 4 and pa.total_allocated_bytes() - before < length // 4


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "at least one sample"),
        ([sample(0), sample(1, task=4)], "tasks 3 and 4"),
        ([sample(0, logprobs=np.zeros(3, np.float32))], "task 3 rollout 0 sample 0: .* 4, 4, 3"),
        ([sample(0, spans=(VersionSpan(3, None),))], "cover all 4 tokens, they cover 3"),
    ],
)
def test_encoding_refuses_what_does_not_fit_together(rows: list[Sample], says: str) -> None:
    with pytest.raises(SchemaError, match=says):
        encode_samples(rows)


Change = Callable[[dict[str, list[Any]]], None]


def put(**columns: Any) -> Change:
    """Replace columns; a value that is no list is put in row 1 only."""

    def change(found: dict[str, list[Any]]) -> None:
        for name, value in columns.items():
            found[name] = value if isinstance(value, list) else [found[name][0], value]

    return change


WRONG = [
    (put(loss_mask=[[0, 0, 1, 1], [0, 0, 1, 1, 1]]), "equal lengths"),
    (put(logprobs=[[0, 0, -1, -1, -1], [0, 0, -1]]), "equal lengths"),
    (put(tokens=[[1, 2, 3, 4], []], loss_mask=[[0, 0, 1, 1], []], logprobs=[[0.0, 0, -1, -1], []]), "at least one token"),
    (put(logprobs=[[0, 0, -1, -1], [0, 0, float("nan"), -1]]), "finite log-probs"),
    (put(logprobs=[[0, 0, -1, -1], [0, 0, float("-inf"), -1]]), "finite log-probs"),
    (put(logprobs=[[0, 0, -1, 0.01], [0, 0, -1, -1]]), "at most 0"),
    (put(loss_mask=[[0, 0, 1, 1], [1, 0, 1, 1]]), "0 at each first token"),
    (put(loss_mask=[[0, 0, 1, 1], [0, 0, 2, 1]]), "loss mask of 0 and 1"),
    (put(tokens=[[1, 2, 3, 4], [1, 2, -3, 4]]), "token ids"),
    (put(span_length=[[2, 2], [2, 1]]), "cover every token"),
    (put(span_length=[[2, 2], [4, 0]]), "at least one token each"),
    (put(span_length=[[2, 2], [2]], span_epoch=[[-1, 0], [-1]], span_number=[[-1, 4], [-1]]), "cover every token"),
    (put(span_length=[[2, 2], []], span_epoch=[[-1, 0], []], span_number=[[-1, 4], []]), "at least one token each"),
    (
        put(span_length=[[2**31 - 1, 2**31 - 1, 6], [2, 2]], span_epoch=[[0] * 3, [-1, 0]], span_number=[[4] * 3, [-1, 4]]),
        "cover every token",
    ),
    (put(span_number=[[-1, 4, 4], [-1]]), "equal lengths"),
    (put(span_number=[[-1, 4], [-1, -4]]), "epoch and number"),
    (put(span_number=[[-1, 4], [4, 4]]), "epoch and number"),
    (put(task=[3, 4]), "one task"),
    (put(task=[-1, -1]), "one task"),
    (put(group_size=[2, 3]), "one group size"),
    (put(group_size=[0, 0]), "group size"),
    (put(rollout=[0, 2]), "below the group size 2"),
    (put(rollout=[0, -1]), "below the group size 2"),
    (put(rollout=[0, 0]), "all samples of rollout 0"),
    (put(num_samples=[1, 2]), "all samples of rollout 1"),
    (put(sample=[0, 1]), "all samples of rollout 1"),
    (put(reward=[0.0, float("inf")]), "finite rewards"),
    (put(temperature=-0.5), "temperature"),
    (put(temperature=float("nan")), "temperature"),
    (put(temperature=0.0), "temperature above 0"),
    (put(top_p=0.0), "top_p"),
    (put(top_k=0), "top_k"),
    (put(max_new_tokens=0), "max_new_tokens"),
    (put(status="melted"), "melted"),
    (put(logprob_mode="guess"), "guess"),
    (put(span_number=[[-1, 4], [-1, -1]], span_epoch=[[-1, 0], [-1, -1]]), "carry the version"),
]


@pytest.mark.parametrize(("change", "says"), WRONG)
def test_wrong_rows_are_refused_and_say_where(change: Change, says: str) -> None:
    columns = table()
    change(columns)
    with pytest.raises(SchemaError, match=says) as caught:
        decode_samples(message(columns), where="run.samples.main sequence 7")
    assert "at run.samples.main sequence 7" in caught.value.message
    # It is seen among others, too.
    bodies = [encode_samples([sample(0, task=task), sample(1, task=task)]) for task in range(3)]
    assert decode_together(bodies) is not None
    for place in range(3):
        assert decode_together([*bodies[:place], message(columns), *bodies[place + 1 :]]) is None


def same_samples(ours: SampleBatch, theirs: SampleBatch) -> None:
    """Whether all that is ever asked of two batches is equal."""
    assert [plain(row) for row in ours.rows()] == [plain(row) for row in theirs.rows()]
    assert ours.batch.equals(theirs.batch, check_metadata=True)
    for name in ("num_rows", "nbytes", "task", "source", "group_size"):
        assert getattr(ours, name) == getattr(theirs, name), name
    arrays = "rollouts tokens loss_mask logprobs span_length span_epoch span_number offsets span_offsets lengths rewards trained_in_spans"
    for name in arrays.split():
        a, b = getattr(ours, name), getattr(theirs, name)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b, err_msg=name)
    np.testing.assert_array_equal(ours.token_versions(), theirs.token_versions())
    for name in ("sample", "temperature", "top_p", "top_k", "num_samples", "seed"):
        assert ours.ints(name).tolist() == theirs.ints(name).tolist()
    assert ours.texts("logprob_mode") == theirs.texts("logprob_mode")


@given(messages=st.lists(groups(), min_size=1, max_size=4))
@settings(deadline=None, max_examples=25)
def test_messages_decoded_together_are_what_each_is_by_itself(messages: list[list[Sample]]) -> None:
    bodies = [encode_samples(rows) for rows in messages]
    together = decode_together(bodies)
    in_order = all([(row.rollout, row.sample) for row in rows] == sorted({(row.rollout, 0) for row in rows}) for rows in messages)
    usual = in_order and all(row.num_samples == 1 for rows in messages for row in rows)
    # A column of structs has the fields that a message uses: messages that use others are decoded one by one.
    kinds: dict[str, set[pa.DataType]] = {}
    for body in bodies:
        for field in decode_samples(body).batch.schema:
            kinds.setdefault(field.name, set()).add(field.type)
    if all(len(types) == 1 for types in kinds.values()):
        assert (together is not None) == usual
    else:
        assert together is None or usual
    for found, body in zip(together or (), bodies, strict=False):
        same_samples(found, decode_samples(body))


def schema_with(*fields: pa.Field, without: str = "", name: str = "samples/2") -> pa.Schema:
    kept = [field for field in arrow_schema() if field.name != without and field.name not in {f.name for f in fields}]
    return pa.schema([*kept, *fields], metadata={b"streamrl.schema": name.encode()} if name else None)


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (schema_with(name="samples/0"), "expected sample schema samples/2 at here, got samples/0"),
        (schema_with(name="samples/3"), "got samples/3"),
        (schema_with(name="tasks/1"), "got tasks/1"),
        (schema_with(name=""), "without a schema name"),
        (schema_with(without="logprobs"), r"\['logprobs'\]"),
        (schema_with(pa.field("rollout", pa.int64(), nullable=False)), r"\['rollout'\]"),
        (schema_with(pa.field("seed", pa.int64(), nullable=True)), r"\['seed'\]"),
        (schema_with(pa.field("added", pa.int64(), nullable=False)), r"\['added'\]"),
    ],
)
def test_foreign_schemas_are_refused(schema: pa.Schema, says: str) -> None:
    with pytest.raises(SchemaError, match=says):
        decode_samples(message(table() | {"added": [1, 2]}, schema), where="here")


def test_added_nullable_columns_and_another_order_are_read() -> None:
    schema = schema_with(pa.field("added", pa.utf8()), pa.field("task", pa.int64(), nullable=False), without="label")
    batch = decode_samples(message(table() | {"added": [None, "x"]}, schema))
    assert [plain(row) for row in batch.rows()] == [plain(sample(0)), plain(sample(1))]


@pytest.mark.parametrize(("column", "values"), [("seed", [None, 1]), ("tokens", [[5, 6, 7, 8], [5, None, 7, 8]])])
def test_nulls_where_none_may_be(column: str, values: list[Any]) -> None:
    nullable = pa.schema([pa.field(field.name, field.type) for field in arrow_schema()])
    stream = pa.ipc.open_stream(message(table() | {column: values}, nullable))
    batch = pa.RecordBatch.from_arrays(stream.read_next_batch().columns, schema=arrow_schema())
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, arrow_schema()) as writer:
        writer.write_batch(batch)
    with pytest.raises(SchemaError, match=column):
        decode_samples(sink.getvalue().to_pybytes())


def test_what_is_no_message_is_seen_alone_and_among_others() -> None:
    for other in (b"", b"no arrow", message({name: [] for name in arrow_schema().names}), encode_samples([sample(0)])[:-100]):
        assert decode_together([encode_samples([sample(0)]), other]) is None
    with pytest.raises(SchemaError, match="at least one row"):
        decode_samples(message({name: [] for name in arrow_schema().names}))
    columns = table()
    columns["label"] = [None, "{"]
    batch = decode_samples(message(columns))
    with pytest.raises(SchemaError, match="JSON"):
        batch.rows()


BLOB = {"name": "a", "sha256": "ab" * 32, "start_row": 0, "num_rows": 4}


def columns(**changes: Any) -> dict[str, list[Any]]:
    """Two samples, of which one has everything that may be said, with some of it changed."""
    turns = (TurnSpan(start=2, length=1, inexact=True, asked_s=1.0, sampling={"min_p": 0.5}), TurnSpan(start=3, length=1))
    said = sample(0, turns=turns, routed_experts=BlobRef(**BLOB), claimed_s=1.0, scored_s=2.0, counters={"cached_tokens": 3.0})
    return table(encode_samples([said, sample(1)])) | changes


def body(values: dict[str, list[Any]]) -> bytes:
    return message(values, arrow_schema(*(name for name in OPTIONAL if name in values)))


def test_what_is_not_said_is_not_on_the_wire() -> None:
    silent, said = encode_samples([sample(0)]), encode_samples([sample(0, claimed_s=1.0)])
    assert silent.startswith(schema_bytes()) and said.startswith(schema_bytes("claimed_s"))
    assert len(silent) < len(said) and decode_samples(silent).batch.num_columns == len(arrow_schema())
    values = table() | {"images": [None, None], "added": ["x", None]}
    schema = pa.schema([*arrow_schema("images"), pa.field("added", pa.utf8())], metadata=arrow_schema().metadata)
    assert decode_samples(message(values, schema)).batch.equals(decode_samples(message(table())).batch, check_metadata=True)
    rows = [sample(0, claimed_s=1.0), sample(0, turns=(TurnSpan(start=2, length=2, inexact=True),)), sample(0)]
    found = decode_together([encode_samples([row]) for row in rows])
    assert found is not None and [plain(part.rows()[0]) for part in found] == [plain(row) for row in rows]
    assert [None if part.inexact is None else part.inexact.tolist() for part in found] == [None, [False, False, True, True], None]
    alone = [decode_samples(encode_samples([row])) for row in rows]
    assert [[part.optional(name) for name in OPTIONAL] for part in found] == [[one.optional(name) for name in OPTIONAL] for one in alone]


SHA = "ab" * 32


def an_image(sha256: str, media_type: str | None, num_bytes: int) -> dict[str, Any]:
    values = {"image_sha256": [sha256], "image_media_type": [media_type], "image_num_bytes": [num_bytes]}
    return {"images": [BLOB | {"num_rows": 1}, None], **{name: [value, None] for name, value in values.items()}}


def blob(column: Any = "routed_experts", **changes: Any) -> dict[str, Any]:
    return {column: [BLOB | changes, None]}


@pytest.mark.parametrize(
    "changes",
    [
        *({"turn_start": [one, None]} for one in ([0, 3], [3, 3], [2, 1], [2, None], [2, 2**31 - 1], None)),
        *({"turn_length": [one, None]} for one in ([1, 0], [1, 2], [1], [2**31 - 1, 1], [1, -1])),
        {"turn_start": [[2], None], "turn_length": [[1], None]},
        {"turn_inexact": [[True], None]},
        {"turn_inexact": [[True, True], [True]]},
        {"turn_asked_s": [[float("nan"), 1.0], None]},
        *({"turn_sampling": [[one, None], None]} for one in ("{", "[1]", '{"a":' + "[" * 100_000)),
        *(blob(**{key: value}) for key, value in (("sha256", "ab"), ("sha256", None), ("name", ""), ("start_row", -1), ("num_rows", None))),
        blob("images", name=None),
        {"image_sha256": [[SHA], None], "image_media_type": [["image/png"], None], "image_num_bytes": [[7], None]},
        {**blob("images", num_rows=1), "image_sha256": [[SHA], None]},
        *map(an_image, ("ab", SHA, SHA, SHA), ("image/png", "text/html", "image/png", None), (7, 7, 0, 7)),
        {"claimed_s": [float("inf"), None]},
        *({"counters": [[("cached_tokens", one)], None]} for one in (float("nan"), None)),
        *({"sampling": [one, None]} for one in ("{", "[1]", '{"min_p":2}', '{"min_q":0.5}', '{"top_k":3}', '{"stop":' + "[" * 100_000)),
        {"sampling": ['{"regex":"a","json_schema":"{}"}', None]},
        {"branch_parent": [0, None]},
        {"branch_shared": [1, None]},
    ],
)
def test_wrong_values_are_refused_alone_and_among_others(changes: dict[str, Any]) -> None:
    assert decode_samples(body(columns())).num_rows == 2
    wrong = body(columns(**changes))
    with pytest.raises(SchemaError) as caught:
        decode_samples(wrong, where="run.samples.main sequence 7")
    assert caught.value.message.endswith("at run.samples.main sequence 7")
    assert decode_together([encode_samples([sample(0)]), wrong]) is None


def test_a_branch_begins_with_what_it_shares_which_its_parent_trains() -> None:
    root = sample(0, num_samples=3)
    branch = {"num_samples": 3, "loss_mask": np.array([0, 0, 0, 1], np.uint8)}
    twig = sample(0, sample=2, branch=Branch(1, 3), **branch)
    rows = [root, sample(0, sample=1, branch=Branch(0, 3), **branch), twig]
    assert [row.branch for row in decode_samples(encode_samples(rows)).rows()] == [None, Branch(0, 3), Branch(1, 3)]
    other = np.array([5, 9, 7, 8], np.int32)
    wrongs = (Branch(0, 4), Branch(0, 0), Branch(0, 9), Branch(1, 3), Branch(2, 3), Branch(-1, 3))
    for wrong in (
        *([root, sample(0, sample=1, branch=one, **branch), twig] for one in wrongs),
        [root, sample(0, sample=1, branch=Branch(0, 3), tokens=other, **branch), sample(0, sample=2, num_samples=3)],
        [sample(1), sample(0, branch=Branch(0, 3))],
    ):
        with pytest.raises(SchemaError) as caught:
            decode_samples(encode_samples(wrong))
        assert "branch" in caught.value.message
