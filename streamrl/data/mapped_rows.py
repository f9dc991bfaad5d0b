"""Rows that are read when their turn comes: JSON Lines by an index of offsets, Parquet by row groups, Arrow files from mapped memory.

What can only be read as a whole (`streamrl.data.formats`) is held.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from streamrl.config.paths import DatasetPath, parse_dataset
from streamrl.core.seeds import mix64
from streamrl.data.arrow_files import open_arrow
from streamrl.data.formats import Kind, find, one_schema, read_held
from streamrl.data.line_index import LONGEST_ROW, LineIndex, first_lines, line_index, open_data, sampled_digest
from streamrl.data.order import permuted, row_of
from streamrl.errors import DataError

WINDOW_BYTES = 128 << 20
"""Bytes, as its footer has them, of the row groups of a Parquet file that are shuffled together and held at a time."""
_lines = msgspec.json.Decoder()


class MappedRows(Protocol):
    """The used rows of one set. `read` decodes one; what it returns is not kept."""

    @property
    def path(self) -> str: ...

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of what is known of all rows: offsets, or counts of row groups. With sampled blocks it stands for the rows."""
        ...

    def __len__(self) -> int: ...

    def read(self, row: int) -> dict[str, Any]:
        """Row from 0; raises DataError when it is no table."""
        ...

    def line(self, row: int) -> int:
        """1-based line (JSON Lines) or row (Parquet, Arrow) of its file."""
        ...

    def order(self, seed: int, place: int, *, shuffle: bool) -> tuple[int, int]:
        """(pass, row) of the place-th item of endless passes, as `streamrl.data.order.row_of`: a function of its arguments and the set."""
        ...

    def check(self) -> None:
        """Raise DataError when a file is not any more what was opened."""
        ...


def open_mapped(text: str, kept: Path) -> MappedRows:
    """The rows that `path` or `path@[a:b]` names, without reading them all.

    Args:
        text: of a format that `streamrl.data.formats.find` tells apart.
        kept: folder for indices.

    Raises:
        DataError: no such set, one that cannot be read, or no rows.
    """
    dataset = parse_dataset(text)
    kind, path, files = find(dataset.path)
    if kind == Kind.ARROW:
        rows: MappedRows = _ArrowRows(path, files, dataset)
    elif kind == Kind.PARQUET:
        rows = _ParquetRows(path, files, dataset)
    elif kind == Kind.HELD:
        rows = _HeldRows(path, dataset)
    else:
        path = files[0]
        rows = _LineRows(path, dataset, line_index(path, kept / f"{hashlib.sha256(str(path).encode()).hexdigest()[:16]}.index"))
    return _some(rows, dataset)


def open_first(text: str, kept: Path, most: int) -> MappedRows:
    """At least the first `most` rows of the set, without going through a file of lines where its slice allows that.

    Args and raises as `open_mapped`.
    """
    dataset = parse_dataset(text)
    kind, _, [path, *_] = find(dataset.path)
    if kind != Kind.LINES or dataset.start or (dataset.stop or 0) < 0:
        return open_mapped(text, kept)
    stop = most if dataset.stop is None else min(most, dataset.stop)
    return _some(_LineRows(path, DatasetPath(str(path), 0, stop), first_lines(path, most)), dataset)


def _some(rows: MappedRows, dataset: DatasetPath) -> MappedRows:
    if len(rows) == 0:
        path = dataset.path
        raise DataError(f"expected at least one row in {dataset}, got none", hint="check the file and its slice", path=path, rows=0)
    return rows


def blocks_digest(text: str) -> str:
    """SHA-256 (hex) of the slice and of sampled blocks of each file of the set: known at once, whatever its size.

    The path is no part of it. Raises DataError as `open_mapped`.
    """
    dataset = parse_dataset(text)
    total = hashlib.sha256(f"{dataset.start}:{dataset.stop}".encode())
    for one in find(dataset.path).files:
        with open_data(one) as file:
            total.update(sampled_digest(file).encode())
    return total.hexdigest()


class _Files:
    """The part of a set's rows that is used, and its files, which must stay as they were opened."""

    _first: int
    _count: int

    def __init__(self, path: Path, files: Sequence[Path]) -> None:
        self.path = str(path)
        self._seen = [(file, self._state(file)) for file in files]

    def __len__(self) -> int:
        return self._count

    def line(self, row: int) -> int:
        return self._first + row + 1

    def order(self, seed: int, place: int, *, shuffle: bool) -> tuple[int, int]:
        return row_of(seed, place, self._count, shuffle=shuffle)

    def _cut(self, dataset: DatasetPath, num_rows: int) -> None:
        """Use those of all rows that the slice names."""
        start, stop, _ = slice(dataset.start, dataset.stop).indices(num_rows)
        self._first, self._count = start, max(0, stop - start)

    def check(self) -> None:
        for path, seen in self._seen:
            if self._state(path) != seen:
                raise DataError(
                    f"expected {path} to stay as it was when the run opened it, got another size or time of change",
                    hint="put the old file back and resume, or start a new run under another run.name",
                    path=str(path),
                )

    @staticmethod
    def _state(path: Path) -> tuple[int, int]:
        try:
            status = os.stat(path)
        except OSError as error:
            raise DataError(
                f"expected the dataset file {path}, got none any more: {error.strerror}", hint="put it back and resume", path=str(path)
            ) from error
        return status.st_size, status.st_mtime_ns


class _LineRows(_Files):
    def __init__(self, path: Path, dataset: DatasetPath, index: LineIndex) -> None:
        super().__init__(path, [path])
        self._index = index
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        self._size = os.fstat(self._file).st_size
        self._cut(dataset, len(self._index))
        self.digest = self._index.digest

    def read(self, row: int) -> dict[str, Any]:
        whole = self._first + row
        start = int(self._index.starts[whole])
        stop = int(self._index.starts[whole + 1]) if whole + 1 < len(self._index) else self._size
        if stop - start > LONGEST_ROW:
            raise self._broken(row, f"a line of {stop - start} bytes, of which at most {LONGEST_ROW} are read")
        try:
            found = _lines.decode(os.pread(self._file, stop - start, start))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._broken(row, str(error)) from error
        if not isinstance(found, dict):
            raise self._broken(row, f"a JSON {type(found).__name__}")
        return found

    def line(self, row: int) -> int:
        return self._index.line(self._first + row)

    def _broken(self, row: int, found: str) -> DataError:
        line = self.line(row)
        hint = "each line holds one JSON object; fix or remove this one"
        return DataError(f"expected a JSON object at {self.path} line {line}, got: {found}", hint=hint, path=self.path, line=line)


class _HeldRows(_Files):
    def __init__(self, path: Path, dataset: DatasetPath) -> None:
        super().__init__(path, [path])
        self._rows = read_held(path)
        with open_data(path) as file:
            self.digest = sampled_digest(file)
        self._cut(dataset, len(self._rows))

    def read(self, row: int) -> dict[str, Any]:
        return self._rows[self._first + row]

    def line(self, row: int) -> int:
        return self._rows.line(self._first + row)


class _ArrowRows(_Files):
    def __init__(self, path: Path, files: Sequence[Path], dataset: DatasetPath) -> None:
        super().__init__(path, files)
        self._table = open_arrow(path, list(files))
        self._cut(dataset, self._table.num_rows)
        counts = [chunk.num_rows for chunk in self._table.to_batches()]
        self.digest = hashlib.sha256(np.array(counts, np.int64).tobytes() + str(self._table.schema).encode()).hexdigest()

    def read(self, row: int) -> dict[str, Any]:
        return self._table.slice(self._first + row, 1).to_pylist()[0]


class _ParquetRows(_Files):
    """Row groups are decoded whole, so rows that follow each other have to be in few of them.

    A shuffled pass goes through windows of row groups, whose order and whose rows are permuted; a file within WINDOW_BYTES is one window,
    and permuted as any other.
    """

    def __init__(self, path: Path, files: Sequence[Path], dataset: DatasetPath) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        super().__init__(path, files)
        shards: list[pq.ParquetFile] = []
        for file in files:
            open_data(file).close()
            try:
                shards.append(pq.ParquetFile(file, memory_map=True))
            except (pa.ArrowException, OSError) as error:
                hint = "was it written completely?"
                raise DataError(f"expected a Parquet file, got {file}: {error}", hint=hint, path=str(file)) from error
        schemas = [shard.schema_arrow for shard in shards]
        one_schema(path, files, schemas)
        self._groups = [(shard, index) for shard in shards for index in range(shard.num_row_groups)]
        """File and number in it of each row group, in the order of the rows."""
        groups = [shard.metadata.row_group(index) for shard, index in self._groups]
        counts = np.array([group.num_rows for group in groups], np.int64)
        self._bytes = [max(1, group.total_byte_size) for group in groups]
        self._starts = np.concatenate(([0], np.cumsum(counts)))
        self.digest = hashlib.sha256(counts.tobytes() + str(schemas[0]).encode()).hexdigest()
        self._cut(dataset, int(self._starts[-1]))
        first, stop = self._first, self._first + self._count
        used = [g for g in range(len(groups)) if self._starts[g] < stop and self._starts[g + 1] > first and counts[g]]
        self._used = np.array(used, np.int64)
        self.held: OrderedDict[int, Any] = OrderedDict()
        self._windows: dict[int, tuple[Any, Any, Any]] = {}

    def read(self, row: int) -> dict[str, Any]:
        whole = self._first + row
        group = int(np.searchsorted(self._starts, whole, side="right")) - 1
        if group in self.held:
            self.held.move_to_end(group)
        else:
            self.held[group] = self._decode(group, row)
            # The newest always stays, however large it is.
            while len(self.held) > 1 and sum(self._bytes[one] for one in self.held) > WINDOW_BYTES:
                self.held.popitem(last=False)
        return self.held[group].slice(whole - int(self._starts[group]), 1).to_pylist()[0]

    def order(self, seed: int, place: int, *, shuffle: bool) -> tuple[int, int]:
        if not shuffle or sum(self._bytes[group] for group in self._used) <= WINDOW_BYTES:
            return row_of(seed, place, self._count, shuffle=shuffle)
        turn, place = divmod(place, self._count)
        key = mix64(mix64(seed) + turn)
        firsts, sizes, ends = self._windows_of(key)
        window = int(np.searchsorted(ends, place, side="right"))
        before = int(ends[window - 1]) if window else 0
        place = permuted(mix64(key + 1 + window), place - before, int(ends[window]) - before)
        within = np.cumsum(sizes[window])
        group = int(np.searchsorted(within, place, side="right"))
        return turn, int(firsts[window][group]) + place - (int(within[group - 1]) if group else 0) - self._first

    def _windows_of(self, key: int) -> tuple[Any, Any, Any]:
        """Of one pass: first rows and sizes of the used part of each row group by window, and how many rows have come with each window."""
        if key not in self._windows:
            firsts: list[list[int]] = [[]]
            sizes: list[list[int]] = [[]]
            held = 0
            for place in range(len(self._used)):
                group = int(self._used[permuted(key, place, len(self._used))])
                low = max(int(self._starts[group]), self._first)
                high = min(int(self._starts[group + 1]), self._first + self._count)
                if firsts[-1] and held + self._bytes[group] > WINDOW_BYTES:
                    firsts.append([])
                    sizes.append([])
                    held = 0
                held += self._bytes[group]
                firsts[-1].append(low)
                sizes[-1].append(high - low)
            self._windows = {key: (firsts, sizes, np.cumsum([sum(one) for one in sizes]))}
        return self._windows[key]

    def _decode(self, group: int, row: int) -> Any:
        import pyarrow as pa

        try:
            shard, index = self._groups[group]
            return shard.read_row_group(index, use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"expected row group {group} of {self.path} to be readable (row {self.line(row)}), got: {error}",
                hint="was it written completely?",
                path=self.path,
                line=self.line(row),
            ) from error
