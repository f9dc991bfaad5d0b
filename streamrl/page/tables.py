"""Columns of numbers on disk, appended to as a run goes: what charts of 10^5 batches are drawn from without reading them all into memory.

A table is a folder with a file of float64 a column, NaN where a row has no value. How many rows count is in `state.json` beside the
tables, replaced as a whole after the columns were written: what a crash left behind those rows is cut, so nothing is there twice.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias
from urllib.parse import quote, unquote

import msgspec
import numpy as np
import numpy.typing as npt

Numbers: TypeAlias = npt.NDArray[np.float64]
FORMAT = 1
_BYTES = 8
_NAME = re.compile(r"^[A-Za-z0-9_:.-]{1,200}$")


class State(msgspec.Struct, kw_only=True):
    """The content of `state.json`."""

    format: int = FORMAT
    rows: dict[str, int] = {}
    """By table, how many rows count."""
    marks: dict[str, int] = {}
    """How far each source has been read, as the reader means it."""


class Tables:
    """The tables of a folder; one process at a time may write. A folder that cannot be read is begun anew.

    Rows that were added are there for `column` once they are committed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pending: dict[str, list[Mapping[str, float]]] = {}
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._state = self._load()
        for table in self._state.rows:
            self._cut(table)

    def names(self, prefix: str = "") -> list[str]:
        """Tables with rows that begin with `prefix`, sorted."""
        return sorted(table for table, rows in self._state.rows.items() if rows and table.startswith(prefix))

    def rows(self, table: str) -> int:
        """Rows of a table that are committed."""
        return self._state.rows.get(table, 0)

    def columns(self, table: str) -> list[str]:
        """Names of a table's columns, sorted."""
        folder = self._folder / table
        return sorted(unquote(path.name) for path in folder.iterdir()) if self.rows(table) and folder.is_dir() else []

    def column(self, table: str, name: str, *, start: int = 0) -> Numbers:
        """[rows - start] float64, NaN where there is no value; all NaN for a column that is not there."""
        rows = max(0, self.rows(table) - start)
        try:
            found = np.fromfile(self._path(table, name), np.float64, rows, offset=start * _BYTES)
        except FileNotFoundError:
            found = np.empty(0)
        return np.concatenate([found, np.full(rows - len(found), np.nan)]) if len(found) < rows else found

    def mark(self, source: str) -> int:
        """How far `source` was read when the tables were committed last; 0 at first."""
        return self._state.marks.get(source, 0)

    def add(self, table: str, row: Mapping[str, float]) -> None:
        """A row more, which counts from the next `commit` on."""
        if not _NAME.match(table) or table.startswith("."):
            raise ValueError(f"no name of a table: {table!r}")
        self._pending.setdefault(table, []).append(row)

    def drop_from(self, table: str, column: str, least: float) -> None:
        """Take away the rows at the end whose value in a rising column is at least `least`: something took their place."""
        waiting = self._pending.get(table, [])
        while waiting and waiting[-1].get(column, math.nan) >= least:
            waiting.pop()
        rows = self.rows(table)
        if rows and not waiting and (values := self.column(table, column))[-1] >= least:
            self._state.rows[table] = int(np.searchsorted(values, least))
            self._write_state()
            self._cut(table)

    def forget(self, prefix: str) -> None:
        """Take away all rows of the tables that begin with `prefix`: their source has begun anew."""
        for table in [one for one in (*self._state.rows, *self._pending) if one.startswith(prefix)]:
            self._pending.pop(table, None)
            if self._state.rows.get(table):
                self._state.rows[table] = 0
                self._write_state()
                self._cut(table)

    def commit(self, marks: Mapping[str, int]) -> bool:
        """Write what was added, and how far the sources were read for it; whether there was anything. Raises OSError."""
        if not any(self._pending.values()) and all(self._state.marks.get(name) == mark for name, mark in marks.items()):
            return False
        rows = dict(self._state.rows)
        for table, added in self._pending.items():
            if added:
                self._append(table, rows.get(table, 0), added)
                rows[table] = rows.get(table, 0) + len(added)
        self._state = State(rows=rows, marks={**self._state.marks, **marks})
        self._write_state()
        self._pending.clear()
        return True

    def _append(self, table: str, start: int, added: Sequence[Mapping[str, float]]) -> None:
        (self._folder / table).mkdir(mode=0o700, exist_ok=True)
        for name in sorted({name for row in added for name in row}):
            values = np.array([row.get(name, math.nan) for row in added], np.float64)
            with self._path(table, name).open("ab") as file:
                size = min(file.tell(), start * _BYTES) // _BYTES * _BYTES
                if size != file.tell():  # a system call more for each of a hundred columns
                    file.truncate(size)
                file.write(np.full(start - size // _BYTES, np.nan).tobytes() + values.tobytes())

    def _cut(self, table: str) -> None:
        size = self.rows(table) * _BYTES
        for path in (self._folder / table).iterdir() if (self._folder / table).is_dir() else ():
            if path.stat().st_size > size:
                os.truncate(path, size)

    def _path(self, table: str, name: str) -> Path:
        return self._folder / table / quote(name, safe="")

    def _load(self) -> State:
        try:
            state = msgspec.json.decode((self._folder / "state.json").read_bytes(), type=State)
            if state.format == FORMAT and all(map(_NAME.match, state.rows)):
                return state
        except (OSError, msgspec.MsgspecError):
            pass
        for path in self._folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
        return State()

    def _write_state(self) -> None:
        # Not synced: an index that a power cut tore is deleted and made again, see docs/page.md.
        path = self._folder / ".state.json"
        path.write_bytes(msgspec.json.encode(self._state))
        path.replace(self._folder / "state.json")


def shrink(x: Numbers, columns: Sequence[Numbers], most: int) -> tuple[Numbers, list[Numbers]]:
    """At most `most` points of series over the same `x`: of each stretch of rows the least and the greatest value, in their order.

    Args:
        x: [rows] rising.
        columns: [rows] each, NaN where there is no value.
        most: points; at least 2.

    Returns:
        [points] places, and [points] values of each series: as they are where they fit.
    """
    if len(x) <= most:
        return x, list(columns)
    starts = np.linspace(0, len(x), most // 2 + 1).astype(np.int64)[:-1]
    ends = np.append(starts[1:], len(x)) - 1
    places = np.stack([x[starts], x[ends]], 1).ravel()
    return places, [_extremes(column, starts) for column in columns]


def shrink_to_means(x: Numbers, columns: Sequence[Numbers], most: int) -> tuple[Numbers, list[Numbers]]:
    """The same with the mean of each stretch of rows, at its end: shares that add up to one still do."""
    if len(x) <= most:
        return x, list(columns)
    starts = np.linspace(0, len(x), most + 1).astype(np.int64)[:-1]
    ends = np.append(starts[1:], len(x)) - 1
    return x[ends], [_means(column, starts) for column in columns]


def _means(column: Numbers, starts: npt.NDArray[np.int64]) -> Numbers:
    known = ~np.isnan(column)
    counts = np.add.reduceat(known.astype(np.float64), starts)
    sums = np.add.reduceat(np.where(known, column, 0.0), starts)
    return np.divide(sums, counts, out=np.full(len(starts), np.nan), where=counts > 0)


def _extremes(column: Numbers, starts: npt.NDArray[np.int64]) -> Numbers:
    least, most = np.fmin.reduceat(column, starts), np.fmax.reduceat(column, starts)
    # Rising or falling: what came first is drawn first.
    widths = np.diff(np.append(starts, len(column)))
    at = np.arange(len(column))
    inside = np.repeat(least, widths), np.repeat(most, widths)
    first_least = np.minimum.reduceat(np.where(column == inside[0], at, len(column)), starts)
    first_most = np.minimum.reduceat(np.where(column == inside[1], at, len(column)), starts)
    rising = first_least <= first_most
    return np.stack([np.where(rising, least, most), np.where(rising, most, least)], 1).ravel()


def rolling(amounts: Numbers, seconds: Numbers, most: int) -> Numbers:
    """[rows] of amounts and seconds: the rate over up to `most` rows that end with each; NaN where there is none."""
    there = ~np.isnan(amounts) & (seconds > 0)
    sums = [np.concatenate([[0.0], np.cumsum(np.where(there, column, 0.0))]) for column in (amounts, seconds)]
    ends = np.arange(1, len(amounts) + 1)
    starts = np.maximum(0, ends - most)
    amount, taken = (column[ends] - column[starts] for column in sums)
    return np.divide(amount, taken, out=np.full(len(amounts), np.nan), where=there & (taken > 0))


def as_json(values: Iterable[float]) -> list[float | None]:
    """Numbers as JSON has them: None for NaN."""
    return [None if math.isnan(value) else value for value in values]
