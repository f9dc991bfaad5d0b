"""trackio's own store, a SQLite file: `trackio show` reads it."""

from __future__ import annotations

import datetime
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from streamrl.config.load import dump
from streamrl.config.tree import Config
from streamrl.monitor.series import RUN, Row
from streamrl.monitor.sinks.position import Position
from streamrl.monitor.sinks.protocol import Once, version_number


class TrackioStore:
    """Appends each row under the metrics' own names; those of a worker after `<worker>/`. The step is the number of the version.

    Written with the store's own function, in this process: that of `trackio.log` hides a disk that is full, and has no time of a row. What
    a kill left behind the stored position is written again and kept once, by the id of its row.

    Args:
        config: of the run; also shown there. It holds no secrets.
        folder: where the store goes; made if it is not there.
        position: how far was written.
        path: of the position.
    """

    def __init__(self, config: Config, folder: Path, position: Position, path: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.environ["TRACKIO_DIR"] = str(folder)  # read once, by the import
        from trackio.sqlite_storage import SQLiteStorage

        self._bulk_log = SQLiteStorage.bulk_log
        self._project = config.metrics.trackio.project
        self._run = config.run.name
        self._config: dict[str, object] | None = {"streamrl": dump(config)}
        self._position = position
        self._path = path
        self._once = Once()
        if not position.id:
            position.id = secrets.token_hex(8)
            position.store(path)

    def write(self, rows: Sequence[Row]) -> None:
        """See `Sink`; raises OSError and sqlite3.Error."""
        told = [(row, values) for row in rows if (values := self._once.values(row))]
        self._bulk_log(
            self._project,
            self._run,
            [values if row.of == RUN else {f"{row.of}/{name}": value for name, value in values.items()} for row, values in told],
            steps=[version_number(row) for row, _ in told],
            timestamps=[datetime.datetime.fromtimestamp(row.time_s, datetime.UTC).isoformat() for row, _ in told],
            log_ids=[f"{self._position.id}/{row.kind}/{row.of}/{row.version}/{row.time_s}" for row, _ in told],
            run_id=self._position.id,
            config=self._config,
        )
        if told:
            self._config = None
        self._position.add(rows)
        self._position.store(self._path)

    def close(self) -> None:
        """See `Sink`."""
