"""Dataset files of all formats (`streamrl.data.formats`), whole or as a slice (`rows.jsonl@[0:100]`), with errors that name the line."""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from streamrl.config.paths import parse_dataset
from streamrl.data.arrow_files import open_arrow
from streamrl.data.formats import Kind, find, one_schema, read_held
from streamrl.data.line_index import open_data
from streamrl.data.messages import without_nulls
from streamrl.errors import DataError

_canonical = msgspec.json.Encoder(order="deterministic")
_lines = msgspec.json.Decoder()


class Rows(Protocol):
    """The used rows of one file, decoded when asked for. Iteration and `[i]` give plain tables; i counts used rows from 0."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    def __iter__(self) -> Iterator[dict[str, Any]]: ...

    def line(self, index: int) -> int:
        """1-based line (JSONL) or row (Parquet) of the file."""
        ...

    @property
    def path(self) -> str: ...


R = TypeVar("R", bound=Rows)


def open_rows(text: str) -> Rows:
    """The rows that `path` or `path@[a:b]` names.

    Their formats are those that `streamrl.data.formats.find` tells apart; anything else is JSONL (blank lines are no rows).

    Every used row is decoded once here, so that a broken one is found before the run starts. A byte-order mark is no part of the
    first. Raises DataError: missing or unreadable file, lines that are no JSON objects (the first: `values["line"]`), no rows at all.
    """
    dataset = parse_dataset(text)
    kind, path, files = find(dataset.path)
    for file in files:
        open_data(file).close()
    window = slice(dataset.start, dataset.stop)
    if kind == Kind.ARROW:
        rows: Rows = _sliced(path, open_arrow(path, list(files)), window)
    elif kind == Kind.PARQUET:
        rows = _parquet(path, files, window)
    elif kind == Kind.HELD:
        rows = _checked(read_held(files[0]).cut(window))
    else:
        rows = _jsonl(files[0], window)
    if len(rows) == 0:
        raise DataError(f"expected at least one row in {dataset}, got none", hint="check the file and its slice", path=str(path), rows=0)
    return rows


def digest(rows: Rows) -> str:
    """SHA-256 (hex) over the rows' contents in order: the same for one dataset as JSONL and as Parquet, whatever its formatting.

    Fields that are null are no part of it, at any depth: Arrow gives each row all fields of the table.
    """
    total = hashlib.sha256()
    for row in rows:
        plain = without_nulls(row)
        try:
            encoded = _canonical.encode(plain)
        except OverflowError:  # an integer beyond 64 bits, in a field that no task has
            encoded = json.dumps(plain, sort_keys=True, default=str).encode()
        total.update(len(encoded).to_bytes(8, "little") + encoded)
    return total.hexdigest()


class BadRows:
    """Counts rows that raise DataError inside `with`, so that all of a file are looked at before the first of them is named.

    Args:
        num_rows: of the file.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._first: DataError | None = None
        self._num_bad = 0

    def __enter__(self) -> None:
        """One row."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if not isinstance(error, DataError):
            return False
        self._first = self._first or error
        self._num_bad += 1
        return True

    def check(self) -> None:
        """Raise DataError for the first bad row, with their number where there are several (`values["bad"]`)."""
        if self._first is None:
            return
        first, count = self._first, self._num_bad
        more = f"; {count} of {self._num_rows} rows cannot be used" if count > 1 else ""
        raise DataError(first.message + more, hint=first.hint, **first.values, bad=count) from first


class JsonlRows:
    """Lines of one file, held as bytes. `starts` [n] and `stops` [n] are byte offsets, `lines` [n] 1-based line numbers."""

    def __init__(
        self, path: str, data: bytes, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64], lines: npt.NDArray[np.int64]
    ) -> None:
        self.path = path
        self._data = memoryview(data)
        self._starts, self._stops, self._lines = starts, stops, lines

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        try:
            row = _lines.decode(self._data[self._starts[index] : self._stops[index]])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._broken(index, str(error)) from error
        if not isinstance(row, dict):
            raise self._broken(index, f"a JSON {type(row).__name__}")
        return row

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    def line(self, index: int) -> int:
        return int(self._lines[index])

    def _broken(self, index: int, found: str) -> DataError:
        line = self.line(index)
        hint = "each line holds one JSON object; fix or remove this one"
        return DataError(f"expected a JSON object at {self.path} line {line}, got: {found}", hint=hint, path=self.path, line=line)


class TableRows:
    """Rows held as Arrow columns; `first` is the 0-based row of the file that [0] is."""

    def __init__(self, path: str, table: Any, first: int) -> None:
        self.path = path
        self._table = table
        self._first = first

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._table.slice(index % len(self), 1).to_pylist()[0]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self._table.to_batches(max_chunksize=1024):
            yield from batch.to_pylist()

    def line(self, index: int) -> int:
        return self._first + index + 1


def _jsonl(path: Path, window: slice) -> JsonlRows:
    data = path.read_bytes()
    edges = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n")).astype(np.int64)
    begin = len(codecs.BOM_UTF8) if data.startswith(codecs.BOM_UTF8) else 0
    starts, stops = np.concatenate(([begin], edges + 1)), np.concatenate((edges, [len(data)]))
    filled = np.array([bool(data[start:stop].strip()) for start, stop in zip(starts, stops, strict=True)])
    lines = np.flatnonzero(filled) + 1
    return _checked(JsonlRows(str(path), data, starts[filled][window], stops[filled][window], lines[window]))


def _checked(rows: R) -> R:
    """The rows, after a look at each; raises DataError for the first that cannot be read."""
    bad = BadRows(len(rows))
    for index in range(len(rows)):
        with bad:
            rows[index]
    bad.check()
    return rows


def _parquet(path: Path, files: Sequence[Path], window: slice) -> TableRows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables: list[Any] = []
    for file in files:
        try:
            tables.append(pq.ParquetFile(file, memory_map=True).read())
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"expected a Parquet file, got {file}: {error}", hint="was it written completely?", path=str(file)) from error
    schema = one_schema(path, files, [table.schema for table in tables])
    return _sliced(path, pa.concat_tables([table.select(schema.names).cast(schema) for table in tables]), window)


def _sliced(path: Path, table: Any, window: slice) -> TableRows:
    start, stop, _ = window.indices(table.num_rows)
    return TableRows(str(path), table.slice(start, max(0, stop - start)), start)
