import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace

from streamrl.config.load import dump, override
from streamrl.config.tree import Config
from streamrl.errors import LogTruncated, SchemaError, StreamRLError
from streamrl.history.record_log import RecordedLog
from streamrl.history.replay import Range, ReplayReport, verify
from streamrl.history.source import open_source
from streamrl.models.directories import list_checkpoints
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.events import Event
from streamrl.schemas.ledger import LedgerEntry
from tests.support.recorded_run import Recorded

pytestmark = pytest.mark.whole


@pytest.fixture
def copy(recorded: Recorded, tmp_path: Path) -> Path:
    """A recording that may be spoiled."""
    return Path(shutil.copytree(recorded.path, tmp_path / "copy"))


async def replayed(path: Path, span: Range | None = None, **options: Any) -> ReplayReport:
    async with open_source(str(path)) as source:
        given = {name: getattr(source, name) for name in ("checkpoints", "config_difference", "initial_digest", "highest")}
        return await verify(source.config, source.log, source.model_dir, span=span, **given, **options)


def change(path: Path, edit: Callable[[Any], Any]) -> None:
    """Rewrite a table through a function of it."""
    table = pq.read_table(path)
    pq.write_table(edit(table).cast(table.schema), path)


def edited_entries(path: Path, edit: Callable[[Any], Any]) -> None:
    """Rewrite the ledger's exact bytes through a function of an entry."""

    def rewrite(table: pa.Table) -> pa.Table:
        bodies = [encode(edit(decode(body, LedgerEntry))) for body in table.column("body").to_pylist()]
        return table.set_column(table.column_names.index("body"), "body", pa.array(bodies, pa.binary()))

    change(path / "ledger.parquet", rewrite)


async def test_a_recording_gives_the_ledger_again_also_from_metrics_alone(recorded: Recorded, copy: Path) -> None:
    report = await replayed(recorded.path)
    assert report.ok and report.same_fingerprint, report.lines
    assert report.versions == report.equal == len(recorded.ledger) >= 16 and report.digest == recorded.ledger[-1].digest
    assert report.began == "0.0" and report.ended == str(recorded.ledger[-1].version)
    warmup = [entry for entry in recorded.ledger if entry.source == "warmup"]
    trained = [entry for entry in recorded.ledger if entry.source != "warmup"]
    assert len(warmup) >= 3 and [e.score for e in warmup] == [e.metrics["train/answer_probability"] for e in warmup]
    assert len(trained) >= 16 and all(e.score is msgspec.UNSET for e in trained)
    assert [e.reward for e in trained] == [e.metrics["rollout/raw_reward"] for e in trained]
    edited_entries(copy, lambda entry: replace(entry, score=msgspec.UNSET, reward=msgspec.UNSET))
    report = await replayed(copy)
    assert report.ok and report.equal == len(recorded.ledger), report.lines


def saved(path: Path) -> list[int]:
    """Numbers of the versions that have a checkpoint."""
    return [version.number for version, _ in list_checkpoints(path / "checkpoints", "main-")]


@pytest.mark.parametrize(("first", "last"), [(9, None), (0, 5), (13, 14)])
async def test_a_stretch_begins_at_the_nearest_checkpoint(recorded: Recorded, first: int, last: int | None) -> None:
    report = await replayed(recorded.path, Range(first=first, last=last))
    assert report.ok, report.lines
    began = int(report.began.partition(".")[2])
    assert began == max((n for n in saved(recorded.path) if n <= first), default=0)
    end = last or len(recorded.ledger)
    assert (report.versions, report.digest) == (end - began, recorded.ledger[end - 1].digest)


async def test_a_recording_that_is_not_whole_is_refused_at_once(copy: Path) -> None:
    for name in ("config.json", "ledger.parquet", "samples.parquet"):
        whole = (copy / name).read_bytes()
        for damage in (lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:40])):
            damage(copy / name)
            with pytest.raises(StreamRLError, match=name):
                _ = RecordedLog(copy).config
            (copy / name).write_bytes(whole)
    assert RecordedLog(copy).config.run.name == "parent"


async def test_a_shortened_recording_is_found(recorded: Recorded, copy: Path) -> None:
    newest = recorded.ledger[-1].version.number
    change(copy / "ledger.parquet", lambda table: table.slice(0, table.num_rows - 3))
    report = await replayed(copy)
    assert not report.ok and report.equal == newest - 3
    [lost] = report.lost
    assert lost.endswith(f" version {newest - 2} to {newest}")
    within = await replayed(copy, Range(last=newest - 3))
    assert within.ok, within.lines
    change(copy / "ledger.parquet", lambda table: pa.concat_tables([table.slice(0, 4), table.slice(6)]))
    report = await replayed(copy)
    assert report.versions == 4 and report.lost[0].endswith(f" version 5 to 6, {newest - 2} to {newest}")


async def test_a_shortened_recording_of_an_earlier_build_is_refused(copy: Path) -> None:
    """It says how many entries it has, and not which is the last."""
    facts = msgspec.json.decode((copy / "recording.json").read_bytes())
    del facts["highest"]
    (copy / "recording.json").write_bytes(msgspec.json.encode(facts))
    assert (await replayed(copy)).ok
    change(copy / "ledger.parquet", lambda table: table.slice(0, table.num_rows - 3))
    with pytest.raises(SchemaError):
        await replayed(copy)


def with_samples(copy: Path, **bounds: int) -> None:
    """Let a recording say that its samples begin or end elsewhere."""
    known = RecordedLog(copy).recording
    streams = known.streams | {"samples": replace(known.streams["samples"], **bounds)}
    (copy / "recording.json").write_bytes(msgspec.json.encode(replace(known, streams=streams)))


async def test_a_shortened_sample_stream_is_said_at_once(recorded: Recorded, copy: Path) -> None:
    end = recorded.ledger[9].cursor
    with_samples(copy, last=end)
    report = await replayed(copy)
    assert not report.ok and report.versions == report.equal == sum(entry.cursor <= end for entry in recorded.ledger)
    assert f"at sequence {end}" in report.lost[0]


async def test_a_trimmed_recording_needs_a_checkpoint(copy: Path) -> None:
    with_samples(copy, first=30)
    for name in ("samples", "messages"):
        change(copy / f"{name}.parquet", lambda table: table.filter(pc.field("sequence") >= 30))
    with pytest.raises(LogTruncated):
        await replayed(copy)
    report = await replayed(copy, Range(first=14))
    assert report.ok, report.lines
    assert report.began == f"0.{max(n for n in saved(copy) if n <= 14)}"


async def test_changed_samples_are_named_as_data(recorded: Recorded, copy: Path) -> None:
    entry = recorded.ledger[10]
    sequence = entry.used[0].sequences[0]

    def tamper(table: pa.Table) -> pa.Table:
        hit = np.array(table.column("sequence")) == sequence
        rewards = np.array(table.column("reward").fill_null(np.nan))
        changed = pa.array(np.where(hit, rewards + 0.5, rewards), from_pandas=True)
        return table.set_column(table.column_names.index("reward"), "reward", changed)

    change(copy / "samples.parquet", tamper)
    report = await replayed(copy)
    assert not report.ok and report.first_difference is not None
    assert report.first_difference.cause == "data", report.lines
    arrived = next(e for e in recorded.ledger if e.cursor >= sequence)
    assert report.first_difference.version == str(arrived.version), "the reward counts for the batch before which it arrived"
    assert "raw_reward" in report.first_difference.detail


async def test_a_lost_group_is_named(recorded: Recorded, copy: Path) -> None:
    entry = recorded.ledger[6]
    group, *others = entry.used
    swapped = replace(entry, used=(replace(group, sequences=(1,) * len(group.sequences)), *others))
    edited_entries(copy, lambda one: swapped if one == entry else one)
    report = await replayed(copy)
    assert not report.ok and report.problem and report.first_difference is not None
    assert report.first_difference.version == str(entry.version) and f"task {group.task} " in report.first_difference.what
    assert report.first_difference.cause == "schema", "message 1 is no Arrow data"
    assert report.versions == 6, "all before it were compared"


async def test_another_fingerprint_is_named_and_compared_by_tolerance(recorded: Recorded, copy: Path) -> None:
    def elsewhere(entry: LedgerEntry) -> LedgerEntry:
        metrics = {name: value * (1 + 1e-6) if name == "train/loss" else value for name, value in entry.metrics.items()}
        return replace(entry, fingerprint="0" * 16, digest="f" * 16, metrics=metrics)

    edited_entries(copy, elsewhere)
    tell_fingerprint(copy, recorded.config, "0" * 16, numpy="1.0.0")
    report = await replayed(copy, Range(last=8))
    assert report.ok and report.by_tolerance, report.lines
    assert report.equal == 0 and not report.same_fingerprint
    assert any(line.startswith("numpy: ") and line.endswith("1.0.0 there") for line in report.fingerprint_lines), report.fingerprint_lines
    assert "fingerprint" in report.lines[0], "fingerprints come first"
    assert "train/loss" in report.deviation_of and 0 < report.deviation < 1e-4
    strict = await replayed(copy, Range(last=8), tolerance=1e-9)
    assert not strict.ok and "beyond" in "\n".join(strict.lines)


def tell_fingerprint(path: Path, config: Config, digest: str, **others: str) -> None:
    """Put the values behind a fingerprint into the recorded events, with some of them changed."""

    def add(table: pa.Table) -> pa.Table:
        rows = table.to_pylist()
        for row in rows:
            event = decode(row["body"], Event)
            if event.kind == "numerics":
                values = {**event.detail["values"], **others}
                row["body"] = encode(replace(event, detail={"fingerprint": digest, "values": values}))
        return pa.Table.from_pylist(rows, table.schema)

    change(path / "events.parquet", add)


def with_another_rate(copy: Path) -> None:
    config = RecordedLog(copy).config
    (copy / "config.json").write_text(dump(override(config, ["trainer.optimizer.learning_rate=0.01"])))


def with_other_weights(copy: Path) -> None:
    shape = msgspec.json.decode((copy / "model" / "table.json").read_bytes())
    np.save(copy / "model" / "logits.npy", np.full((shape["max_position"], shape["vocab"], shape["vocab"]), 0.25, np.float32))


def with_another(number: int, **fields: str) -> Callable[[Path], None]:
    return lambda copy: edited_entries(copy, lambda entry: replace(entry, **fields) if entry.version.number == number else entry)


@pytest.mark.parametrize(
    ("spoil", "last", "cause", "version", "words"),
    [
        (with_another_rate, 6, "config", "", "trainer.optimizer.learning_rate changed"),
        (with_other_weights, 2, "initial weights", "0.1", ""),
        (with_another(3, reference="ab" * 8), 4, "", "0.3", "ab" * 8),
        (with_another(7, digest="f" * 16), 8, "unknown", "0.7", ""),
    ],
    ids=["rate", "weights", "reference", "digest"],
)
async def test_the_first_difference_is_told(
    copy: Path, spoil: Callable[[Path], None], last: int, cause: str, version: str, words: str
) -> None:
    spoil(copy)
    report = await replayed(copy, Range(last=last))
    first = report.first_difference
    assert not report.ok and first is not None
    assert cause in ("", first.cause) and version in ("", first.version) and words in first.what + first.detail
    assert report.equal == report.versions - 1 or spoil in (with_another_rate, with_other_weights)
