"""TensorBoard's event files, one a folder: `batches`, `evaluations`, `windows` and `windows-<worker>`, which are runs of one name there.

The step of a batch or an evaluation is the number of its version, that of a window the seconds since the run's first start. Values are
float32, as the format has them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue] -- made when it is imported
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue] -- likewise
from tensorboard.summary.writer.record_writer import RecordWriter

from streamrl.monitor.series import BATCH, EVALUATION, RUN, WINDOW, Row
from streamrl.monitor.sinks.position import Position
from streamrl.monitor.sinks.protocol import version_number

FILE = "events.out.tfevents.0.streamrl"
_MOST_OPEN = 256
_FOLDERS = {BATCH: "batches", EVALUATION: "evaluations", WINDOW: "windows"}


class TensorboardFiles:
    """Appends. What a kill left behind the stored position is cut off, so that no step is there twice.

    Args:
        folder: where the folders go; made if it is not there.
        position: how far was written; `path` is where it is stored.
        path: of the position.
    """

    def __init__(self, folder: Path, position: Position, path: Path) -> None:
        self._folder = folder
        self._position = position
        self._path = path
        self._files: dict[str, _EventFile] = {}
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Also of files that are not written to again.
        for one in folder.glob(f"*/{FILE}"):
            os.truncate(one, min(position.sizes.get(one.parent.name, 0), one.stat().st_size))

    def write(self, rows: Sequence[Row]) -> None:
        """See `Sink`; raises OSError."""
        for row in rows:
            windows = row.kind == WINDOW
            name = _FOLDERS[row.kind] if row.of == RUN else f"{_FOLDERS[row.kind]}-{row.of}"
            step = max(0, int(row.time_s - self._position.began_s)) if windows else version_number(row)
            self._file(name).append(row, step)
        for name, file in self._files.items():
            self._position.sizes[name] = file.flush()
        self._position.add(rows)
        self._position.store(self._path)

    def close(self) -> None:
        """See `Sink`."""
        for file in self._files.values():
            file.close()

    def _file(self, name: str) -> _EventFile:
        if name not in self._files:
            if len(self._files) >= _MOST_OPEN:
                oldest = next(iter(self._files))
                file = self._files.pop(oldest)
                self._position.sizes[oldest] = file.flush()
                file.close()
            self._files[name] = _EventFile(self._folder / name / FILE, self._position.began_s)
        return self._files[name]


class _EventFile:
    def __init__(self, path: Path, began_s: float) -> None:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        self._file = path.open("ab")
        self._records = RecordWriter(self._file)
        if not self._file.tell():
            self._records.write(Event(wall_time=began_s, file_version="brain.Event:2").SerializeToString())

    def append(self, row: Row, step: int) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in row.values.items()]
        self._records.write(Event(wall_time=row.time_s, step=step, summary=Summary(value=values)).SerializeToString())

    def flush(self) -> int:
        """Hand all to the kernel; returns the size."""
        self._file.flush()
        return self._file.tell()

    def close(self) -> None:
        self._file.close()
