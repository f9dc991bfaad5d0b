"""What a run's metrics file says of the last minute: where time went, and what became of the tokens. For who looks from outside."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

from msgspec.structs import replace

from streamrl.monitor.metrics_file import decoded, newest_file
from streamrl.monitor.metrics_read import whole_lines
from streamrl.monitor.series import BATCH, RUN, WINDOW, Row
from streamrl.telemetry.names import METRICS, Reduction

MINUTE_S = 60.0
_LOOK_BACK = 1 << 20
"""Bytes at the end of the file that are read at most."""
_MOST_ROWS = 4096
_OF_RUN = b'"of":""'
_HEAD_BYTES = 200
"""A line's part in which it says whose its values are."""
_OPEN, _WAITING = "tokens/open", "tokens/waiting"


class Recent:
    """The run's own rows of the last minute, read as they are written; a file that is put aside may take a second of them along.

    Args:
        folder: of the metrics; it need not be there, and what cannot be read says nothing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rows: deque[Row] = deque(maxlen=_MOST_ROWS)
        self._inode, self._offset = 0, 0

    def look(self, now_s: float) -> None:
        """Read what was written since the last look; `now_s` in Unix seconds."""
        try:
            self._read()
        except OSError:
            self._rows.clear()
        self._rows = deque((row for row in self._rows if row.time_s >= now_s - MINUTE_S), maxlen=_MOST_ROWS)

    @property
    def shares(self) -> dict[str, float]:
        """Shares of time of the newest window, and who starved, by metric; none of a run that has written no window for a minute."""
        window = next((row for row in reversed(self._rows) if row.kind == WINDOW), None)
        return {} if window is None else shares_of(window.values)

    @property
    def goodput(self) -> dict[str, float]:
        """Tokens of the last minute by metric; `tokens/open` and `tokens/waiting` as they are now."""
        found: dict[str, float] = {}
        for row in self._rows:
            for name, value in row.values.items():
                if name in METRICS and METRICS[name].reduction == Reduction.SUM:
                    found[name] = found.get(name, 0.0) + value
        return found | {name: row.values[name] for row in self._rows for name in (_OPEN, _WAITING) if name in row.values}

    def _read(self) -> None:
        file = newest_file(self._folder)
        if file is None:
            return
        with file:
            state = os.fstat(file.fileno())
            if state.st_ino != self._inode or state.st_size < self._offset:
                self._inode, self._offset = state.st_ino, 0
            file.seek(max(self._offset, state.st_size - _LOOK_BACK))
            for line in whole_lines(file):
                row = decoded(line) if _OF_RUN in line[:_HEAD_BYTES] else None
                if row is not None and row.of == RUN and row.kind in (BATCH, WINDOW):
                    self._rows.append(replace(row, values=shares_of(row.values) | tokens_of(row.values)))
            self._offset = file.tell()


def shares_of(values: dict[str, float]) -> dict[str, float]:
    """Those of a window that are shares of time."""
    return {name: value for name, value in values.items() if "/share/" in name or name.startswith("starvation/")}


def tokens_of(values: dict[str, float]) -> dict[str, float]:
    """Those that count tokens."""
    return {name: value for name, value in values.items() if name.startswith("tokens/")}
