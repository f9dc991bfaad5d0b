"""Record: a whole run as files that pandas and DuckDB open and that a replay trains from, without a server.

```text
DIR/ recording.json    what it is (`Recording`)
     config.json       the configuration
     samples.parquet  messages.parquet  ledger.parquet  events.parquet      (streamrl.history.record_columns)
     blobs/            drops of ledger entries that were too many for a message
     sample_blobs/     what samples name
     model/            the initial weights, when the run had them built; else recording.json names their directory
     checkpoints/      when asked for
```
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from streamrl.bus.protocol import Log, Message
from streamrl.bus.reading import stretch
from streamrl.config.load import dump
from streamrl.config.tree import Config
from streamrl.consumers.training.gaps import versions_made
from streamrl.consumers.training.reader import open_message
from streamrl.consumers.training.sample_blobs import blobs_named
from streamrl.consumers.training.spilled_drops import whole
from streamrl.errors import ConfigError, NotFound
from streamrl.history import record_columns as columns
from streamrl.history.replay_log import read_initial_digest
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.codec import decode
from streamrl.schemas.control import RunRecord
from streamrl.schemas.images import window_named
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.subjects import EVENTS, LEDGER, SAMPLES, Subjects
from streamrl.schemas.versions import Version
from streamrl.system import new_directory

logger = logging.getLogger(__name__)

FORMAT = "recording/1"
RECORDING_FILE = "recording.json"
BLOBS = "blobs"
SAMPLE_BLOBS = "sample_blobs"
ROWS_BYTES = 32 << 20
"""A row group is written once this much has come together."""
_DROP_BYTES = 100
"""About what a drop takes as a row's value."""


class StreamFacts(msgspec.Struct, frozen=True):
    """What of a stream was recorded; nothing when `first` is above `last`."""

    identity: str
    first: int
    last: int


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """The content of recording.json."""

    format: str = FORMAT
    run: str
    trainer: str
    streams: dict[str, StreamFacts]
    """By name: samples, ledger, events."""
    samples: int
    """Rows of samples.parquet."""
    entries: int
    """Ledger entries."""
    model: str
    """Directory of the initial weights; relative to the recording where they were copied."""
    initial_digest: str
    """Digest of version 0; empty when it was not known any more."""
    record: RunRecord | None
    highest: str = "0.0"
    """Last version number under the newest epoch: a ledger.parquet without it has lost its end. 0.0: not noted."""


async def record(bus: Log, config: Config, run: RunDir, out: Path, *, run_record: RunRecord | None, checkpoints: bool = False) -> Recording:
    """Write everything that the run's log has at this moment into the new directory `out`, whole or not at all.

    Args:
        bus: of the run; only read. On a live run the caller holds a position, so that nothing is trimmed meanwhile.
        config: the run's.
        run: its directory.
        out: must not exist.
        run_record: what the run was started with.
        checkpoints: copy the trainer's checkpoints too.

    Raises:
        ConfigError: `out` exists, or cannot be written.
        LogTruncated: the stream was trimmed while it was read.
    """
    try:
        with new_directory(out) as scratch:
            subjects, trainer = Subjects(config.run.name), config.trainer.name
            made = await versions_made(bus, subjects, None, trainer=trainer, run_path=run.path)
            # Then the ledger: whatever its entries were made of is on the sample stream by then.
            ledger = await _facts(bus, LEDGER)
            entries, newest = await _write_ledger(bus, ledger, scratch, subjects.ledger(trainer))
            samples = await _facts(bus, SAMPLES)
            rows = await _write_samples(bus, samples, scratch)
            events = await _facts(bus, EVENTS)
            await _write(bus, EVENTS, events, scratch / "events.parquet", columns.events_schema(), columns.event_row)
            (scratch / "config.json").write_text(dump(config), encoding="utf-8")
            found = Recording(
                run=config.run.name,
                trainer=config.trainer.name,
                streams={SAMPLES: samples, LEDGER: ledger, EVENTS: events},
                samples=rows,
                entries=entries,
                model=await asyncio.to_thread(_copy_model, config, run, scratch),
                initial_digest=await read_initial_digest(bus),
                record=run_record,
                highest=str(max([newest, *made.values()])),
            )
            if checkpoints:
                await asyncio.to_thread(_copy_checkpoints, run.checkpoints, scratch / "checkpoints", f"{config.trainer.name}-")
            (scratch / RECORDING_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    except FileExistsError as error:
        what = f"expected a directory that does not exist yet for the recording, got {out}"
        raise ConfigError(what, hint="choose another --out") from error
    except OSError as error:
        raise ConfigError(f"the recording {out} cannot be made: {error}", hint="choose another --out; is the disk full?") from error
    logger.info(
        "event=recorded run=%s messages=%d samples=%d entries=%d path=%s", found.run, samples.last - samples.first + 1, rows, entries, out
    )
    return found


async def _facts(bus: Log, stream: str) -> StreamFacts:
    state = await bus.state(stream)
    return StreamFacts(state.identity, state.first, state.last)


async def _write(bus: Log, stream: str, facts: StreamFacts, path: Path, schema: pa.Schema, row: Callable[[Message], dict[str, Any]]) -> int:
    """Messages of a stream to a table of one row each; returns how many."""
    with Table(path, schema) as table:
        async for message in stretch(bus, stream, first=facts.first, last=facts.last):
            table.add(row(message), len(message.body))
        return table.num_rows


async def _write_ledger(bus: Log, facts: StreamFacts, directory: Path, subject: str) -> tuple[int, Version]:
    """The ledger to ledger.parquet, and the blobs that its entries name; returns the entries, and `Recording.highest` of a subject's."""
    epoch = number = 0
    with Table(directory / "ledger.parquet", columns.ledger_schema()) as table:
        async for message in stretch(bus, LEDGER, first=facts.first, last=facts.last):
            entry = decode(message.body, LedgerEntry, where=f"{message.subject} sequence {message.sequence}")
            if not isinstance(entry.spilled, msgspec.UnsetType):
                path = blob_path(directory, entry.spilled.blob)
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(await bus.blobs.get(entry.spilled.blob))
                entry = await whole(bus.blobs, entry)
            table.add(columns.ledger_row(message, entry), len(message.body) + _DROP_BYTES * len(entry.drops))
            if message.subject == subject:
                number = entry.version.number if entry.gap is not msgspec.UNSET else max(number, entry.version.number)
                epoch = max(epoch, entry.version.epoch)
        return table.num_rows, Version(epoch, number)


def blob_path(recording: Path, name: str, folder: str = BLOBS) -> Path:
    """Where a recording keeps a blob; images of one row are kept once, whatever the window of their tasks."""
    if window_named(name):
        return recording / folder / name.rpartition("/")[2]
    return recording / folder / name.replace("/", "~")


async def _write_samples(bus: Log, facts: StreamFacts, directory: Path) -> int:
    """The sample stream to messages.parquet and samples.parquet; returns the rows of the latter."""
    with (
        Table(directory / "messages.parquet", columns.messages_schema()) as messages,
        Table(directory / "samples.parquet", columns.samples_schema()) as rows,
    ):
        async for message in stretch(bus, SAMPLES, first=facts.first, last=facts.last):
            opened = open_message(message)
            record, samples = opened.record, opened.samples
            messages.add(columns.message_row(message, record, samples), 200 if samples is not None else len(message.body))
            if samples is not None:
                rows.add_batch(columns.sample_rows(message, samples), samples.nbytes)
                for name in blobs_named(samples):
                    await _copy_blob(bus, name, blob_path(directory, name, SAMPLE_BLOBS))
        return rows.num_rows


async def _copy_blob(bus: Log, name: str, path: Path) -> None:
    """One that is gone is left out: its rollout ended for that, or its group was dropped before anybody asked for it."""
    if window_named(name) and await asyncio.to_thread(path.is_file):
        return
    try:
        body = await bus.sample_blobs.get(name)
        await asyncio.to_thread(path.parent.mkdir, exist_ok=True)
        await asyncio.to_thread(path.write_bytes, body)
    except NotFound:
        logger.warning("event=blob_not_recorded name=%s", name)


class Table:
    """One Parquet file that is written row group by row group, so that memory stays bounded. Use as a context manager."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.num_rows = 0
        self._schema = schema
        self._writer = pq.ParquetWriter(path, schema, compression="zstd")
        self._rows: list[dict[str, Any]] = []
        self._batches: list[pa.RecordBatch] = []
        self._bytes = 0

    def __enter__(self) -> Table:
        return self

    def __exit__(self, *error: object) -> None:
        self._flush()
        self._writer.close()

    def add(self, row: dict[str, Any], num_bytes: int) -> None:
        """One row; `num_bytes` is about what it takes."""
        self._rows.append(row)
        self._count(1, num_bytes)

    def add_batch(self, batch: pa.RecordBatch, num_bytes: int) -> None:
        """Several rows, which stay in one row group."""
        self._batches.append(batch)
        self._count(batch.num_rows, num_bytes)

    def _count(self, num_rows: int, num_bytes: int) -> None:
        self.num_rows += num_rows
        self._bytes += num_bytes
        if self._bytes >= ROWS_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(pa.Table.from_pylist(self._rows, self._schema))
        if self._batches:
            whole = pa.Table.from_batches(self._batches, self._schema)
            self._writer.write_table(whole, row_group_size=max(1, whole.num_rows))
        self._rows, self._batches, self._bytes = [], [], 0


def _copy_model(config: Config, run: RunDir, out: Path) -> str:
    if config.model.path:
        return config.model.path
    shutil.copytree(run.model_dir, out / "model")
    return "model"


def _copy_checkpoints(source: Path, target: Path, prefix: str) -> None:
    target.mkdir()
    for path in sorted(source.glob(f"{prefix}v*")):
        try:
            shutil.copytree(path, target / path.name)
        except (FileNotFoundError, shutil.Error):  # the live trainer has removed it meanwhile: there is a newer one
            shutil.rmtree(target / path.name, ignore_errors=True)
            logger.info("event=checkpoint_gone_while_copied path=%s", path)
