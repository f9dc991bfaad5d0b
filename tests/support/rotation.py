"""Metrics files that are put aside while somebody lists them: every listing that a file system may give."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streamrl.config.metrics import MetricsConfig
from streamrl.monitor.metrics_file import MetricsFile
from streamrl.monitor.series import Row

EACH_LISTING = pytest.mark.parametrize(("rows", "listing"), [(rows, listing) for rows in (1, 30) for listing in ("old", "new", "torn")])


class Rotation:
    """Writes rows, one a file; `rows` of them during each listing of the folder that another makes."""

    def __init__(
        self, folder: Path, patch: pytest.MonkeyPatch, row: Callable[[int], Row], *, last: int, keep_bytes: int, rows: int, listing: str
    ) -> None:
        self.number = last
        """The number of the newest row."""
        self.room = 100
        """The number of rows that listings may still write."""
        self._file = MetricsFile(folder, MetricsConfig(file_bytes=100, keep_bytes=keep_bytes))
        self._row, self._rows, self._listing, self._writing = row, rows, listing, False
        self._names = Path.iterdir
        patch.setattr(Path, "iterdir", lambda path: self._list(path) if path == folder and not self._writing else self._names(path))

    def write(self, rows: int) -> None:
        self._writing = True
        for _ in range(rows):
            self.number += 1
            self._file.write([self._row(self.number)])
        self._file.close()
        self._writing = False

    def _list(self, path: Path) -> Iterator[Path]:
        before = list(self._names(path))
        rows = min(self._rows, self.room)
        self.room -= rows
        self.write(rows)
        after = list(self._names(path))
        new = sorted(set(after) - set(before))
        return iter({"old": before, "new": after, "torn": [*before, *new[-1:]]}[self._listing])
