"""The seam between a run's rows and what shows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from streamrl.monitor.series import BATCH, RUN, WINDOW, Row
from streamrl.schemas.versions import Version


class Sink(Protocol):
    """Takes rows in their order, from one thread. What it raises ends its process, which is started again."""

    def write(self, rows: Sequence[Row]) -> None:
        """Take rows; on return they are where a kill of this process leaves them."""
        ...

    def close(self) -> None:
        """The end: there are no more rows."""
        ...


class Once:
    """Leaves out of the run's windows what its batches have said: there both would stand under one name."""

    def __init__(self) -> None:
        self._of_batches: set[str] = set()

    def values(self, row: Row) -> dict[str, float]:
        """Those that the row says first."""
        if row.kind == BATCH:
            self._of_batches.update(row.values)
        if row.kind != WINDOW or row.of != RUN:
            return row.values
        return {name: value for name, value in row.values.items() if name not in self._of_batches}


def version_number(row: Row) -> int:
    """Batches trained up to the row, those of the warm-up included."""
    return Version.parse(row.version).number if row.version else 0
