import os
import shutil
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from streamrl.bus.memory import MemoryBus
from streamrl.bus.protocol import Message
from streamrl.config.tree import BusConfig
from streamrl.consumers.training.reader import open_message
from streamrl.errors import ConfigError, LogTruncated, NotFound, SchemaError
from streamrl.history import record as record_module
from streamrl.history.record import record
from streamrl.history.record_log import RecordedLog
from streamrl.schemas.columns import OPTIONAL, arrow_schema
from streamrl.schemas.encoding import encode_samples
from streamrl.schemas.samples import BlobRef, Branch, TurnSpan
from streamrl.schemas.subjects import LEDGER, SAMPLES, Subjects
from tests.golden.generate import FOLDER as GOLDEN
from tests.support.errors import raises
from tests.support.recorded_run import Recorded
from tests.support.rows import sample


async def read_all(log: RecordedLog, after: int = 0) -> list[Message]:
    """Everything above `after`; the end of a recording is an error, so that nobody waits for more."""
    found: list[Message] = []
    with pytest.raises(LogTruncated):
        async for message in log.read(SAMPLES, after=after):
            found.append(message)
    return found


def same_samples(a: Message, b: Message) -> None:
    ours, theirs = open_message(a), open_message(b)
    assert ours.record == theirs.record
    if ours.samples is None or theirs.samples is None:
        assert bytes(a.body) == bytes(b.body)
        assert ours.samples is None and theirs.samples is None
        return
    assert ours.samples.batch.equals(theirs.samples.batch, check_metadata=True)
    assert np.array_equal(ours.samples.logprobs.view(np.int32), theirs.samples.logprobs.view(np.int32)), "bit for bit"


async def test_every_message_reads_as_it_did_from_anywhere(recorded: Recorded) -> None:
    read = await read_all(RecordedLog(recorded.path))
    assert [(m.sequence, m.subject) for m in read] == [(sequence, subject) for sequence, subject, _, _ in recorded.messages]
    for mine, (sequence, subject, body, headers) in zip(read, recorded.messages, strict=True):
        same_samples(mine, Message(subject, sequence, body, headers))
    kinds = {type(open_message(m).record).__name__ for m in read}
    assert {"Rollouts", "Ended", "Poison"} <= kinds, "the run must have had all of these"
    log = RecordedLog(recorded.path)
    whole = await read_all(log)
    for after in (1, 17, len(whole) - 1):
        assert [m.sequence for m in await read_all(log, after)] == [m.sequence for m in whole[after:]]
    assert bytes((await log.fetch(SAMPLES, 17)).body) == bytes(whole[16].body)
    with pytest.raises(NotFound):
        await log.fetch(SAMPLES, len(whole) + 1)


async def test_what_some_messages_say_and_others_do_not_is_kept(recorded: Recorded, tmp_path: Path) -> None:
    """Messages of both versions of the schema side by side in the same row groups."""
    bus = MemoryBus(recorded.config.run.name, BusConfig())
    subject = Subjects(recorded.config.run.name).samples("main")
    turns = (TurnSpan(start=2, length=1, inexact=True, engine="e", asked_s=1.5), TurnSpan(start=3, length=1))
    root, branch = sample(0, num_samples=2), sample(0, sample=1, num_samples=2, branch=Branch(0, 4), loss_mask=np.zeros(4, np.uint8))
    bodies = [
        (GOLDEN / "samples-1.bin").read_bytes(),
        encode_samples([sample(0), sample(1)]),
        encode_samples([sample(0, turns=turns, counters={"cached_tokens": 3.0}), sample(1)]),
        encode_samples([root, branch, sample(1, images=BlobRef("images/3", "ab" * 32, 1, 2))]),
        encode_samples([sample(0, claimed_s=1.0, scored_s=2.0)]),
        b"no samples",
    ]
    sent = [await bus.fetch(SAMPLES, (await bus.publish(subject, body, headers={})).sequence) for body in bodies]
    await record(bus, recorded.config, recorded.run, tmp_path / "out", run_record=None)
    read = await read_all(RecordedLog(tmp_path / "out"))
    for mine, theirs in zip(read, sent, strict=True):
        same_samples(mine, theirs)
    assert [type(open_message(m).record).__name__ for m in read] == ["Rollouts"] * 5 + ["Poison"]
    await record(RecordedLog(tmp_path / "out"), recorded.config, recorded.run, tmp_path / "again", run_record=None)
    for mine, theirs in zip(await read_all(RecordedLog(tmp_path / "again")), sent, strict=True):
        same_samples(mine, theirs)
    await bus.close()


async def test_several_row_groups_read_like_one(recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_module, "ROWS_BYTES", 10000)
    log = RecordedLog(recorded.path)
    out = tmp_path / "again"
    await record(log, recorded.config, recorded.run, out, run_record=None)
    for name in ("samples", "messages", "ledger"):
        assert pq.ParquetFile(out / f"{name}.parquet").num_row_groups > 3, name
    again = RecordedLog(out)
    for mine, theirs in zip(await read_all(again), await read_all(log), strict=True):
        same_samples(mine, theirs)
    assert (await again.last(f"{recorded.config.run.name}.ledger.main")) == (await log.last(f"{recorded.config.run.name}.ledger.main"))
    assert [m.sequence for m in await read_all(again, 100)] == [m.sequence for m in await read_all(log, 100)]


async def test_the_ledger_keeps_its_bytes(recorded: Recorded) -> None:
    log, entries = RecordedLog(recorded.path), []
    with pytest.raises(LogTruncated):
        async for message in log.read(LEDGER, after=0, subject="parent.ledger.main"):
            entries.append(message)
    assert len(entries) == len(recorded.ledger) == recorded.recording.entries
    table = pq.read_table(recorded.path / "ledger.parquet")
    assert table.column("digest").to_pylist() == [entry.digest for entry in recorded.ledger]
    assert [bytes(m.body) for m in entries] == table.column("body").to_pylist()


def test_the_tables_open_in_arrow_pandas_and_duckdb(recorded: Recorded) -> None:
    samples = ds.dataset(recorded.path / "samples.parquet").to_table()
    assert (samples.column_names, samples.num_rows) == (["sequence", "subject", *arrow_schema(*OPTIONAL).names], recorded.recording.samples)
    used = {s for entry in recorded.ledger for group in entry.used for s in group.sequences}
    assert used <= set(samples.column("sequence").to_pylist())
    query = f"""
        select l.number, avg(s.reward), sum(len(s.tokens))
        from (select number, unnest(tasks) as task from '{recorded.path}/ledger.parquet' where source = 'main') l
        join '{recorded.path}/samples.parquet' s using (task) group by l.number order by l.number
    """
    rows = fetched(query)
    assert [row[0] for row in rows] == [e.version.number for e in recorded.ledger if e.source == "main"]
    frame = pandas.read_parquet(recorded.path / "samples.parquet")
    assert len(frame) == recorded.recording.samples
    assert list(frame["tokens"].iloc[0]) == fetched(f"select tokens from '{recorded.path}/samples.parquet' limit 1")[0][0]


def fetched(query: str) -> list[Any]:
    found: Any = duckdb.sql(query)
    return found.fetchall()


async def test_a_failed_recording_leaves_and_overwrites_nothing(
    recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object) -> str:
        raise OSError("no space left")

    monkeypatch.setattr(record_module, "_copy_model", fail)
    with pytest.raises(ConfigError, match="no space"):
        await record(RecordedLog(recorded.path), recorded.config, recorded.run, tmp_path / "out", run_record=None)
    assert not os.listdir(tmp_path)
    with pytest.raises(ConfigError, match="does not exist yet"):
        await record(RecordedLog(recorded.path), recorded.config, recorded.run, tmp_path, run_record=None)
    with pytest.raises(SchemaError, match="expected a recording"):
        RecordedLog(tmp_path)


@pytest.mark.parametrize(("file", "column"), [("ledger.parquet", "body"), ("messages.parquet", "subject"), ("samples.parquet", "tokens")])
def test_a_recording_that_lacks_a_column_is_named(recorded: Recorded, tmp_path: Path, file: str, column: str) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(recorded.path, changed)
    table = pq.read_table(changed / file)
    pq.write_table(table.drop_columns([column]), changed / file)
    with raises(SchemaError, path=str(changed / file), missing=[column]):
        RecordedLog(changed)
