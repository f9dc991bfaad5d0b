"""Rows on their way to the disk: a thread of its own writes them, so that a disk that is slow or full costs rows and never the run."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from streamrl.monitor.failures import Pace
from streamrl.monitor.series import Row

logger = logging.getLogger(__name__)

MOST_WAITING = 2048
"""Rows that wait to be written; those that come when there are so many are lost, counted and logged."""
_MOST_AT_ONCE = 256
_CLOSE_S = 5.0


class RowFile(Protocol):
    """Where the rows go; called from one thread."""

    def write(self, rows: Sequence[Row]) -> None: ...
    def close(self) -> None: ...


class RowWriter:
    """Takes rows without waiting and has them written. The thread is a daemon: a disk that never answers does not hold up the end."""

    def __init__(self, file: RowFile) -> None:
        self.num_lost = 0
        """Rows for which there was no room, or that could not be written."""
        self._file = file
        self._rows: deque[Row] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._pace = Pace()
        self._thread = threading.Thread(target=self._work, name="metrics-file", daemon=True)
        self._thread.start()

    @property
    def has_room(self) -> bool:
        """Whether a few rows more would be taken."""
        return len(self._rows) <= MOST_WAITING // 2

    def offer(self, rows: Sequence[Row]) -> None:
        """Take rows to be written."""
        if not rows:
            return  # the thread sleeps on
        with self._changed:
            taken = rows[: max(0, MOST_WAITING - len(self._rows))]
            self._rows.extend(taken)
            self._changed.notify()
        if len(taken) < len(rows):
            self._lost(len(rows) - len(taken), "the disk does not keep up")

    def close(self) -> None:
        """Write what waits, for a few seconds at most."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            logger.warning("event=metrics_not_closed waiting=%d", len(self._rows))

    def _work(self) -> None:
        while rows := self._next():
            try:
                self._file.write(rows)
            except OSError as error:
                self._lost(len(rows), str(error))
        self._file.close()

    def _next(self) -> list[Row]:
        """The rows to be written next; none once all is written and it was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._rows or self._closed)
            return [self._rows.popleft() for _ in range(min(len(self._rows), _MOST_AT_ONCE))]

    def _lost(self, count: int, why: str) -> None:
        with self._changed:
            self.num_lost += count
            due = self._pace.due(time.monotonic())
        if due:  # without the lock: the log may be on the same disk
            logger.warning("event=metrics_lost rows=%d reason=%s", self.num_lost, why)
