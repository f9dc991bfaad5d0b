"""A decoded message of samples: numpy views of the message's own bytes, no token is copied.

Letters: `N` rows, `T` tokens of the whole message. The columns are those of `streamrl.schemas.columns`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from functools import cache, cached_property
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamrl.errors import SchemaError
from streamrl.schemas.blobs import BlobRef
from streamrl.schemas.columns import BLOBS, IMAGES, OPTIONAL, SCALARS, TURNS, arrow_schema, canonical
from streamrl.schemas.images import Image
from streamrl.schemas.samples import Branch, LogprobMode, Sample, Status, TurnSpan, VersionSpan
from streamrl.schemas.tasks import Sampling, turn_sampling
from streamrl.schemas.versions import Version

_SAME = (
    "run", "policy", "source", "task", "rollout", "sample", "group_size", "num_samples", "data_epoch", "reward", "finish_reason", "seed",
    "engine", "producer", "started_s", "finished_s",
)  # fmt: skip
"""Columns that are fields of a Sample as they are."""


@cache
def _places() -> dict[str, int]:
    return {name: place for place, name in enumerate(arrow_schema().names)}


@cache
def _numpy_types() -> dict[str, np.dtype[Any]]:
    """Of the flat numeric columns, and of the values of the lists."""
    kinds = {field.name: field.type.value_type if pa.types.is_list(field.type) else field.type for field in arrow_schema()}
    numbers = {name: kind for name, kind in kinds.items() if pa.types.is_integer(kind) or pa.types.is_floating(kind)}
    return {name: np.dtype(kind.to_pandas_dtype()) for name, kind in numbers.items()}


@cache
def _scalar_types() -> dict[str, np.dtype[Any]]:
    return {name: np.dtype(OPTIONAL[name].to_pandas_dtype()) for name in SCALARS}


_PLAIN = Sampling()


class _Said(msgspec.Struct):
    """Of what a turn says of its sampling."""

    logit_bias: dict[int, float] | None = None


class _OfSource(msgspec.Struct):
    data_source: str = ""


class SampleBatch:
    """A decoded message: the record batch and numpy views of its columns. Keeps the message's bytes alive.

    Args:
        batch: of `arrow_schema` with those `OPTIONAL` columns that hold something.
        columns: its columns.
        nbytes: what the message takes.
    """

    def __init__(self, batch: pa.RecordBatch, columns: list[pa.Array], nbytes: int) -> None:
        self.batch = batch
        self.nbytes = nbytes
        self.num_rows: int = batch.num_rows
        self._columns = columns
        self._texts: dict[str, list[str]] = {}
        self._bounds: dict[str, npt.NDArray[np.int32]] = {}
        self.task = int(self.ints("task")[0])
        self.source: str = self._column("source")[0].as_py()
        self.group_size = int(self.ints("group_size")[0])
        self.rollouts = self.ints("rollout")
        """[N] int32"""
        self.tokens = self._list("tokens")
        """[T] int32"""
        self.loss_mask = self._list("loss_mask")
        """[T] uint8"""
        self.logprobs = self._list("logprobs")
        """[T] float32"""
        self.span_length = self._list("span_length")
        self.span_epoch = self._list("span_epoch")
        self.span_number = self._list("span_number")
        self.offsets = self._offsets("tokens")
        """[N + 1] int64: row i has the tokens from offset i to the next one."""
        self.span_offsets = self._offsets("span_length")
        """[N + 1] int64: row i has the version spans from offset i to the next one."""

    def _column(self, name: str) -> pa.Array:
        return self._columns[_places()[name]]

    @cached_property
    def _optional_places(self) -> dict[str, int]:
        base = len(_places())
        return {name: place for place, name in enumerate(self.batch.schema.names[base:], base)}

    @property
    def optional_names(self) -> Set[str]:
        """Those of the `OPTIONAL` columns that the message has."""
        return self._optional_places.keys()

    def scalars(self, name: str) -> npt.NDArray[Any]:
        """[N] values of one of the `SCALARS` columns that the message has, 0 where there are none."""
        column = self.batch.column(self._optional_places[name])
        return _values(column.fill_null(0) if column.null_count else column, _scalar_types()[name])

    def optional(self, name: str) -> list[Any] | None:
        """[N] values of one of the `OPTIONAL` columns, None where there are none; None when the message has no such column."""
        place = self._optional_places.get(name)
        return None if place is None else self.batch.column(place).to_pylist()

    def _turns_with(self, name: str) -> Iterator[tuple[slice, Any]]:
        """Where the tokens of each turn are that says something in this column of turns, and what."""
        if (said := self.optional(f"turn_{name}")) is None:
            return
        starts, lengths = self.optional("turn_start") or [], self.optional("turn_length") or []
        for first, *turns in zip(self.offsets.tolist(), starts, lengths, said, strict=False):
            for start, length, value in zip(*(values or () for values in turns), strict=True):
                if value:
                    yield slice(first + start, first + start + length), value

    @cached_property
    def inexact(self) -> npt.NDArray[np.bool_] | None:
        """[T] whether the version of the token is a guess; None when none is."""
        found = np.zeros(len(self.tokens), np.bool_)
        for where, _ in self._turns_with("inexact"):
            found[where] = True
        return found if found.any() else None

    def drawn_at(self, name: str) -> npt.NDArray[Any]:
        """[T] of each token its turn's value, or else its row's: of `temperature`, `top_p`, `min_p` (float32) or `top_k` (int32)."""
        found = np.repeat(self._min_ps() if name == "min_p" else self.ints(name), self.lengths)
        for where, text in self._turns_with("sampling"):
            if name in (said := msgspec.json.decode(text)):
                found[where] = said[name]
        return found

    def _min_ps(self) -> npt.NDArray[np.float32]:
        return np.array([later.min_p for later in self.later], np.float32) if self.later else np.zeros(self.num_rows, np.float32)

    @cached_property
    def later(self) -> list[Sampling]:
        """[N] a Sampling of what each row says beyond the columns that every message has; none where no row says anything."""
        texts = self.optional("sampling") or []
        return [Sampling() if text is None else msgspec.json.decode(text, type=Sampling) for text in texts]

    @cached_property
    def logit_biases(self) -> tuple[npt.NDArray[np.int32], tuple[dict[int, float], ...]]:
        """[T] which of the biases each token was drawn with, -1 where none; and the biases, each of at least one token."""
        own = [later.logit_bias for later in self.later] or [{}] * self.num_rows
        turns = [(where, said.logit_bias) for where, said in self._turns_said() if said.logit_bias is not None]
        biases = tuple({tuple(sorted(bias.items())): bias for bias in (*own, *(bias for _, bias in turns)) if bias}.values())
        places = np.array([biases.index(bias) if bias else -1 for bias in own], np.int32)
        found = np.repeat(places, self.lengths)
        for where, bias in turns:
            found[where] = biases.index(bias) if bias else -1
        return found, biases

    @cached_property
    def uncomputed(self) -> npt.NDArray[np.bool_]:
        """[T] whether each token was drawn, by what its turn or its row says, from a distribution that no trainer computes."""
        found = np.repeat([later.inexact for later in self.later] or np.zeros(self.num_rows, np.bool_), self.lengths)
        rows = np.repeat(np.arange(self.num_rows), self.lengths)
        for where, text in self._turns_with("sampling"):
            row = self.later[rows[where.start]] if self.later else Sampling()
            found[where] = turn_sampling(row, msgspec.json.decode(text)).inexact
        return found

    def _turns_said(self) -> Iterator[tuple[slice, _Said]]:
        for where, text in self._turns_with("sampling"):
            yield where, msgspec.json.decode(text, type=_Said)

    def ints(self, name: str) -> npt.NDArray[Any]:
        """[N] values of a flat numeric column that has no nulls."""
        return _values(self._column(name), _numpy_types()[name])

    def texts(self, name: str) -> list[str]:
        """[N] values of a column of text that has no nulls."""
        if name not in self._texts:
            self._texts[name] = self._column(name).to_pylist()
        return self._texts[name]

    def parts(self, starts: npt.NDArray[np.int64], sizes: Sequence[int]) -> Sequence[SampleBatch]:
        """The messages that this one was joined of.

        Args:
            starts: [M] row with which each of them begins.
            sizes: bytes of each.
        """
        ends = [*starts[1:].tolist(), self.num_rows]
        return [_Part(self, first, end, nbytes) for first, end, nbytes in zip(starts.tolist(), ends, sizes, strict=True)]

    def _list(self, name: str) -> npt.NDArray[Any]:
        column = self._column(name)
        bounds = np.frombuffer(column.buffers()[1], np.int32, self.num_rows + 1, 4 * column.offset)
        self._bounds[name] = bounds
        return _values(column.values, _numpy_types()[name])[bounds[0] : bounds[-1]]

    def _offsets(self, name: str) -> npt.NDArray[np.int64]:
        bounds = self._bounds[name].astype(np.int64)
        return bounds - bounds[0]

    def same_offsets(self, first: str, *others: str) -> bool:
        """Whether the lists of these columns are equally long, row by row."""
        bounds = self._bounds[first]
        same = bounds.tobytes()
        # Mostly they are the same numbers; sliced columns may begin elsewhere.
        return all(o.tobytes() == same or np.array_equal(o - o[0], bounds - bounds[0]) for o in (self._bounds[name] for name in others))

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[N] tokens of each row."""
        return self.offsets[1:] - self.offsets[:-1]

    @cached_property
    def rewards(self) -> npt.NDArray[np.float64]:
        """[N] float64, NaN where there is none."""
        column = self._column("reward")
        if not column.null_count:
            return _values(column, np.dtype(np.float64))
        return np.array([np.nan if value is None else value for value in column.to_pylist()])

    @cached_property
    def agents(self) -> list[str]:
        """[N] the agent of each row, empty where it has none; none at all where no row has one."""
        return [name or "" for name in self.optional("agent") or ()]

    @cached_property
    def agent_rewards(self) -> list[float | None]:
        """[N] the reward of each row's agent; None where it has no agent, or that no reward yet."""
        return self.optional("agent_reward") or [None] * self.num_rows

    def token_versions(self) -> npt.NDArray[np.int64]:
        """[T] version number that sampled each token, -1 where no model did."""
        return np.repeat(self.span_number, self.span_length)

    @cached_property
    def trained_in_spans(self) -> npt.NDArray[np.int64]:
        """[number of spans] tokens that are trained on in each version span, of all rows."""
        return self.in_spans(self.loss_mask)

    def in_spans(self, mask: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """[number of spans] tokens of `mask` ([T] of 0 and 1) in each version span, of all rows."""
        starts = np.cumsum(self.span_length, dtype=np.int64) - self.span_length
        return np.add.reduceat(mask, starts, dtype=np.int64)

    def data_source(self) -> str:
        """`data_source` of its first row's metadata, cut to 64 characters; empty where there is none, or no text."""
        text = self._column("metadata")[0].as_py()
        if not text or '"data_source"' not in text:
            return ""
        try:
            found = msgspec.json.decode(text, type=_OfSource).data_source
        except (msgspec.MsgspecError, RecursionError):
            return ""
        return found[:64]

    def reward_part(self, name: str) -> npt.NDArray[np.float64]:
        """[N] float64: the part of this name of each sample's reward, NaN where it has none."""
        parts = self._column("reward_parts")
        return np.array([dict(row or ()).get(name, np.nan) for row in parts.to_pylist()], np.float64)

    def reward_part_names(self) -> frozenset[str]:
        """Names of the parts that its samples' rewards have."""
        parts = self._column("reward_parts")
        return frozenset(name for row in parts.to_pylist() for name, _ in row or ()) if len(parts.keys) else frozenset()

    def rows(self) -> list[Sample]:
        """Every row as a Sample (views of the same bytes); raises SchemaError when a label or metadata is no JSON."""
        return [self._row(index, values) for index, values in enumerate(self.batch.to_pylist())]

    def _row(self, index: int, values: dict[str, Any]) -> Sample:
        start, end = self.offsets[index], self.offsets[index + 1]
        spans = zip(values["span_length"], values["span_epoch"], values["span_number"], strict=True)
        sampling = msgspec.structs.replace(
            self.later[index] if self.later else _PLAIN,
            max_new_tokens=values["max_new_tokens"],
            temperature=values["temperature"],
            top_p=values["top_p"],
            top_k=values["top_k"],
            stop_token_ids=tuple(values["stop_token_ids"] or ()),
            ignore_eos=bool(values["ignore_eos"]),
        )
        return Sample(
            **{name: values[name] for name in _SAME},
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
            **_more(values),
        )


class _Part(SampleBatch):
    """Rows `first` .. `end - 1` of a larger batch, made of that one's views: an eighth of the time that columns of its own take."""

    def __init__(self, whole: SampleBatch, first: int, end: int, nbytes: int) -> None:
        tokens, spans = whole.offsets[first : end + 1], whole.span_offsets[first : end + 1]
        of_tokens, of_spans = slice(tokens[0], tokens[-1]), slice(spans[0], spans[-1])
        self._whole = whole
        self._rows = slice(first, end)
        self.nbytes = nbytes
        self.num_rows = end - first
        self.task = int(whole.ints("task")[first])
        self.source = whole._column("source")[first].as_py()
        self.group_size = int(whole.ints("group_size")[first])
        self.rollouts = whole.rollouts[self._rows]
        self.tokens = whole.tokens[of_tokens]
        self.loss_mask = whole.loss_mask[of_tokens]
        self.logprobs = whole.logprobs[of_tokens]
        self.span_length = whole.span_length[of_spans]
        self.span_epoch = whole.span_epoch[of_spans]
        self.span_number = whole.span_number[of_spans]
        self.offsets = tokens - tokens[0]
        self.span_offsets = spans - spans[0]
        self.rewards = whole.rewards[self._rows]
        self.trained_in_spans = whole.trained_in_spans[of_spans]
        inexact = None if whole.inexact is None else whole.inexact[of_tokens]
        self.inexact = inexact if inexact is not None and inexact.any() else None

    @cached_property
    def batch(self) -> pa.RecordBatch:
        return canonical(self._whole.batch.slice(self._rows.start, self.num_rows))

    def _column(self, name: str) -> pa.Array:
        return self._whole._column(name).slice(self._rows.start, self.num_rows)

    def optional(self, name: str) -> list[Any] | None:
        # Not of `batch`: to make that costs more than all else that is done with a small message.
        place = self._whole._optional_places.get(name)
        if place is None:
            return None
        column = self._whole.batch.column(place).slice(self._rows.start, self.num_rows)
        return None if column.null_count == self.num_rows else column.to_pylist()

    def texts(self, name: str) -> list[str]:
        return self._whole.texts(name)[self._rows]

    def ints(self, name: str) -> npt.NDArray[Any]:
        return self._whole.ints(name)[self._rows]


def _more(values: dict[str, Any]) -> dict[str, Any]:
    """What a row has in the `OPTIONAL` columns, as fields of a Sample."""
    found: dict[str, Any] = {}
    if values.get("turn_start") is not None:
        found["turns"] = tuple(_turns(values))
    if values.get("branch_parent") is not None:
        found["branch"] = Branch(values["branch_parent"], values["branch_shared"])
    for name in BLOBS:
        if values.get(name) is not None:
            found[name] = BlobRef(**values[name])
    if values.get("image_sha256") is not None:
        found["image_rows"] = tuple(map(Image, *(values[f"image_{name}"] for name in IMAGES)))
    for name in SCALARS:
        if values.get(name) is not None:
            found[name] = values[name]
    if values.get("counters") is not None:
        found["counters"] = dict(values["counters"])
    if values.get("agent") is not None:
        found["agent"], found["agent_reward"] = values["agent"], values.get("agent_reward")
    return found


def _turns(values: dict[str, Any]) -> Iterator[TurnSpan]:
    given = {name: values[f"turn_{name}"] for name in TURNS if values.get(f"turn_{name}") is not None}
    for row in zip(*given.values(), strict=True):
        turn = {name: value for name, value in zip(given, row, strict=True) if value is not None}
        if "sampling" in turn:
            turn["sampling"] = _from_json(turn["sampling"])
        yield TurnSpan(**turn)


def _from_json(text: str | None) -> object:
    if text is None:
        return None
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise SchemaError(f"expected JSON in a label or in metadata, got {text[:80]!r}: {error}") from error


def _values(column: pa.Array, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """A view of a flat column's values; what pyarrow's own conversion gives, without its look for pandas."""
    data, length = column.buffers()[1], len(column)
    return np.empty(0, dtype) if data is None or not length else np.frombuffer(data, dtype, length, dtype.itemsize * column.offset)
