"""A name of rows stands for one file of some format, the shards of a folder or a pattern; and the formats that are read whole.

JSON Lines, Parquet and Arrow are read a row at a time (`streamrl.data.mapped_rows`). An array in a `.json` file, `.csv`, `.tsv` and what
gzip has packed cannot be: they are decoded as a whole, up to LARGEST bytes. What is not read is refused with the line that converts it.
"""

from __future__ import annotations

import csv
import glob
import gzip
import io
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from streamrl.data.arrow_files import SPLITS_FILE, STATE_FILE, arrow_files
from streamrl.data.line_index import open_data
from streamrl.errors import DataError

LARGEST = 1 << 30
"""Bytes of a file, unpacked, that is decoded as a whole."""
_CONVERT = {
    ".zst": "zstd -d {}",
    ".bz2": "bunzip2 --keep {}",
    ".xz": "xz --decompress --keep {}",
    ".zip": "unzip {}",
    ".xlsx": "python -c \"import pandas; pandas.read_excel('{}').to_json('rows.jsonl', orient='records', lines=True)\"",
    ".pkl": "python -c \"import pandas; pandas.read_pickle('{}').to_json('rows.jsonl', orient='records', lines=True)\"",
    ".feather": "python -c \"import pandas; pandas.read_feather('{}').to_parquet('rows.parquet')\"",
}
"""Commands that make of a file one that is read, by its suffix."""
_PACKED = {
    ".tar.gz": "tar xzf {}",
    ".tgz": "tar xzf {}",
    ".parquet.gz": "gunzip --keep {}",
    ".arrow.gz": "gunzip --keep {}",
}
"""The same by the end of a name."""
_SHARD = re.compile(r"(?P<split>.+?)-\d+-of-\d+")
_GZIP = b"\x1f\x8b"
_broken_lines = msgspec.json.Decoder()


def place_of(path: str, number: int) -> str:
    """Return the words for a row: its number in Parquet and Arrow files, folders and patterns, its line in a text; both count from 1."""
    columns = path.endswith((".parquet", ".arrow")) or any(mark in path for mark in "*?[") or Path(path).is_dir()
    return f"{path} {'row' if columns else 'line'} {number}"


class Kind(StrEnum):
    """Ways in which a set is read."""

    LINES = "lines"
    PARQUET = "parquet"
    ARROW = "arrow"
    HELD = "held"
    """Decoded as a whole."""


class Found(NamedTuple):
    """The files of a name."""

    kind: Kind
    path: Path
    """As it was named, `~` written out."""
    files: tuple[Path, ...]
    """Shards in their order; several of PARQUET and ARROW only."""


def find(name: str) -> Found:
    """The files that a name of rows stands for.

    Args:
        name: a file; a folder that `datasets` has saved, or of Parquet files; or a pattern such as `data/train-*.parquet`.

    Raises:
        DataError: there is none, a folder or a pattern of something else, or a format that is not read (with the command that converts it).
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if (path / STATE_FILE).is_file() or (path / SPLITS_FILE).is_file():
            return Found(Kind.ARROW, path, tuple(arrow_files(path)))
        return Found(Kind.PARQUET, path, _shards(path))
    if path.exists() or not glob.has_magic(str(path)):
        return Found(_kind(path), path, (path,))
    files = tuple(Path(one) for one in sorted(glob.glob(str(path), recursive=True)))
    kinds = {_kind(file) for file in files}
    if not files:
        hint = "check the pattern; in a TOML file it is relative to its folder"
        raise DataError(f"expected files of the pattern {path}, got none", hint=hint, path=str(path))
    if len(files) > 1 and (len(kinds) > 1 or not kinds <= {Kind.PARQUET, Kind.ARROW}):
        raise DataError(
            f"expected one file, or several of Parquet or of Arrow, got {len(files)} of the pattern {path}: {_names(files)}",
            hint=f"`cat {path} > rows.jsonl` makes one of files of JSON Lines",
            path=str(path),
        )
    return Found(kinds.pop(), path, files)


class HeldRows:
    """Rows that are decoded. One that could not be is raised when it is asked for.

    Args:
        path: of the file.
        rows: tables, or what was wrong with them.
        lines: 1-based line of each, or its number in an array.
    """

    def __init__(self, path: str, rows: Sequence[dict[str, Any] | DataError], lines: Sequence[int]) -> None:
        self.path = path
        self._rows = rows
        self._lines = lines

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._rows[index]
        if isinstance(row, DataError):
            raise DataError(row.message, hint=row.hint, **row.values)
        return row

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    def line(self, index: int) -> int:
        """1-based line of a row, or its number in an array."""
        return self._lines[index]

    def cut(self, window: slice) -> HeldRows:
        """Return the rows that a slice names."""
        return HeldRows(self.path, self._rows[window], self._lines[window])


def read_held(path: Path) -> HeldRows:
    """All rows of an array in a `.json` file, a `.csv` or `.tsv`, or one of these or JSON Lines packed by gzip.

    Of `.csv` the first line names the fields; values are texts, and an empty one is null.

    Raises:
        DataError: the file is not there, damaged, larger than LARGEST, or no such format.
    """
    data, inner = _unpacked(path)
    read = _READERS.get(inner.suffix.lower(), _of_lines)
    found = list(read(data, str(path)))
    return HeldRows(str(path), [row for _, row in found], [line for line, _ in found])


_Row = tuple[int, dict[str, Any] | DataError]


def _kind(path: Path) -> Kind:
    suffix = path.suffix.lower()
    packed = next((command for ends, command in _PACKED.items() if path.name.lower().endswith(ends)), "")
    if command := (packed or _CONVERT.get(suffix, "")).format(path):
        raise DataError(
            f"expected JSON Lines, Parquet, Arrow, CSV or a JSON array, got {path}", hint=f"convert it: `{command}`", path=str(path)
        )
    if suffix in (".parquet", ".arrow"):
        return Kind(suffix[1:])
    if suffix in (".csv", ".tsv", ".gz") or (suffix == ".json" and _first(path) == b"["):
        return Kind.HELD
    return Kind.LINES


def _first(path: Path) -> bytes:
    """The first byte of a file that is neither white space nor of a byte-order mark; none where there is none."""
    try:
        with path.open("rb") as file:
            return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    except OSError:
        return b""


def _shards(path: Path) -> tuple[Path, ...]:
    """The Parquet files of a folder, which are those of one split."""
    files = tuple(sorted(file for file in path.glob("*.parquet") if file.is_file()))
    splits = sorted({found["split"] if (found := _SHARD.fullmatch(file.stem)) else file.stem for file in files if file.stem})
    named = [split for split in splits if split in ("train", "test", "validation", "dev")]
    if named and len(splits) > 1:
        raise DataError(
            f"expected the files of one split in {path}, got those of {', '.join(splits)}",
            hint=f"name one, as in {path}/{'train' if 'train' in splits else named[0]}*.parquet",
            path=str(path),
        )
    if files:
        return files
    inside = sorted({file.parent for file in path.glob("*/*.parquet")})
    lines = sorted(path.glob("*.jsonl"))
    hint = "check the path; in a TOML file it is relative to its folder"
    if inside:
        hint = f"name one of its folders, as in {inside[0]}"
    elif lines:
        hint = f"name a file, as in {lines[0]}" if len(lines) == 1 else f"make one of them: `cat {path}/*.jsonl > rows.jsonl`"
    raise DataError(
        f"expected a file, a folder of Parquet files, or one that datasets' save_to_disk has written, got neither in {path}",
        hint=hint,
        path=str(path),
    )


def _unpacked(path: Path) -> tuple[bytes, Path]:
    """The bytes of a file, unpacked where gzip has packed it, and the name without its `.gz`."""
    packed = path.suffix.lower() == ".gz"
    try:
        with open_data(path) as raw:
            if packed and raw.read(2) != _GZIP:
                size = path.stat().st_size
                raise DataError(
                    f"expected a file that gzip has packed, got {f'another in {path}' if size else f'no byte in {path}'}",
                    hint="was it written completely? a file that is not packed is to be named without .gz",
                    path=str(path),
                )
            raw.seek(0)
            data = (gzip.GzipFile(fileobj=raw) if packed else raw).read(LARGEST + 1)
    except (EOFError, OSError, zlib.error) as error:
        hint = "was it written completely?"
        raise DataError(f"expected a file that can be read, got {path}: {error}", hint=hint, path=str(path)) from error
    if len(data) > LARGEST:
        hint = f"unpack it: `gunzip --keep {path}`" if packed else "write it as JSON Lines or Parquet, which are read a row at a time"
        raise DataError(f"expected at most {LARGEST} bytes in {path}, which is decoded as a whole, got more", hint=hint, path=str(path))
    return data, path.with_suffix("") if packed else path


def _of_lines(data: bytes, path: str) -> Iterator[_Row]:
    for line, text in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if text.strip():
            yield line, _table(text, path, line)


def _of_array(data: bytes, path: str) -> Iterator[_Row]:
    data = data.removeprefix(b"\xef\xbb\xbf")
    if data.lstrip()[:1] != b"[":
        yield from _of_lines(data, path)
        return
    try:
        rows = msgspec.json.decode(data, type=list[msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"expected a JSON array in {path}, got: {error}", hint="was it written completely?", path=path) from error
    for number, row in enumerate(rows, 1):
        yield number, _table(bytes(row), path, number)


def _table(text: bytes, path: str, line: int) -> dict[str, Any] | DataError:
    try:
        row = _broken_lines.decode(text)
        found = "" if isinstance(row, dict) else f"a JSON {type(row).__name__}"
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        row, found = None, str(error)
    if isinstance(row, dict):
        return row
    hint = "each row is one JSON object; fix or remove this one"
    return DataError(f"expected a JSON object at {path} line {line}, got: {found}", hint=hint, path=path, line=line)


def _of_csv(separator: str) -> Callable[[bytes, str], Iterator[_Row]]:
    def read(data: bytes, path: str) -> Iterator[_Row]:
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            hint = f"convert it: `iconv -f latin1 -t utf-8 {path} > rows.csv`"
            raise DataError(f"expected UTF-8 in {path}, got: {error}", hint=hint, path=path) from error
        csv.field_size_limit(LARGEST)
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
        names: list[str] = []
        line = 1
        try:
            for values in reader:
                if not names:
                    names = _names_of(values, path)
                elif values:
                    yield line, _record(names, values, path, line)
                line = reader.line_num + 1
        except csv.Error as error:
            raise DataError(
                f"expected CSV at {path} line {line}, got: {error}", hint="a quote within quotes is written twice", path=path, line=line
            ) from error

    return read


def _names_of(values: list[str], path: str) -> list[str]:
    if not all(values) or len(set(values)) < len(values):
        raise DataError(
            f"expected the names of fields, each once, in the first line of {path}, got {', '.join(map(repr, values))[:200]}",
            hint="write a first line that names the columns",
            path=path,
            line=1,
        )
    return values


def _record(names: list[str], values: list[str], path: str, line: int) -> dict[str, Any] | DataError:
    if len(values) != len(names):
        return DataError(
            f"expected {len(names)} fields at {path} line {line}, got {len(values)}",
            hint="a field with a comma, a quote or a new line stands in quotes",
            path=path,
            line=line,
        )
    return {name: value or None for name, value in zip(names, values, strict=True)}


def one_schema(path: Path, files: Sequence[Path], schemas: Sequence[Any]) -> Any:
    """The Arrow schema of all shards, in which a column may be all null in some of them.

    Raises:
        DataError: shards with other fields, or the same ones of other types.
    """
    import pyarrow as pa

    bare = [schema.remove_metadata() for schema in schemas]
    for file, schema in zip(files, bare, strict=True):
        differ = sorted(set(schema.names) ^ set(bare[0].names))
        said = f"the fields {', '.join(differ)} of one of them alone" if differ else ""
        try:
            pa.unify_schemas([bare[0], schema])
        except pa.ArrowException as error:
            said = said or str(error)
        if said:
            raise DataError(
                f"expected shards of one schema in {path}, got in {files[0].name} and {file.name}: {said}",
                hint="name those that belong together, as in train-*.parquet, or write them again with one schema",
                path=str(path),
            )
    return pa.unify_schemas(bare)


def _names(files: Sequence[Path]) -> str:
    return ", ".join(file.name for file in files[:3]) + (" ..." if len(files) > 3 else "")


_READERS = {".json": _of_array, ".csv": _of_csv(","), ".tsv": _of_csv("\t")}
"""Readers by suffix, without `.gz`; any other is JSON Lines."""
