"""The logs of a run's workers as one, in order of time; also while they grow."""

from __future__ import annotations

import contextlib
import heapq
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BufferedReader
from pathlib import Path

from streamrl.errors import ConfigError
from streamrl.runtime.rundir import RunDir

NATS_SERVER = "nats-server"
"""What the embedded server's log is asked for as."""
_POLL_S = 0.2
_OURS = re.compile(rb"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3})Z ")
_NATS = re.compile(rb"\[\d+\] (\d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d{6}) ")
_LONGEST_BYTES = 1 << 20
"""A longer line is given in pieces."""


class Logs:
    """The logs of one worker (`trainer-0`), of all workers of a kind (`trainer`), or of everybody. Lines are bytes with their end.

    A line without a time of its own, as in a traceback, stays below the one before it.

    Raises:
        ConfigError: the run has no such log (the hint has the names); when it is read, one cannot be opened.
    """

    def __init__(self, run: RunDir, worker: str | None = None) -> None:
        self._run = run
        self._worker = worker
        self._tails: dict[str, _Tail] = {}
        names = sorted(self._files())
        self._look()
        if not self._tails:
            raise ConfigError(
                f"expected a worker of run {run.name} that has a log, got {worker!r}" if worker else f"run {run.name} has no logs yet",
                hint=f"there are {', '.join(names)}" if names else f"`streamrl status {run.name}` says whether it has begun",
                run=run.name,
            )

    def past(self, *, last: int | None = None, to_the_end: bool = True) -> Iterable[bytes]:
        """All lines there are, or the `last` ones; `to_the_end` gives an unfinished one too. In memory is a line of each file."""
        files = self._files()
        lines = self._in_order(self._whole(tail, files.get(name, [])[:-1], to_the_end) for name, tail in self._tails.items())
        return lines if last is None else deque(lines, last)

    def follow(self, over: Callable[[], bool]) -> Iterator[bytes]:
        """The lines that come after those of `past`, until `over`; of workers that come later too.

        Lines that are found together are in order of time.
        """
        while True:
            last = over()
            self._look()
            yield from self._in_order(tail.lines(to_the_end=last) for tail in self._tails.values())
            if last:
                return
            time.sleep(_POLL_S)

    @staticmethod
    def _in_order(logs: Iterable[Iterator[_Line]]) -> Iterator[bytes]:
        return (text for _, text in heapq.merge(*logs, key=lambda line: line[0]))

    @staticmethod
    def _whole(tail: _Tail, turned: list[Path], to_the_end: bool) -> Iterator[_Line]:
        for path in turned:
            old = _Tail(path, seconds=tail.seconds)
            yield from old.lines(to_the_end=True)
            tail.seconds = old.seconds
        yield from tail.lines(to_the_end=to_the_end)

    def _look(self) -> None:
        for name, paths in self._files().items():
            if self._worker in (None, name, name.rpartition("-")[0]) and name not in self._tails:
                self._tails[name] = _Tail(paths[-1])

    def _files(self) -> dict[str, list[Path]]:
        """Each worker's log behind those that were rotated away, the oldest (`.log.2`) first."""
        found: dict[str, list[Path]] = {}
        for folder, names in ((self._run.logs, "*.log"), (self._run.bus_store, f"{NATS_SERVER}.log")):
            for path in sorted(folder.glob(names)):
                turned = [old for old in folder.glob(f"{path.name}.*") if old.suffix[1:].isdigit()]
                found[path.stem] = [*sorted(turned, key=lambda old: -int(old.suffix[1:])), path]
        return found


_Line = tuple[float, bytes]
"""Seconds since the epoch, for the order; and the line."""


@dataclass
class _Tail:
    """One file, read on from where the last reading ended; one that was cut is read from its beginning."""

    path: Path
    position: int = 0
    inode: int = 0
    seconds: float = 0.0

    def lines(self, *, to_the_end: bool) -> Iterator[_Line]:
        """The lines since the last call; `to_the_end` takes an unfinished last one too."""
        for path in (self.path.with_name(f"{self.path.name}.1"), self.path):
            with contextlib.suppress(FileNotFoundError), _opened(path) as file:
                found = os.fstat(file.fileno())
                if path != self.path and found.st_ino != self.inode:
                    continue  # nothing was rotated away since the last call
                if found.st_ino != self.inode or found.st_size < self.position:
                    self.position = 0
                self.inode = found.st_ino
                file.seek(self.position)
                yield from self._lines(file, to_the_end)

    def _lines(self, file: BufferedReader, to_the_end: bool) -> Iterator[_Line]:
        while text := file.readline(_LONGEST_BYTES):
            if not text.endswith(b"\n") and len(text) < _LONGEST_BYTES and not to_the_end:
                return
            self.position += len(text)
            # Several threads write to a log: a line that is a little younger than the one below it stays where it is.
            self.seconds = max(self.seconds, _seconds(text))
            yield self.seconds, text if text.endswith(b"\n") else text + b"\n"


def _opened(path: Path) -> BufferedReader:
    """Raises FileNotFoundError, and ConfigError for a file that is there and cannot be read."""
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"expected a log that can be read, got {error.strerror}: {path}", hint="is the run another user's?") from error


def _seconds(line: bytes) -> float:
    """When a line was written; 0 if it does not say."""
    with contextlib.suppress(ValueError):  # digits that are no date
        if found := _OURS.match(line):
            return datetime.strptime(found[1].decode(), "%Y-%m-%d %H:%M:%S.%f").replace(tzinfo=UTC).timestamp()
        if found := _NATS.match(line):  # nats-server writes the machine's own time
            return datetime.strptime(found[1].decode(), "%Y/%m/%d %H:%M:%S.%f").timestamp()
    return 0.0
