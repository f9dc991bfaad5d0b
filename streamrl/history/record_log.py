"""Reads a recording as if it were the run's bus: `RecordedLog` satisfies `streamrl.history.replay_log.Log`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from streamrl.bus.protocol import Message, StreamState
from streamrl.config.load import from_json
from streamrl.config.tree import Config
from streamrl.errors import LogTruncated, NotFound, SchemaError
from streamrl.history.record import BLOBS, FORMAT, RECORDING_FILE, SAMPLE_BLOBS, Recording, StreamFacts, blob_path
from streamrl.schemas.columns import OPTIONAL, arrow_schema, canonical
from streamrl.schemas.subjects import EVENTS, HEADER_DIGEST, LEDGER, SAMPLES, kind_of
from streamrl.schemas.versions import Version

_READ = {"sequence", "subject", "time_s", "body"}
"""Columns that a message is made of; `headers` is left out where there are none."""
_FILES = {SAMPLES: "messages.parquet", LEDGER: "ledger.parquet", EVENTS: "events.parquet"}


class RecordedBlobs:
    """The blobs of a recording; satisfies `streamrl.consumers.training.spilled_drops.BlobReader`."""

    def __init__(self, path: Path, folder: str) -> None:
        self._path, self._folder = path, folder

    async def get(self, name: str) -> bytes:
        """One blob; raises NotFound."""
        path = blob_path(self._path, name, self._folder)
        if not path.is_file():
            raise NotFound(f"expected blob {name!r} in the recording {self._path}, got none", hint="record the run again", name=name)
        return path.read_bytes()


class RecordedLog:
    """One recording. Holds at most one row group of each file in memory.

    Args:
        path: the directory.

    Raises:
        SchemaError: it holds no recording, one of another format, or one with a file that is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.recording = msgspec.json.decode((path / RECORDING_FILE).read_bytes(), type=Recording)
        except (OSError, msgspec.MsgspecError) as error:
            raise SchemaError(f"expected a recording in {path}: {error}", hint="`streamrl record RUN --out DIR` makes one") from error
        if self.recording.format != FORMAT:
            raise SchemaError(
                f"expected a recording of format {FORMAT} in {path}, got {self.recording.format}",
                hint="it was made by another version of streamrl",
            )
        self.blobs = RecordedBlobs(path, BLOBS)
        self.sample_blobs = RecordedBlobs(path, SAMPLE_BLOBS)
        self._files: dict[str, pq.ParquetFile] = {}
        self._cached: tuple[str, int, pa.Table] | None = None
        for name in (*_FILES.values(), "samples.parquet"):
            columns = _READ if name in _FILES.values() else {"sequence", *arrow_schema().names}
            if missing := sorted(columns - set(self._file(name).schema_arrow.names)):
                raise SchemaError(
                    f"expected the columns {', '.join(sorted(columns))} in {path / name}, got none called {', '.join(missing)}",
                    hint="the recording was changed; record the run again",
                    path=str(path / name),
                    missing=missing,
                )
        rows = self._file(_FILES[LEDGER]).metadata.num_rows
        if self.highest == Version() and rows < self.recording.entries:  # made by an earlier build; others say which versions are missing
            raise SchemaError(
                f"expected {self.recording.entries} entries in {path / _FILES[LEDGER]}, got {rows}",
                hint="the recording was shortened; copy or record it again",
            )

    @cached_property
    def config(self) -> Config:
        """The run's configuration."""
        path = self.path / "config.json"
        try:
            return from_json(path.read_text(encoding="utf-8"), where=str(path))
        except OSError as error:
            raise _unreadable(path, error) from error

    @property
    def model_dir(self) -> Path:
        """Directory of the initial weights."""
        return self.path / self.recording.model  # an absolute one stays what it is

    @property
    def highest(self) -> Version:
        """The highest version that is known to have been made; where that was not noted, 0.0."""
        return Version.parse(self.recording.highest)

    @property
    def checkpoints(self) -> Path:
        """Where copied checkpoints are, if there are any."""
        return self.path / "checkpoints"

    async def read(self, stream: str, *, after: int, subject: str | None = None) -> AsyncIterator[Message]:
        """See `Log.read`: raises LogTruncated where the recording begins above `after` + 1, and at its end."""
        facts = self._facts(stream)
        if facts.first > after + 1:
            raise _missing(stream, after + 1, facts)
        for message in self._messages(stream, after):
            if subject in (None, message.subject):
                yield message
        raise _missing(stream, facts.last + 1, facts)

    async def fetch(self, stream: str, sequence: int) -> Message:
        """See `Log.fetch`."""
        found = next(self._messages(stream, sequence - 1), None) if stream in self.recording.streams else None
        if found is None or found.sequence != sequence:
            raise NotFound(f"expected message {sequence} of stream {stream} in the recording {self.path}, got none", stream=stream)
        return found

    async def first_from(self, stream: str, sequence: int, *, subject: str | None = None) -> Message | None:
        """See `Log.first_from`."""
        messages = self._messages(stream, sequence - 1) if stream in self.recording.streams else iter(())
        return next((message for message in messages if subject in (None, message.subject)), None)

    async def last(self, subject: str) -> Message | None:
        """See `Log.last`; of ledgers and events."""
        stream = {"ledger": LEDGER, "events": EVENTS}.get(kind_of(subject), SAMPLES)
        for group in reversed(range(self._file(_FILES[stream]).num_row_groups)):
            subjects = self._group(_FILES[stream], group).column("subject").to_pylist()
            if subject in subjects:
                place = len(subjects) - 1 - subjects[::-1].index(subject)
                sequence = self._group(_FILES[stream], group).column("sequence")[place].as_py()
                return await self.fetch(stream, sequence)
        return None

    async def state(self, stream: str) -> StreamState:
        """See `Log.state`; a stream that is not recorded is empty."""
        facts = self._facts(stream)
        rows = self._file(_FILES[stream]).metadata.num_rows if stream in self.recording.streams else 0
        return StreamState(facts.identity, facts.first, facts.last, 0, rows)

    def _facts(self, stream: str) -> StreamFacts:
        return self.recording.streams.get(stream, StreamFacts("", 1, 0))

    def _messages(self, stream: str, after: int) -> Iterator[Message]:
        """Messages above `after`, in order."""
        bodies = self._bodies(after) if stream == SAMPLES else iter(())
        for row in self._rows(_FILES[stream], after):
            body, headers = row["body"], dict(row.get("headers") or ())
            if body is None:
                # The digest was found right when the message was recorded; Arrow may write the same rows as other bytes.
                headers.pop(HEADER_DIGEST, None)
                sequence, body = next(bodies, (0, b""))
                if sequence != row["sequence"]:
                    raise SchemaError(
                        f"expected the samples of message {row['sequence']} in {self.path / 'samples.parquet'}, got those of {sequence}",
                        hint="the recording was changed or is damaged; record the run again",
                    )
            yield Message(row["subject"], row["sequence"], body, headers, row["time_s"])

    def _rows(self, file: str, after: int) -> Iterator[dict[str, Any]]:
        for group in self._groups(file, after):
            for row in self._group(file, group).to_pylist():
                if row["sequence"] > after:
                    yield row

    def _bodies(self, after: int) -> Iterator[tuple[int, bytes]]:
        """(sequence, Arrow IPC stream) of every message that is samples: the columns of its rows, as they came over the wire."""
        for group in self._groups("samples.parquet", after):
            table = self._group("samples.parquet", group)
            sequences = table.column("sequence").to_pylist()
            # One that an earlier version made has not all of the optional columns.
            schema = arrow_schema(*(name for name in OPTIONAL if name in table.column_names))
            wire = table.select(schema.names).cast(schema).combine_chunks()
            begin = 0
            for end in range(1, len(sequences) + 1):
                if end < len(sequences) and sequences[end] == sequences[begin]:
                    continue
                if sequences[begin] > after:
                    yield sequences[begin], _ipc(wire.slice(begin, end - begin), schema)
                begin = end

    def _groups(self, file: str, after: int) -> list[int]:
        """Row groups that hold a sequence above `after`."""
        metadata = self._file(file).metadata
        return [n for n in range(metadata.num_row_groups) if metadata.row_group(n).column(0).statistics.max > after]

    def _file(self, name: str) -> pq.ParquetFile:
        if name not in self._files:
            try:
                self._files[name] = pq.ParquetFile(self.path / name)
            except (OSError, pa.ArrowException) as error:
                raise _unreadable(self.path / name, error) from error
        return self._files[name]

    def _group(self, file: str, group: int) -> pa.Table:
        if file == "samples.parquet":  # read once, in order
            return self._file(file).read_row_group(group)
        if self._cached is None or self._cached[:2] != (file, group):
            self._cached = (file, group, self._file(file).read_row_group(group))
        return self._cached[2]


def _ipc(rows: pa.Table, schema: pa.Schema) -> bytes:
    # Concatenated anew, so that the message holds its own rows and not the whole row group.
    arrays = [pa.concat_arrays(column.chunks) if column.num_chunks != 1 else column.chunk(0) for column in rows.columns]
    sink = pa.BufferOutputStream()
    batch = canonical(pa.RecordBatch.from_arrays(arrays, schema=schema))
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def _unreadable(path: Path, error: Exception) -> SchemaError:
    return SchemaError(f"expected a file of a recording at {path}: {error}", hint="is the recording whole? copy or record it again")


def _missing(stream: str, needed: int, facts: StreamFacts) -> LogTruncated:
    return LogTruncated(
        f"stream {stream}: message {needed} is needed, the recording holds {facts.first} to {facts.last}",
        hint="record with --checkpoints and replay --from a version whose checkpoint is there" if needed < facts.first else "",
        stream=stream,
        needed=needed,
        first=facts.first,
    )
