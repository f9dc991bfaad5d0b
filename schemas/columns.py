"""Samples on the wire: one Arrow IPC stream with one record batch per message; a row is a sample.

`encode_samples` writes it, `decode_samples` checks it and gives numpy views of the message's own bytes: no token is copied.
Letters: `N` rows, `T` tokens of the whole message. Schema name and major version are in the schema's metadata; within a major
version columns may only be added, and must be nullable.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property, lru_cache
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamrl.errors import SchemaError
from streamrl.schemas.samples import BlobRef, LogprobMode, Sample, Status, VersionSpan
from streamrl.schemas.tasks import Sampling
from streamrl.schemas.versions import Version

SCHEMA_NAME = "samples/1"
TOKEN_BYTES = 9
"""What a token takes at least: its id, its log-prob and its place in the loss mask."""
_KEY = b"streamrl.schema"
_BLOB = pa.struct([("name", pa.utf8()), ("sha256", pa.utf8()), ("start_row", pa.int64()), ("num_rows", pa.int64())])


@cache
def arrow_schema() -> pa.Schema:
    """The Arrow schema of `samples/1`."""
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
        pa.field("routed_experts", _BLOB),
        pa.field("images", _BLOB),
    ]
    return pa.schema(fields, metadata={_KEY: SCHEMA_NAME.encode()})


def encode_samples(samples: Sequence[Sample]) -> bytes:
    """Whole rollouts of one task to one message body.

    Raises:
        SchemaError: no samples, several tasks, or a sample whose columns do not fit together.
    """
    if not samples:
        raise SchemaError("expected at least one sample to encode, got none", hint="a task without samples ends as a Tombstone")
    for sample in samples:
        _check_sample(sample, samples[0].task)
    schema = arrow_schema()
    columns = {
        "tokens": _ragged([s.tokens for s in samples], np.int32),
        "loss_mask": _ragged([s.loss_mask for s in samples], np.uint8),
        "logprobs": _ragged([s.logprobs for s in samples], np.float32),
        "span_length": [[p.length for p in s.spans] for s in samples],
        "span_epoch": [[-1 if p.version is None else p.version.epoch for p in s.spans] for s in samples],
        "span_number": [[-1 if p.version is None else p.version.number for p in s.spans] for s in samples],
        "reward_parts": [list(s.reward_parts.items()) for s in samples],
        "label": [_to_json(s.label) for s in samples],
        "metadata": [_to_json(s.metadata or None) for s in samples],
        "routed_experts": [_blob(s.routed_experts) for s in samples],
        "images": [_blob(s.images) for s in samples],
    }
    for name in ("temperature", "top_p", "top_k", "max_new_tokens", "ignore_eos"):
        columns[name] = [getattr(s.sampling, name) for s in samples]
    columns["stop_token_ids"] = [tuple(s.sampling.stop_token_ids) for s in samples]
    plain = {name: [getattr(s, name) for s in samples] for name, _ in _fields() if name not in columns}
    arrays = [_column(name, kind, columns.get(name, plain.get(name))) for name, kind in _fields()]
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


@cache
def _fields() -> tuple[tuple[str, pa.DataType], ...]:
    return tuple((field.name, field.type) for field in arrow_schema())


_OF_A_TASK = ("task", "rollout", "seed", "reward", "reward_parts", "label", "metadata", "started_s", "finished_s")
_VARIED = frozenset((*_OF_A_TASK, "span_length", "span_epoch", "span_number"))
"""Columns that differ from row to row or from message to message; the others mostly have one value."""


def _column(name: str, kind: pa.DataType, values: Any) -> pa.Array:
    if isinstance(values, pa.Array):
        return values
    first = values[0]
    if name not in _VARIED and not isinstance(first, dict) and all(value == first for value in values):
        return _repeated(name, first, len(values))
    return pa.array(values, type=kind)


@lru_cache(maxsize=1024)
def _repeated(name: str, value: Any, num_rows: int) -> pa.Array:
    """A column of one value: most columns of a message are, and to make one anew takes as long as to write a thousand tokens."""
    return pa.array([value] * num_rows, type=dict(_fields())[name])


def _check_sample(sample: Sample, task: int) -> None:
    where = f"task {sample.task} rollout {sample.rollout} sample {sample.sample}"
    length = len(sample.tokens)
    if sample.task != task:
        raise SchemaError(f"a message holds samples of one task, got tasks {task} and {sample.task}")
    if length == 0 or len(sample.loss_mask) != length or len(sample.logprobs) != length:
        lengths = f"{length}, {len(sample.loss_mask)}, {len(sample.logprobs)}"
        raise SchemaError(f"{where}: tokens, loss_mask and logprobs must have one length above 0, got {lengths}")
    if sum(span.length for span in sample.spans) != length:
        raise SchemaError(f"{where}: version spans must cover all {length} tokens, they cover {sum(s.length for s in sample.spans)}")


def _ragged(rows: Sequence[npt.NDArray[Any]], dtype: type[np.generic]) -> pa.ListArray:
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    values = np.concatenate([np.asarray(row, dtype) for row in rows])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def _to_json(value: object) -> str | None:
    return None if value is None else msgspec.json.encode(value).decode()


def _from_json(text: str | None) -> object:
    if text is None:
        return None
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise SchemaError(f"expected JSON in a label or in metadata, got {text[:80]!r}: {error}") from error


def _blob(ref: BlobRef | None) -> dict[str, object] | None:
    return None if ref is None else msgspec.structs.asdict(ref)


class SampleBatch:
    """A decoded message: the record batch and numpy views of its columns. Keeps the message's bytes alive."""

    def __init__(self, batch: pa.RecordBatch, nbytes: int) -> None:
        self.batch = batch
        self.nbytes = nbytes
        self.num_rows: int = batch.num_rows
        self.task = int(self.ints("task")[0])
        self.source: str = batch.column("source")[0].as_py()
        self.group_size = int(self.ints("group_size")[0])
        self.rollouts = self.ints("rollout")
        """[N] int32"""
        self.offsets, self.tokens = self._list("tokens")
        """[N + 1] int64 and [T] int32"""
        self.mask_offsets, self.loss_mask = self._list("loss_mask")
        """[N + 1] int64, equal to `offsets` in a decoded message, and [T] uint8"""
        self.logprob_offsets, self.logprobs = self._list("logprobs")
        """[N + 1] int64, equal to `offsets` in a decoded message, and [T] float32"""
        self.span_offsets, self.span_length = self._list("span_length")
        self.epoch_offsets, self.span_epoch = self._list("span_epoch")
        self.number_offsets, self.span_number = self._list("span_number")
        reward = batch.column("reward")
        self.rewards: npt.NDArray[np.float64] = reward.to_numpy(zero_copy_only=False)
        """[N] float64, NaN where there is none."""

    def ints(self, name: str) -> npt.NDArray[Any]:
        """[N] values of a flat numeric column."""
        return self.batch.column(name).to_numpy(zero_copy_only=True)

    def _list(self, name: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
        column = self.batch.column(name)
        offsets = column.offsets.to_numpy().astype(np.int64)
        values = column.values.to_numpy(zero_copy_only=True)[offsets[0] : offsets[-1]]
        return offsets - offsets[0], values

    def token_versions(self) -> npt.NDArray[np.int64]:
        """[T] version number that sampled each token, -1 where no model did."""
        return np.repeat(self.span_number, self.span_length)

    @cached_property
    def trained_in_spans(self) -> npt.NDArray[np.int64]:
        """[number of spans] tokens that are trained on in each version span, of all rows."""
        starts = np.cumsum(self.span_length, dtype=np.int64) - self.span_length
        return np.add.reduceat(self.loss_mask, starts, dtype=np.int64)

    def rows(self) -> list[Sample]:
        """Every row as a Sample (views of the same bytes); raises SchemaError when a label or metadata is no JSON."""
        return [self._row(index, values) for index, values in enumerate(self.batch.to_pylist())]

    def _row(self, index: int, values: dict[str, Any]) -> Sample:
        start, end = self.offsets[index], self.offsets[index + 1]
        spans = zip(values["span_length"], values["span_epoch"], values["span_number"], strict=True)
        sampling = Sampling(
            max_new_tokens=values["max_new_tokens"],
            temperature=values["temperature"],
            top_p=values["top_p"],
            top_k=values["top_k"],
            stop_token_ids=tuple(values["stop_token_ids"] or ()),
            ignore_eos=bool(values["ignore_eos"]),
        )
        same = (
            "run",
            "policy",
            "source",
            "task",
            "rollout",
            "sample",
            "group_size",
            "num_samples",
            "data_epoch",
            "reward",
            "finish_reason",
        )
        same += ("seed", "engine", "producer", "started_s", "finished_s")
        return Sample(
            **{name: values[name] for name in same},
            tokens=self.tokens[start:end],
            loss_mask=self.loss_mask[start:end],
            logprobs=self.logprobs[start:end],
            spans=tuple(VersionSpan(n, None if number < 0 else Version(epoch, number)) for n, epoch, number in spans),
            logprob_mode=LogprobMode(values["logprob_mode"]),
            reward_parts=dict(values["reward_parts"] or ()),
            status=Status(values["status"]),
            sampling=sampling,
            label=_from_json(values["label"]),
            metadata=_from_json(values["metadata"]) or {},  # type: ignore[arg-type]
            routed_experts=None if values["routed_experts"] is None else BlobRef(**values["routed_experts"]),
            images=None if values["images"] is None else BlobRef(**values["images"]),
        )


def decode_samples(body: bytes | memoryview, *, where: str = "") -> SampleBatch:
    """Check and open one message body without copying its tokens.

    Raises:
        SchemaError: not Arrow, a foreign or newer schema, columns that do not fit together, log-probs that are not finite or above 0,
            a loss mask on a token that nothing predicts. The message names `where` the bytes came from.
    """
    place = f" at {where}" if where else ""
    try:
        with pa.ipc.open_stream(pa.py_buffer(body)) as reader:
            schema = reader.schema
            name = (schema.metadata or {}).get(_KEY, b"").decode(errors="replace")
            if name != SCHEMA_NAME:
                raise SchemaError(
                    f"expected sample schema {SCHEMA_NAME}{place}, got {name or 'Arrow data without a schema name'}",
                    hint="producer and trainer must run the same major version of streamrl",
                )
            batch = reader.read_next_batch()
        batch.validate(full=True)
        if not schema.equals(arrow_schema()):
            batch = _with_our_columns(batch, place)
    except (pa.ArrowException, StopIteration, OSError, ValueError, OverflowError, MemoryError) as error:
        raise SchemaError(f"expected an Arrow stream of {SCHEMA_NAME}{place}, got {len(body)} bytes that are none: {error}") from error
    if batch.num_rows == 0:
        raise SchemaError(f"expected at least one row of {SCHEMA_NAME}{place}, got none")
    nulls = [name for index, name, is_list in _never_null() if _has_nulls(batch.column(index), is_list)]
    if nulls:
        raise SchemaError(f"expected no nulls in {nulls}{place}")
    decoded = SampleBatch(batch, len(body))
    problem = _shape_problem(decoded) or _value_problem(decoded)
    if problem:
        raise SchemaError(f"{problem}{place}", hint="the producer built this sample wrongly; see streamrl.producers.episode")
    return decoded


@cache
def _never_null() -> tuple[tuple[int, str, bool], ...]:
    """Position and name of each column that may hold no null, and whether it holds lists, which may hold none either."""
    fields = enumerate(arrow_schema())
    return tuple((index, field.name, pa.types.is_list(field.type)) for index, field in fields if not field.nullable)


def _has_nulls(column: pa.Array, is_list: bool) -> bool:
    return bool(column.null_count or (is_list and column.values.null_count))


def _with_our_columns(batch: pa.RecordBatch, place: str) -> pa.RecordBatch:
    """A batch of the same major version may have more nullable columns than ours, or lack nullable ones; nothing else."""
    ours, theirs = arrow_schema(), batch.schema
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
    columns = [batch.column(field.name) if field.name in theirs.names else pa.nulls(batch.num_rows, field.type) for field in ours]
    return pa.RecordBatch.from_arrays(columns, schema=ours)


def _shape_problem(b: SampleBatch) -> str:
    """The first thing in which columns do not fit together, or an empty string."""
    lengths = np.diff(b.offsets)
    if (b.offsets != b.mask_offsets).any() or (b.offsets != b.logprob_offsets).any():
        return "expected tokens, loss_mask and logprobs of equal lengths"
    if (lengths < 1).any():
        return "expected at least one token in every sample"
    spans = np.diff(b.span_offsets)
    if (b.span_offsets != b.epoch_offsets).any() or (b.span_offsets != b.number_offsets).any():
        return "expected span_length, span_epoch and span_number of equal lengths"
    if (spans < 1).any() or (b.span_length < 1).any():
        return "expected version spans of at least one token each"
    if (np.add.reduceat(b.span_length, b.span_offsets[:-1], dtype=np.int64) != lengths).any():
        return "expected version spans that cover every token once"
    if (b.span_number < -1).any() or (b.span_epoch < -1).any() or ((b.span_number < 0) != (b.span_epoch < 0)).any():
        return "expected versions with epoch and number of at least 0, or both -1 where no model sampled"
    if (b.ints("task") != b.task).any() or (b.ints("group_size") != b.group_size).any() or b.task < 0 or b.group_size < 1:
        return "expected all rows to be of one task and one group size"
    if (b.rollouts < 0).any() or (b.rollouts >= b.group_size).any():
        return f"expected rollouts below the group size {b.group_size}"
    sizes, samples = b.ints("num_samples"), b.ints("sample")
    if (sizes == 1).all() and not samples.any() and (b.rollouts[1:] > b.rollouts[:-1]).all():
        return ""  # one sample a rollout, in order: what nearly every message holds
    for rollout in np.unique(b.rollouts):
        rows = b.rollouts == rollout
        count = int(rows.sum())
        if (sizes[rows] != count).any() or not np.array_equal(np.sort(samples[rows]), np.arange(count)):
            return f"expected all samples of rollout {rollout} in one message"
    return ""


def _value_problem(b: SampleBatch) -> str:
    """The first value that cannot be trained on, or an empty string. Shapes have been checked.

    Each column of tokens is gone through once or twice and never copied: a NaN shows in the least and in the greatest value.
    """
    if not (b.logprobs.min() > -np.inf and b.logprobs.max() <= 1e-4):
        return "expected finite log-probs of at most 0"
    if b.loss_mask.max() > 1 or b.loss_mask[b.offsets[:-1]].any():
        return "expected a loss mask of 0 and 1 that is 0 at each first token"
    if b.tokens.min() < 0:
        return "expected token ids of at least 0"
    if np.isinf(b.rewards).any():
        return "expected finite rewards"
    temperature, top_p, top_k = b.ints("temperature"), b.ints("top_p"), b.ints("top_k")
    if not (np.isfinite(temperature) & (temperature >= 0) & (top_p > 0) & (top_p <= 1) & (top_k >= -1) & (top_k != 0)).all():
        return "expected temperature of at least 0, top_p in (0, 1], top_k of -1 or at least 1"
    if (b.ints("max_new_tokens") < 1).any():
        return "expected max_new_tokens of at least 1"
    modes, statuses = b.batch.column("logprob_mode"), b.batch.column("status")
    unknown = set(modes.unique().to_pylist()).difference(LogprobMode) | set(statuses.unique().to_pylist()).difference(Status)
    if unknown:
        return f"expected known values of logprob_mode and status, got {sorted(unknown)}"
    trained, sampled = b.trained_in_spans > 0, b.span_number >= 0
    rows = np.repeat(np.arange(b.num_rows), np.diff(b.span_offsets))
    if (trained & sampled & (temperature[rows] == 0)).any():
        return "expected a temperature above 0 where sampled tokens are trained on"
    unseen = trained & ~sampled
    if unseen.any() and (np.array(modes.to_pylist()) != LogprobMode.NONE)[rows[unseen]].any():
        return "expected every trained token to carry the version that sampled it"
    return ""
