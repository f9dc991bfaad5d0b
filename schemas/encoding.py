"""Samples to a message body: the writing half of `streamrl.schemas.columns`.

A message of a few short samples costs what its 33 columns cost, not what its tokens do. So the columns that mostly have one value in
all rows are made once for many messages, numbers go in as the bytes of arrays, and the schema's bytes are written in front, not made again.
The optional columns are made only where a row has something in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from itertools import accumulate
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamrl.errors import SchemaError
from streamrl.schemas.columns import BLOBS, IMAGES, OPTIONAL, SCALARS, TURNS, arrow_schema, schema_bytes
from streamrl.schemas.samples import Sample, TurnSpan
from streamrl.schemas.tasks import Sampling

_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""Ends an Arrow IPC stream."""
_OFFSETS = np.dtype(np.int32)
_SHARED = (
    "run",
    "policy",
    "source",
    "sample",
    "group_size",
    "num_samples",
    "data_epoch",
    "logprob_mode",
    "engine",
    "producer",
)
"""Columns that mostly have one value in all rows of a message, and in the next messages too; those of `_SAMPLING` are such as well."""
_SAMPLING = ("temperature", "top_p", "top_k", "max_new_tokens", "ignore_eos", "stop_token_ids")
_TOKENS = {"tokens": np.int32, "loss_mask": np.uint8, "logprobs": np.float32}
_SPANS = {"span_length": np.int32, "span_epoch": np.int32, "span_number": np.int64}
_NUMBERS = {
    "task": np.int64,
    "rollout": np.int32,
    "reward": np.float64,
    "seed": np.int64,
    "started_s": np.float64,
    "finished_s": np.float64,
}
_WORDS = ("status", "finish_reason")
"""Columns of few different texts."""
_MORE = ("turns", "branch", *BLOBS, "image_rows", "counters", "agent", *SCALARS)
"""What goes into the optional columns."""
_SCALAR_TYPES = {name: np.dtype(OPTIONAL[name].to_pandas_dtype()) for name in SCALARS}
_more = attrgetter(*_MORE)
_shared = attrgetter(*_SHARED, "sampling")
_sampling = attrgetter(*_SAMPLING)


def encode_samples(samples: Sequence[Sample]) -> bytes:
    """Whole rollouts of one task to one message body.

    Raises:
        SchemaError: no samples, several tasks, or a sample whose columns do not fit together.
    """
    if not samples:
        raise SchemaError("expected at least one sample to encode, got none", hint="a task without samples ends as a Tombstone")
    task = samples[0].task
    for sample in samples:
        if sample.task != task or not len(sample.tokens) == len(sample.loss_mask) == len(sample.logprobs) > 0:
            _complain(sample, task)
    columns = _token_columns(samples) | _span_columns(samples) | _shared_columns(samples) | _json_columns(samples)
    for name, dtype in _NUMBERS.items():
        columns[name] = _numbers(name, [getattr(sample, name) for sample in samples], dtype)
    for name in _WORDS:
        columns[name] = _words(name, tuple([getattr(sample, name) for sample in samples]))
    parts = [sample.reward_parts for sample in samples]
    columns["reward_parts"] = _array("reward_parts", [list(part.items()) for part in parts]) if any(parts) else _no_parts(len(samples))
    optional = _optional_columns(samples)
    arrays = [*(columns[name] for name in _names()), *optional.values()]
    message = pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(*optional)).serialize()
    return b"".join((schema_bytes(*optional), memoryview(message), _END))


def load() -> None:
    """Have pyarrow import what it does with the first array (pandas, where that is installed): a second that holds nothing up later."""
    _array("run", [""])


def _complain(sample: Sample, task: int) -> None:
    if sample.task != task:
        raise SchemaError(f"a message holds samples of one task, got tasks {task} and {sample.task}")
    lengths = f"{len(sample.tokens)}, {len(sample.loss_mask)}, {len(sample.logprobs)}"
    raise SchemaError(f"{_place(sample)}: tokens, loss_mask and logprobs must have one length above 0, got {lengths}")


def _place(sample: Sample) -> str:
    return f"task {sample.task} rollout {sample.rollout} sample {sample.sample}"


@cache
def _names() -> tuple[str, ...]:
    """Columns that every message has."""
    return tuple(arrow_schema().names)


@cache
def _types() -> dict[str, pa.DataType]:
    return {field.name: field.type for field in arrow_schema()} | OPTIONAL


def _array(name: str, values: Sequence[Any]) -> pa.Array:
    return pa.array(values, type=_types()[name])


def _numbers(name: str, values: list[Any], dtype: npt.DTypeLike) -> pa.Array:
    if None in values:
        return _array(name, values)
    return pa.Array.from_buffers(_types()[name], len(values), [None, pa.py_buffer(np.array(values, dtype))])


@lru_cache(maxsize=1024)
def _words(name: str, values: tuple[str, ...]) -> pa.Array:
    return _array(name, values)


def _lists(name: str, offsets: pa.Buffer, values: npt.NDArray[Any]) -> pa.Array:
    """A column of lists over the bytes of `values`, which row i has from offset i to the next one.

    Rows of 3, 0 and 2 tokens have the offsets [0, 3, 3, 5] (one more than rows, int32) over 5 values.
    """
    kind = _types()[name]
    inner = pa.Array.from_buffers(kind.value_type, len(values), [None, pa.py_buffer(values)])
    return pa.Array.from_buffers(kind, offsets.size // _OFFSETS.itemsize - 1, [None, offsets], children=[inner])


def _offsets(lengths: Iterable[int]) -> pa.Buffer:
    return pa.py_buffer(np.array([0, *accumulate(lengths)], _OFFSETS))


def _token_columns(samples: Sequence[Sample]) -> dict[str, pa.Array]:
    offsets = _offsets(len(sample.tokens) for sample in samples)
    return {
        name: _lists(name, offsets, np.concatenate([getattr(sample, name) for sample in samples], dtype=dtype, casting="unsafe"))
        for name, dtype in _TOKENS.items()
    }


def _span_columns(samples: Sequence[Sample]) -> dict[str, pa.Array]:
    rows: list[tuple[int, int, int]] = []
    for sample in samples:
        covered = 0
        for span in sample.spans:
            covered += span.length
            rows.append((span.length, -1, -1) if span.version is None else (span.length, span.version.epoch, span.version.number))
        if covered != len(sample.tokens):
            raise SchemaError(f"{_place(sample)}: version spans must cover all {len(sample.tokens)} tokens, they cover {covered}")
    offsets = _offsets(len(sample.spans) for sample in samples)
    # One row a span, [S, 3] = length, epoch, number; columns are its transpose. Two samples of spans (4,) and (2, 3) give
    # rows [[4, 0, 7], [2, -1, -1], [3, 0, 8]] and offsets [0, 1, 3]; -1 stands for "no model".
    columns = np.array(rows, np.int64).reshape(-1, 3).T
    return {name: _lists(name, offsets, column.astype(dtype)) for (name, dtype), column in zip(_SPANS.items(), columns, strict=True)}


def _shared_columns(samples: Sequence[Sample]) -> dict[str, pa.Array]:
    values = [_shared(sample) for sample in samples]
    first = values[0]
    if all(value == first for value in values):
        *plain, sampling = first
        *numbers, stop = _sampling(sampling)
        return _repeated((*plain, *numbers, tuple(stop)), len(values))
    rows = [(*value[:-1], *_sampling(value[-1])) for value in values]
    return _settings(rows)


@lru_cache(maxsize=256)
def _repeated(row: tuple[Any, ...], num_rows: int) -> dict[str, pa.Array]:
    return _settings([row] * num_rows)


def _settings(rows: list[tuple[Any, ...]]) -> dict[str, pa.Array]:
    columns = dict(zip((*_SHARED, *_SAMPLING), map(list, zip(*rows, strict=True)), strict=True))
    columns["stop_token_ids"] = [tuple(ids) for ids in columns["stop_token_ids"]]
    return {name: _array(name, values) for name, values in columns.items()}


def _optional_columns(samples: Sequence[Sample]) -> dict[str, pa.Array]:
    """Those of the optional columns that some row has something in, in their order."""
    said = {name: values for name, values in zip(_MORE, zip(*map(_more, samples), strict=True), strict=True) if any(values)}
    columns: dict[str, pa.Array] = {}
    for name in TURNS if "turns" in said else ():
        rows = [[_turn_value(turn, name) for turn in turns] if turns else None for turns in said["turns"]]
        if any(value is not None for row in rows for value in row or ()):
            columns[f"turn_{name}"] = _array(f"turn_{name}", rows)
    if "branch" in said:
        columns["branch_parent"] = _array("branch_parent", [branch and branch.parent for branch in said["branch"]])
        columns["branch_shared"] = _array("branch_shared", [branch and branch.num_shared for branch in said["branch"]])
    for name in set(BLOBS) & said.keys():
        columns[name] = _array(name, [ref and msgspec.structs.asdict(ref) for ref in said[name]])
    for name in IMAGES if "image_rows" in said else ():
        columns[f"image_{name}"] = _array(f"image_{name}", [[getattr(one, name) for one in row] or None for row in said["image_rows"]])
    if "counters" in said:
        columns["counters"] = _array("counters", [list(counters.items()) or None for counters in said["counters"]])
    if "agent" in said:
        columns["agent"] = _array("agent", [agent or None for agent in said["agent"]])
        rewards = [sample.agent_reward for sample in samples]
        if any(reward is not None for reward in rewards):
            columns["agent_reward"] = _numbers("agent_reward", rewards, np.float64)
    for name, kind in _SCALAR_TYPES.items():
        if name in said:
            columns[name] = _numbers(name, [value or None for value in said[name]], kind)
    if any(later := _later(samples)):
        columns["sampling"] = _array("sampling", later)
    return {name: columns[name] for name in OPTIONAL if name in columns}


def _later(samples: Sequence[Sample]) -> list[str | None]:
    """What each sample's sampling says beyond the columns that every message has, as JSON."""
    first: Sampling = samples[0].sampling
    said = _to_json(first.later() or None)
    return [said if sample.sampling is first else _to_json(sample.sampling.later() or None) for sample in samples]


def _turn_value(turn: TurnSpan, name: str) -> Any:
    """A turn's value as its column has it; None where it says nothing."""
    value = getattr(turn, name)
    if name in ("start", "length"):
        return value
    return _to_json(value or None) if name == "sampling" else value or None


def _json_columns(samples: Sequence[Sample]) -> dict[str, pa.Array]:
    rows = {"label": [sample.label for sample in samples], "metadata": [sample.metadata or None for sample in samples]}
    return {name: _json_column(name, values) for name, values in rows.items()}


def _json_column(name: str, values: Sequence[object]) -> pa.Array:
    first = values[0]
    if any([value is not first for value in values]):
        return _array(name, [_to_json(value) for value in values])
    # As a rule they are the task's own: said once.
    return _nothing(name, len(values)) if first is None else _array(name, [_to_json(first)] * len(values))


def _to_json(value: object) -> str | None:
    return None if value is None else msgspec.json.encode(value).decode()


@lru_cache(maxsize=1024)
def _nothing(name: str, num_rows: int) -> pa.Array:
    return pa.nulls(num_rows, _types()[name])


@lru_cache(maxsize=1024)
def _no_parts(num_rows: int) -> pa.Array:
    return _array("reward_parts", [[]] * num_rows)
