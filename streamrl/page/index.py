"""What the page draws from, beside the run: rows of the metrics file, and what ledger and events say, as columns.

| table | a row is | columns beside `time_s`, `version` (its number), `epoch` |
|---|---|---|
| `batch` | a trained batch | `step`, declared metrics |
| `window`, `window:<worker>` | some seconds | the same |
| `evaluation` | an evaluation | the same |
| `ledger` | a ledger entry | `sequence`, `samples`, `tokens`, `digest_high`, `digest_low` |
| `commits:<worker>` | a version that an engine began to serve | `lag_s`, `stage_s`, `commit_ms`, `digest_high`, `digest_low` |
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
import zlib
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from streamrl.errors import LaunchError, SchemaError
from streamrl.history.branch_file import LEDGER_FILE, read_branch_file
from streamrl.monitor.metrics_file import LONGEST_BYTES, decoded, files, files_before, inode_of, newest_file
from streamrl.monitor.series import BATCH, RUN, WINDOW, Row
from streamrl.page.address import page_folder
from streamrl.page.branch import LONGEST_ENTRY, open_ledger, rows_of
from streamrl.page.tables import Numbers, Tables, as_json, rolling, shrink, shrink_to_means
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.versions import Version
from streamrl.telemetry.names import DROPPED_SO_FAR, declared

logger = logging.getLogger(__name__)

LEDGER_TABLE = "ledger"
COMMITS = "commits:"
MOST_TABLES = 1024
"""Workers beyond have no tables: names of engines change with each start."""
MOST_POINTS = 2000
TOKENS = "tokens"
"""An axis: trained tokens up to the version of a row, those of a warm-up included."""
SERIES_AXES = ("time_s", "step", "version", TOKENS)
TRAINED_TOKENS = "rollout/tokens_trained"
_ROWS_AT_ONCE = 2000
_NEWEST = 64
"""Rows in which the newest value of a metric is looked for."""
_FILE, _PLACE, _FIRST = "metrics_file", "metrics_place", "metrics_first"
_BATCH_ROW, _HEAD_BYTES = f'"kind":"{BATCH}"'.encode(), 128
_OWN = ("time_s", "step", "version", "epoch")


class Progress(msgspec.Struct, frozen=True):
    """How much of what there is has been read."""

    done: int
    total: int


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """Values of some metrics of one table, thinned."""

    table: str
    x: list[float | None]
    values: dict[str, list[float | None]]
    rows: int
    """Rows behind them."""


class Index:
    """The tables of a run; use `open_index`. Methods may be called from any thread.

    Args:
        run: its directory; nothing is written there but `folder`.
        folder: of the tables.
        only: the metrics of batches that are wanted, and nothing else is; None: all there is.
    """

    def __init__(self, run: RunDir, folder: Path, *, only: frozenset[str] | None = None) -> None:
        self._run = run
        self._only = only
        self.branch = read_branch_file(run.path)
        """Where it comes from, if it is a branch: its rows are then those of its ledger. None: it is none."""
        self._tables = Tables(folder)
        self._lock = threading.Lock()
        self._file, self._place = self._tables.mark(_FILE), self._tables.mark(_PLACE)
        self._first = self._tables.mark(_FIRST)
        self._marks: dict[str, int] = {}
        self.newest: dict[str, float] = {}
        """The newest value of each metric of the run as a whole."""
        self.changes = 0
        """Rises whenever there are new rows."""
        self._load_newest()
        steps = self._tables.column(BATCH, "step", start=max(0, self._tables.rows(BATCH) - 1))
        self.step = int(steps[-1]) if len(steps) else 0
        """Batches of reinforcement learning up to a branch's newest row."""

    def read_rows(self) -> bool:
        """Take in the next rows of the metrics files; False once there are none for now. Raises OSError."""
        with self._lock:
            self._commit()  # what a full disk has refused comes first, and nothing is read until it is written
            count = 0
            for line in self._lines():
                # Decoding is most of the work, so rows that are not wanted are told by how they begin.
                if self.branch is not None:
                    self._entry(line)
                elif self._only is None or _BATCH_ROW in line[:_HEAD_BYTES]:
                    row = decoded(line)
                    if row is not None:
                        self._row(row)
                count += 1
                if count >= _ROWS_AT_ONCE:
                    break
            self._commit()
            return count > 0

    def progress(self) -> Progress:
        """Bytes of the metrics files that were read, of how many."""
        done = total = 0
        known = list[tuple[int, int]]()
        for path in files(self._run.metrics) if self.branch is None else [self._run.path / LEDGER_FILE]:
            with contextlib.suppress(FileNotFoundError):  # the oldest go
                state = path.stat()
                known.append((state.st_ino, state.st_size))
        before = self._file in {inode for inode, _ in known}
        for inode, size in known:
            if inode == self._file:
                done, before = total + min(self._place, size), False
            total += size
        return Progress(0 if before else done, total)

    def mark(self, source: str) -> int:
        """How far a source of `add` was read."""
        with self._lock:
            return self._marks.get(source, self._tables.mark(source))

    def add(self, table: str, row: Mapping[str, float], *, source: str, mark: int, forks: bool = False) -> None:
        """A row of another source, and how far that was read for it; `forks`: a version that is there already is replaced."""
        with self._lock:
            if table not in self._tables.names() and len(self._tables.names()) >= MOST_TABLES:
                return
            if forks:
                self._tables.drop_from(table, "version", row["version"])
            self._tables.add(table, row)
            self._marks[source] = mark

    def forget(self, prefix: str, *, source: str) -> None:
        """A source has begun anew: what it gave is void, and it is read from its beginning."""
        with self._lock:
            self._tables.forget(prefix)
            self._marks[source] = 0

    def reach(self, source: str, mark: int) -> None:
        """A source was read up to here, and gave no row."""
        with self._lock:
            self._marks[source] = mark

    def commit(self) -> None:
        """Have what was added count. Raises OSError."""
        with self._lock:
            self._commit()

    def tables(self, prefix: str = "") -> list[str]:
        """Tables that have rows."""
        with self._lock:
            return self._tables.names(prefix)

    def metrics(self) -> dict[str, list[str]]:
        """By table of metrics, the metrics that it has values of."""
        with self._lock:
            tables = [name for name in self._tables.names() if name.partition(":")[0] in (BATCH, WINDOW, "evaluation")]
            return {table: [name for name in self._tables.columns(table) if name not in _OWN] for table in tables}

    def series(
        self,
        table: str,
        names: Sequence[str],
        *,
        x: str = "time_s",
        most: int = MOST_POINTS,
        last: int = 0,
        mean: bool = False,
        rates: frozenset[str] = frozenset(),
        smooth: int = 1,
    ) -> Series:
        """Columns of a table over `x` (of `SERIES_AXES`), of its last rows or (0) all; at most `most` points each.

        Where there are more rows, points are extremes, or with `mean` means. `rates`: which of the names are amounts, wanted a second.
        `smooth`: each value is the mean of those of so many rows that end with it.
        """
        with self._lock:
            start = max(0, self._tables.rows(table) - last) if last else 0
            places = self._places(table, x, start)
            columns = [self._tables.column(table, name, start=start) for name in names]
            if rates:
                seconds = self._seconds(table, start)
                columns = [column / seconds if name in rates else column for name, column in zip(names, columns, strict=True)]
        if smooth > 1:
            columns = [rolling(column, np.ones(len(column)), smooth) for column in columns]
        if x == "time_s":
            places = np.maximum.accumulate(places) if len(places) else places  # a clock that was set back
        elif table != BATCH:  # an evaluation ends behind that of a later version; a window has seen a version that was trained again
            order = np.argsort(places, kind="stable")
            places, columns = places[order], [column[order] for column in columns]
        thin_x, thin = (shrink_to_means if mean else shrink)(places, columns, max(2, min(most, MOST_POINTS)))
        values = {name: as_json(column.tolist()) for name, column in zip(names, thin, strict=True)}
        return Series(table=table, x=as_json(thin_x.tolist()), values=values, rows=len(places))

    def _places(self, table: str, x: str, start: int) -> Numbers:
        """[rows - start] places on the axis."""
        if x != TOKENS:
            return self._tables.column(table, x, start=start)
        trained = np.nan_to_num(self._tables.column(BATCH, TRAINED_TOKENS)).cumsum()
        if table == BATCH:
            return trained[start:]
        at = np.searchsorted(self._tables.column(BATCH, "version"), self._tables.column(table, "version", start=start), side="right")
        return np.append(0.0, trained)[at]

    def rate(self, table: str, name: str) -> float | None:
        """The newest amount of a table a second; None where there is none."""
        with self._lock:
            start = max(0, self._tables.rows(table) - _NEWEST)
            found = self._tables.column(table, name, start=start) / self._seconds(table, start)
        found = found[~np.isnan(found)]
        return float(found[-1]) if len(found) else None

    def _seconds(self, table: str, start: int) -> Numbers:
        """[rows - start] seconds since the row before; NaN for the first of all, and where the clock was set back."""
        before = max(0, start - 1)
        times = self._tables.column(table, "time_s", start=before)
        seconds = np.diff(times, prepend=np.nan)[start - before :]
        return np.where(seconds > 0, seconds, np.nan)

    def columns(self, table: str, names: Sequence[str], *, last: int = 0) -> dict[str, Numbers]:
        """Columns of the last rows, or (0) of all."""
        with self._lock:
            start = max(0, self._tables.rows(table) - last) if last else 0
            return {name: self._tables.column(table, name, start=start) for name in names}

    def rows(self, table: str) -> int:
        """Rows of a table."""
        with self._lock:
            return self._tables.rows(table)

    def _commit(self) -> None:
        marks = {**self._marks, _FILE: self._file, _PLACE: self._place, _FIRST: self._first}
        if self._tables.commit(marks):
            self.changes += 1
        self._marks.clear()

    def _row(self, row: Row) -> None:
        try:
            version = Version.parse(row.version) if row.version else Version(0, 0)
        except SchemaError:
            return
        table = row.kind if row.of == RUN else f"{row.kind}:{row.of}"
        if self._only is not None and table != BATCH:
            return
        if table not in self._tables.names() and len(self._tables.names()) >= MOST_TABLES:
            return
        if row.kind == BATCH:
            self._tables.drop_from(table, "version", version.number)
        only = self._only
        values = {name: value for name, value in row.values.items() if (declared(name) if only is None else name in only)}
        own = {"time_s": row.time_s, "step": row.step, "version": version.number, "epoch": version.epoch}
        try:
            self._tables.add(table, values | own)
        except ValueError:
            logger.warning("event=row_passed_over table=%s", table)
            return
        if row.of == RUN:
            self.newest |= values

    def _entry(self, line: bytes) -> None:
        """A line of a branch's ledger, which ends where reading is."""
        if (found := rows_of(line, self.step, int(self.newest.get(DROPPED_SO_FAR, 0)))) is None:
            logger.warning("event=entry_passed_over run=%s place=%d", self._run.name, self._place)
            return
        row, numbers = found
        self.step = row.step
        self._row(row)
        if self._only is None:
            self._tables.drop_from(LEDGER_TABLE, "version", numbers["version"])
            self._tables.add(LEDGER_TABLE, {**numbers, "sequence": float(self._place - len(line))})

    def _lines(self) -> Generator[bytes]:
        """Whole lines from the place that was read to; the place moves on as they are taken."""
        if self.branch is not None:
            if (ledger := open_ledger(self._run)) is not None:
                with ledger:
                    yield from self._lines_of(ledger, LONGEST_ENTRY)
            return
        newest = newest_file(self._run.metrics)
        if newest is None:
            return
        with newest:
            aside = files_before(self._run.metrics, newest)
            known = [*map(inode_of, aside), os.fstat(newest.fileno()).st_ino]
            for path in aside[self._start(aside, known, newest) :]:
                with contextlib.suppress(FileNotFoundError), path.open("rb") as file:  # the oldest go
                    yield from self._lines_of(file)
            yield from self._lines_of(newest)

    def _start(self, aside: Sequence[Path], known: Sequence[int | None], newest: BinaryIO) -> int:
        """Which of the files is the first that was not read to its end: the oldest, where the one that was read has gone."""
        if self._file not in known:
            return 0
        at = known.index(self._file)
        with contextlib.suppress(FileNotFoundError), contextlib.nullcontext(newest) if at == len(aside) else aside[at].open("rb") as file:
            if self._is_known(file):
                return at
        return 0

    def _is_known(self, file: BinaryIO, longest: int = LONGEST_BYTES) -> bool:
        """Whether it is the file that was read last: file systems give the inode of a file that has gone to the next new one."""
        state = os.fstat(file.fileno())
        if state.st_ino != self._file or state.st_size < self._place:
            return False
        return not self._place or self._first in (_sum_of_first(file, longest), 0)  # 0: an index of an earlier build

    def _lines_of(self, file: BinaryIO, longest: int = LONGEST_BYTES) -> Generator[bytes]:
        if not self._is_known(file, longest):
            self._file, self._place = os.fstat(file.fileno()).st_ino, 0
            self.step = 0
            self.newest.pop(DROPPED_SO_FAR, None)
        file.seek(self._place)
        while (line := file.readline(longest)).endswith(b"\n"):
            if not self._place:
                self._first = _sum(line)
            self._place += len(line)
            yield line

    def _load_newest(self) -> None:
        for table in (WINDOW, "evaluation", BATCH):
            if rows := self._tables.rows(table):
                for name in self._tables.columns(table):
                    tail = self._tables.column(table, name, start=max(0, rows - _NEWEST))
                    if name not in _OWN and len(tail := tail[~np.isnan(tail)]):
                        self.newest[name] = float(tail[-1])


def _sum_of_first(file: BinaryIO, longest: int) -> int:
    """Of the first line of a file; 0: it has none."""
    file.seek(0)
    line = file.readline(longest)
    return _sum(line) if line.endswith(b"\n") else 0


def _sum(line: bytes) -> int:
    return zlib.crc32(line) or 1


@contextlib.contextmanager
def open_index(run: RunDir) -> Generator[Index]:
    """The index of a run, made if there is none; one process at a time has it.

    Raises:
        LaunchError: another page has it, or it cannot be made.
    """
    folder = page_folder(run)
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise LaunchError(
            f"the page's index cannot be made in {folder}: {error.strerror}", hint="is the disk full, or the run another user's?"
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LaunchError(
                f"expected no other page of run {run.name!r}, got one that is served already",
                hint="its address is that which `streamrl up` or `streamrl page` has printed",
                run=run.name,
            ) from error
        yield Index(run, folder / "tables")
    finally:
        os.close(descriptor)
