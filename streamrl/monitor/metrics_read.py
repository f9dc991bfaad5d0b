"""The rows of a run's metrics files: all of them, the newest value of each metric, those that come. In memory is a line at a time."""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import itertools
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from streamrl.errors import ConfigError
from streamrl.monitor.metrics_file import LONGEST_BYTES, decoded, files_before, inode_of, newest_file
from streamrl.monitor.series import RUN, Row
from streamrl.runtime.rundir import RunDir
from streamrl.telemetry.names import METRICS, declared, metric

_LOOK_BACK = 16 << 20
"""Bytes at the end of the files in which the newest values are looked for."""
_OF_SETS = ("eval/", "*")
"""What patterns begin with that may be of sets of problems."""
_POLL_S = 0.3


class Newest(msgspec.Struct, kw_only=True):
    """The newest value of one metric."""

    value: float | None = None
    """Of the run; None where only workers have one."""
    unit: str = ""
    time_s: float = 0.0
    """Unix seconds of the newest."""
    version: str = ""
    of: dict[str, float] = {}
    """Of workers that have it too."""


class Metrics:
    """What is on disk of a run's metrics.

    Args:
        run: its directory.
        pattern: names, with `*` and `?`; rows are given with the values of these only, and without any not at all.

    Raises:
        ConfigError: there are no rows, no declared metric has such a name, or (when they are read) a file cannot be read.
    """

    def __init__(self, run: RunDir, pattern: str = "*") -> None:
        self._folder = run.metrics
        self._pattern = re.compile(fnmatch.translate(pattern))
        self.num_torn = 0
        """Lines passed over because they are no rows."""
        if not (fnmatch.filter(METRICS, pattern) or pattern.startswith(_OF_SETS)):
            near = difflib.get_close_matches(pattern, METRICS, n=1)
            hint = f"did you mean '{near[0]}'? " if near else ""
            raise ConfigError(
                f"expected the name of a metric, or a pattern of names, got {pattern!r}", hint=f"{hint}docs/metrics.md has them all"
            )
        newest = self._newest()
        if newest is None:
            raise ConfigError(
                f"run {run.name} has no metrics yet",
                hint=f"`streamrl status {run.name}` says whether it is up; runs of earlier versions get them once they are resumed",
                run=run.name,
            )
        newest.close()

    def rows(self) -> Iterator[Row]:
        """All rows in the order in which they were written, up to the file that is being written now. Lines are counted anew."""
        self.num_torn = 0
        aside, current = self._standing()
        with current or contextlib.nullcontext():
            for path in aside:
                yield from self._rows(path, 0)
            if current is not None:
                yield from self._taken(whole_lines(current))

    def newest(self) -> dict[str, Newest]:
        """The newest values by metric, in the order of their declaration."""
        found: dict[str, Newest] = {}
        aside, current = self._standing()
        room, rows = _LOOK_BACK, list[Iterator[Row]]()
        with current or contextlib.nullcontext():
            if current is not None:
                size = os.fstat(current.fileno()).st_size
                rows.append(self._rows_from(current, max(0, size - room)))
                room -= size
            for path in reversed(aside):
                if room <= 0:
                    break
                with contextlib.suppress(FileNotFoundError):  # it was the oldest, and has gone
                    size = path.stat().st_size
                    rows.append(self._rows(path, max(0, size - room)))
                    room -= size
            for row in itertools.chain.from_iterable(reversed(rows)):
                for name, value in row.values.items():
                    one = found.setdefault(name, Newest(unit=metric(name).unit))
                    one.time_s, one.version = row.time_s, row.version
                    if row.of == RUN:
                        one.value = value
                    else:
                        one.of = one.of | {row.of: value}
        order = [*(name for name in METRICS if name in found), *sorted(found.keys() - METRICS.keys())]
        return {name: found[name] for name in order}

    def follow(self, over: Callable[[], bool]) -> Iterator[Row]:
        """The rows that come from now on, until `over`; across files that are put aside."""
        file = self._newest()
        if file is None:
            return
        file.seek(0, os.SEEK_END)
        try:
            while True:
                last = over()
                yield from self._taken(whole_lines(file))
                while (newer := self._next(file)) is not None:
                    yield from self._taken(whole_lines(file))  # what was written before it was put aside
                    file.close()
                    file = newer
                    yield from self._taken(whole_lines(file))
                if last:
                    return
                time.sleep(_POLL_S)
        finally:
            file.close()

    def _standing(self) -> tuple[list[Path], BinaryIO | None]:
        """The files that were put aside, the oldest first, and the one behind them; None: there are none at all.

        The last is opened first: it may be put aside at any time, and then its name is another's.
        """
        newest = self._newest()
        return ([], None) if newest is None else (files_before(self._folder, newest), newest)

    def _newest(self) -> BinaryIO | None:
        try:
            return newest_file(self._folder)
        except OSError as error:
            raise _unreadable(self._folder, error) from error

    def _next(self, file: BinaryIO) -> BinaryIO | None:
        """The file behind this one; None while this is the newest. Files are put aside meanwhile, so the newest is opened first."""
        inode = os.fstat(file.fileno()).st_ino
        newest = self._newest()
        if newest is None or os.fstat(newest.fileno()).st_ino == inode:
            if newest is not None:
                newest.close()
            return None
        aside = files_before(self._folder, newest)
        place = next((at for at, path in enumerate(aside) if inode_of(path) == inode), -1)  # -1: it has gone, as the oldest
        for path in aside[place + 1 :]:
            with contextlib.suppress(FileNotFoundError):  # the oldest go
                file = _opened(path)
                newest.close()
                return file
        return newest

    def _rows(self, path: Path, start: int) -> Iterator[Row]:
        try:
            file = _opened(path)
        except FileNotFoundError:
            return  # it was the oldest, and has gone
        with file:
            yield from self._rows_from(file, start)

    def _rows_from(self, file: BinaryIO, start: int) -> Iterator[Row]:
        file.seek(start)
        if start:
            file.readline(LONGEST_BYTES)  # which may be the end of one
        yield from self._taken(whole_lines(file))

    def _taken(self, lines: Iterable[bytes]) -> Iterator[Row]:
        for line in lines:
            row = decoded(line)
            if row is None:
                self.num_torn += 1
            elif values := {name: value for name, value in row.values.items() if self._pattern.match(name) and declared(name)}:
                yield msgspec.structs.replace(row, values=values)


def whole_lines(file: BinaryIO) -> Iterator[bytes]:
    """Whole lines from where the file stands on; it is left behind the last."""
    while (line := file.readline(LONGEST_BYTES)).endswith(b"\n"):
        yield line
    file.seek(-len(line), os.SEEK_CUR)


def _opened(path: Path) -> BinaryIO:
    """Raises FileNotFoundError, and ConfigError for a file that is there and cannot be read."""
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"expected a file of metrics that can be read, got {error.strerror}: {path}", hint="is the run another user's?")
