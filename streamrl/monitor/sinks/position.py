"""How far a sink has written, in its own folder: one that is started again goes on from there."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from streamrl.errors import SchemaError
from streamrl.monitor.series import BATCH, EVALUATION, Row
from streamrl.schemas.versions import Version
from streamrl.system import write_private

logger = logging.getLogger(__name__)


class Position(msgspec.Struct, kw_only=True):
    """What has been written."""

    began_s: float = 0.0
    """Unix seconds when the sink was first started."""
    version: str = ""
    """Of the newest batch; empty: none."""
    evaluated_s: float = -1.0
    """Time of the newest evaluation, in Unix seconds; -1: none."""
    evaluated: int | None = None
    """Highest sequence of the events of evaluations; None: none is known."""
    id: str = ""
    """Under which a service knows the run."""
    sizes: dict[str, int] = {}
    """Bytes by file, where what is written is files."""

    def add(self, rows: Sequence[Row]) -> None:
        """These rows are written."""
        for row in rows:
            if row.kind == BATCH:
                self.version = row.version
            elif row.kind == EVALUATION:
                self.evaluated_s = max(self.evaluated_s, row.time_s)
                self.evaluated = max(self.evaluated or 0, row.sequence)

    def has(self, sequence: int, time_s: float) -> bool:
        """Tell whether the evaluation is written whose event has this sequence and time (Unix seconds).

        Times alone would not do, for evaluators' clocks differ and go back; nor would sequences, which a stream without its end gives anew.
        """
        return time_s <= self.evaluated_s and (self.evaluated is None or sequence <= self.evaluated)

    @property
    def newest(self) -> Version | None:
        """Of the batches that are written."""
        return Version.parse(self.version) if self.version else None

    def store(self, path: Path) -> None:
        """Write it; readers see no half file. Raises OSError."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(path, msgspec.json.encode(self))


def load(path: Path) -> Position:
    """The stored position; a new one where there is none, or none that can be read."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Position)
        _ = found.newest
        return found
    except FileNotFoundError:
        pass
    except (OSError, msgspec.MsgspecError, SchemaError) as error:
        logger.warning("event=position_not_read path=%s error=%s", path, error)
    return Position(began_s=time.time())
