"""Record: a whole run as files that pandas and DuckDB open and that a replay trains from, without a server.

```text
DIR/ recording.json    what it is (`Recording`)
     config.json       the configuration
     blobs/            drops of ledger entries that were too many for a message
     sample_blobs/     what samples name
     model/            the initial weights, when the run had them built; else recording.json names their directory
     checkpoints/      when asked for
```

| file             | a row is                      | exact bytes                                                                     |
|------------------|-------------------------------|---------------------------------------------------------------------------------|
| samples.parquet  | a sample of `samples/2`       | its columns, with the message's sequence and subject in front                   |
| messages.parquet | a message of the stream       | `body`, unless it is samples: then `num_samples` rows of samples.parquet are it |
| ledger.parquet   | a ledger entry                | `body`                                                                          |
| events.parquet   | a lifecycle event             | `body`                                                                          |
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from streamrl.bus.protocol import Log, Message
from streamrl.bus.reading import read_key, stretch
from streamrl.config.load import dump
from streamrl.config.tree import Config
from streamrl.consumers.training.gaps import versions_made
from streamrl.consumers.training.reader import open_message
from streamrl.consumers.training.sample_blobs import blobs_named
from streamrl.consumers.training.spilled_drops import whole
from streamrl.core.records import Record, Rollouts
from streamrl.errors import BusUnavailable, ConfigError, NotFound, SchemaError
from streamrl.history.replay_log import read_initial_digest
from streamrl.history.tap_position import hold_stream, keeping_position
from streamrl.runtime.lock import holder
from streamrl.runtime.run_bus import open_bus
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.codec import decode
from streamrl.schemas.columns import OPTIONAL, arrow_schema, with_columns
from streamrl.schemas.control import RunRecord
from streamrl.schemas.events import Event
from streamrl.schemas.images import window_named
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.sample_batch import SampleBatch
from streamrl.schemas.subjects import EVENTS, KEY_RUN, LEDGER, SAMPLES, Subjects, kind_of
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
            await _write(bus, EVENTS, events, scratch / "events.parquet", events_schema(), event_row)
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
    with Table(directory / "ledger.parquet", ledger_schema()) as table:
        async for message in stretch(bus, LEDGER, first=facts.first, last=facts.last):
            entry = decode(message.body, LedgerEntry, where=f"{message.subject} sequence {message.sequence}")
            if not isinstance(entry.spilled, msgspec.UnsetType):
                path = blob_path(directory, entry.spilled.blob)
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(await bus.blobs.get(entry.spilled.blob))
                entry = await whole(bus.blobs, entry)
            table.add(ledger_row(message, entry), len(message.body) + _DROP_BYTES * len(entry.drops))
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
        Table(directory / "messages.parquet", messages_schema()) as messages,
        Table(directory / "samples.parquet", samples_schema()) as rows,
    ):
        async for message in stretch(bus, SAMPLES, first=facts.first, last=facts.last):
            opened = open_message(message)
            record, samples = opened.record, opened.samples
            messages.add(message_row(message, record, samples), 200 if samples is not None else len(message.body))
            if samples is not None:
                rows.add_batch(sample_rows(message, samples), samples.nbytes)
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


_IDENTITY = [("sequence", pa.int64()), ("subject", pa.utf8()), ("time_s", pa.float64())]


@cache
def samples_schema() -> pa.Schema:
    """Sequence, subject, then all columns of `samples/2`, the optional ones too; the wire schema's metadata are kept."""
    wire = arrow_schema(*OPTIONAL)
    return pa.schema([pa.field("sequence", pa.int64()), pa.field("subject", pa.utf8()), *wire], metadata=wire.metadata)


@cache
def messages_schema() -> pa.Schema:
    """One row per message of the sample stream; columns that a kind has no value for are null."""
    columns = [
        *_IDENTITY,
        ("kind", pa.utf8()),
        ("headers", pa.map_(pa.utf8(), pa.utf8())),
        ("num_samples", pa.int32()),
        ("task", pa.int64()),
        ("rollout", pa.int32()),
        ("reason", pa.utf8()),
        ("detail", pa.utf8()),
        ("reward", pa.float64()),
        ("revision", pa.int32()),
        ("name", pa.utf8()),
        ("body", pa.binary()),
    ]
    return pa.schema(columns)


@cache
def ledger_schema() -> pa.Schema:
    """One row per entry, of every trainer."""
    drop = pa.struct([("sequence", pa.int64()), ("task", pa.int64()), ("rollouts", pa.list_(pa.int32())), ("reason", pa.utf8())])
    columns = [
        *_IDENTITY,
        ("trainer", pa.utf8()),
        ("epoch", pa.int32()),
        ("number", pa.int64()),
        ("source", pa.utf8()),
        ("tasks", pa.list_(pa.int64())),
        ("staleness", pa.list_(pa.int64())),
        ("drops", pa.list_(drop)),
        ("cursor", pa.int64()),
        ("granted", pa.int64()),
        ("retired", pa.int64()),
        ("warm", pa.bool_()),
        ("digest", pa.utf8()),
        ("fingerprint", pa.utf8()),
        ("num_samples", pa.int64()),
        ("num_tokens", pa.int64()),
        ("metrics", pa.map_(pa.utf8(), pa.float64())),
        ("body", pa.binary()),
    ]
    return pa.schema(columns)


@cache
def events_schema() -> pa.Schema:
    """One row per event."""
    return pa.schema([*_IDENTITY, ("kind", pa.utf8()), ("worker", pa.utf8()), ("detail", pa.utf8()), ("body", pa.binary())])


def sample_rows(message: Message, samples: SampleBatch) -> pa.RecordBatch:
    """The rows of samples.parquet that one message gives."""
    count = samples.num_rows
    front = [pa.array([message.sequence] * count, pa.int64()), pa.array([message.subject] * count, pa.utf8())]
    columns = with_columns(samples.batch, arrow_schema(*OPTIONAL)).columns
    return pa.RecordBatch.from_arrays([*front, *columns], schema=samples_schema())


def message_row(message: Message, record: Record, samples: SampleBatch | None) -> dict[str, Any]:
    """The row of messages.parquet: what the fold makes of the message, and its bytes unless its samples are rows of their own."""
    known = msgspec.structs.asdict(record)
    row = {name: known.get(name) for name in ("task", "rollout", "reason", "detail", "reward", "revision", "name")}
    return row | {
        **_identity(message),
        "kind": "unreadable" if type(record).__name__ == "Poison" else kind_of(message.subject),
        "headers": list(message.headers.items()),
        "num_samples": samples.num_rows if isinstance(record, Rollouts) and samples is not None else 0,
        "body": None if samples is not None else bytes(message.body),
    }


def ledger_row(message: Message, entry: LedgerEntry) -> dict[str, Any]:
    """The row of ledger.parquet. `entry` is the message's, with its drops in it also when they were spilled."""
    same = ("trainer", "source", "cursor", "granted", "retired", "warm", "digest", "fingerprint", "num_samples", "num_tokens")
    return {
        **_identity(message),
        **{name: getattr(entry, name) for name in same},
        "epoch": entry.version.epoch,
        "number": entry.version.number,
        "tasks": [group.task for group in entry.used],
        "staleness": list(entry.staleness),
        "drops": [{"sequence": d.sequence, "task": d.task, "rollouts": list(d.rollouts), "reason": d.reason} for d in entry.drops],
        "metrics": list(entry.metrics.items()),
        "body": bytes(message.body),
    }


def event_row(message: Message) -> dict[str, Any]:
    """The row of events.parquet; an event that cannot be read keeps its bytes only."""
    row = {**_identity(message), "kind": None, "worker": None, "detail": None, "body": bytes(message.body)}
    try:
        event = decode(message.body, Event)
    except SchemaError:
        return row
    return row | {"kind": event.kind, "worker": event.worker, "detail": msgspec.json.encode(event.detail).decode()}


def _identity(message: Message) -> dict[str, Any]:
    return {"sequence": message.sequence, "subject": message.subject, "time_s": message.time_s}


LEASE_S = 60


async def record_run(run: RunDir, out: Path, *, checkpoints: bool = False) -> Recording:
    """Record everything that the run has at this moment; while it is up, hold its stream against trimming for as long as this takes.

    Raises:
        ConfigError: `out` exists.
        LaunchError: the run is being started, or its server cannot be.
        LogTruncated: the stream was trimmed before it could be held.
    """
    config = run.load_config()
    if not config.bus.url and holder(run) is None:
        return await _record(config, run, out, checkpoints)
    try:
        return await _record(config, run, out, checkpoints, reader=f"record-{os.getpid()}")
    except BusUnavailable as error:
        if config.bus.url or holder(run) is not None:
            raise
        logger.warning("event=recording_begins_again reason=the_run_has_ended run=%s error=%s", run.name, error.message)
    return await _record(config, run, out, checkpoints)


async def _record(config: Config, run: RunDir, out: Path, checkpoints: bool, *, reader: str = "") -> Recording:
    """`reader`: under this name the stream is held meanwhile."""
    async with contextlib.AsyncExitStack() as held:
        bus = await held.enter_async_context(open_bus(run))
        if reader:
            await hold_stream(bus, reader, lease_s=LEASE_S)
            await held.enter_async_context(keeping_position(bus, reader, lease_s=LEASE_S, release=True))
        return await record(bus, config, run, out, run_record=await read_key(bus.kv, KEY_RUN, RunRecord), checkpoints=checkpoints)
