from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import resource
import threading
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pandas
import pytest

from streamrl.config.metrics import MetricsConfig
from streamrl.monitor.metrics_file import MetricsFile, decoded, encoded, files, numbered, written_version
from streamrl.monitor.row_writer import MOST_WAITING, RowWriter
from streamrl.monitor.series import Row, Series
from streamrl.monitor.view import RunView
from streamrl.schemas.versions import Version
from streamrl.telemetry.metrics import report
from tests.monitor.conftest import MakeEntry, as_line

CONFIG = MetricsConfig()


def row(number: int, **values: float) -> Row:
    return Row(time_s=1000.0 + number, kind="batch", version=f"0.{number}", step=number, values={"train/loss": 0.5, **values})


def written(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in files(folder) for line in path.read_bytes().splitlines()]


def test_a_row_is_one_flat_object_and_comes_back() -> None:
    one = Row(time_s=1.5, kind="window", of="engine-0", version="0.3", step=2, values={"engine/tokens_total": 4.0})
    assert json.loads(encoded(one)) == {
        "time_s": 1.5, "kind": "window", "of": "engine-0", "version": "0.3", "step": 2, "engine/tokens_total": 4.0
    }  # fmt: skip
    assert decoded(encoded(one)) == one
    for line in (b"", b"{", b"[]", b"\0\0", b'{"time_s":1}', b'{"time_s":"x","kind":"batch","of":"","version":"","step":1}', b"\xff"):
        assert decoded(line) is None


def test_pandas_and_duckdb_read_it_across_files(tmp_path: Path, entry: MakeEntry) -> None:
    view = RunView("demo", series=Series(window_s=1.0))
    file = MetricsFile(tmp_path / "metrics", MetricsConfig(file_bytes=1 << 16))
    view.take_rows(0.0)
    for number in range(1, 801):
        view.ledger(as_line(entry(number)))
        view.metric(report("engine-0", {"engine/tokens_total": number}, time_s=0.0))
        file.write(view.take_rows(float(number)))
    file.close()
    paths = files(tmp_path / "metrics")
    assert len(paths) > 2
    frame: Any = pandas.concat(pandas.read_json(path, lines=True, dtype={"version": str}) for path in paths)
    batches = frame[frame.kind == "batch"]
    assert list(batches.version) == [f"0.{number}" for number in range(1, 801)]
    assert frame[frame.of == "engine-0"]["engine/tokens_total"].sum() == sum(range(1, 801))
    found = duckdb.execute(
        f"""select sum("engine/tokens_total"), count(*) filter (kind = 'batch'), avg("rollout/raw_reward")
        from read_json('{tmp_path}/metrics/metrics*.jsonl', format='newline_delimited', union_by_name=true)"""
    ).fetchall()
    assert found == [(2 * sum(range(1, 801)), 800, 0.5)], "the engine's rows and the run's"


def test_a_second_session_appends_what_is_new_and_repeats_nothing(tmp_path: Path, entry: MakeEntry) -> None:
    for last in (5, 9):
        view = RunView("demo", series=Series(after=written_version(tmp_path)))
        file = MetricsFile(tmp_path, CONFIG)
        for number in range(1, last + 1):
            view.ledger(as_line(entry(number)))
        file.write(view.take_rows(0.0))
        file.close()
    assert [one["version"] for one in written(tmp_path)] == [f"0.{number}" for number in range(1, 10)]


def test_windows_before_the_ledger_is_read_again_do_not_set_the_version_back(tmp_path: Path, entry: MakeEntry) -> None:
    view = RunView("demo", series=Series(window_s=1.0, after=Version(0, 50)))
    view.take_rows(0.0)
    view.ledger(as_line(entry(1)))
    file = MetricsFile(tmp_path, CONFIG)
    file.write(view.take_rows(1.0))
    file.close()
    assert written_version(tmp_path) == Version(0, 50)
    file.write([Row(time_s=1.0, kind="evaluation", version="0.20", values={"eval/heldout": 0.5})])
    file.close()
    assert written_version(tmp_path) == Version(0, 50), "an evaluation is of an older version"


@pytest.mark.parametrize("torn", [b'{"time_s":10', b"\0" * 5000, b'{"time_s":1.0,"kind":"batch"}'])
def test_a_torn_last_line_is_cut(tmp_path: Path, torn: bytes, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(encoded(row(1)) + encoded(row(2)) + torn)
    assert written_version(tmp_path) == Version(0, 2)
    file = MetricsFile(tmp_path, CONFIG)
    file.write([row(3)])
    file.close()
    assert [one["version"] for one in written(tmp_path)] == ["0.1", "0.2", "0.3"]
    assert "event=metrics_torn" in caplog.text


def test_a_whole_line_that_is_no_row_is_left_and_passed_over(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(encoded(row(1)) + b"what is this\n")
    file = MetricsFile(tmp_path, CONFIG)
    file.write([row(2)])
    file.close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == encoded(row(1)) + b"what is this\n" + encoded(row(2))
    assert written_version(tmp_path) == Version(0, 2)


def test_files_are_put_aside_and_the_oldest_go(tmp_path: Path) -> None:
    (tmp_path / "metrics-notes.jsonl").write_text("mine")
    (tmp_path / "metrics-000000001x.jsonl").write_text("mine")
    file = MetricsFile(tmp_path, MetricsConfig(file_bytes=1 << 16, keep_bytes=1 << 18))
    many = {f"train/mis_{index}": 0.123456789 for index in range(40)}
    for number in range(1, 1001):
        file.write([row(number, **many)])
    file.close()
    aside = numbered(tmp_path)
    assert 2 <= len(aside) <= 4 and min(aside) > 1 and list(aside) == list(range(min(aside), max(aside) + 1))
    assert all(path.stat().st_size <= 1 << 16 for path in files(tmp_path))
    kept = [one["step"] for one in written(tmp_path)]
    assert kept == list(range(kept[0], 1001)) and kept[0] > 1
    assert (tmp_path / "metrics-notes.jsonl").read_text() == "mine"
    assert written_version(tmp_path) == Version(0, 1000)


@pytest.mark.parametrize("kind", ["folder", "link", "pipe", "other"])
def test_what_is_no_file_of_ours_is_left_alone(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "metrics.jsonl"
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        (tmp_path / "precious").write_text("precious")
        path.symlink_to(tmp_path / "precious")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(b"x" * (3 << 20))
    with pytest.raises(OSError):
        MetricsFile(tmp_path, CONFIG).write([row(1)])
    if kind == "link":
        assert (tmp_path / "precious").read_text() == "precious"
    if kind == "other":
        assert path.stat().st_size == 3 << 20


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    first, second = MetricsFile(tmp_path, CONFIG), MetricsFile(tmp_path, CONFIG)
    first.write([row(1)])
    with pytest.raises(BlockingIOError):
        second.write([row(1)])
    first.close()
    second.write([row(2)])
    second.close()
    assert [one["version"] for one in written(tmp_path)] == ["0.1", "0.2"]


@contextlib.contextmanager
def files_of_at_most(size: int) -> Generator[None]:
    """The kernel refuses to write beyond, in the middle of a write too, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_no_room_leaves_whole_rows_and_writing_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = MetricsFile(tmp_path, CONFIG)
    file.write([row(1)])
    with files_of_at_most(len(encoded(row(1))) + 20):
        for _ in range(3):
            with pytest.raises(OSError):
                file.write([row(2)])
            assert (tmp_path / "metrics.jsonl").read_bytes() == encoded(row(1))
    file.write([row(3)])
    file.close()
    assert [one["version"] for one in written(tmp_path)] == ["0.1", "0.3"]

    def refuse(descriptor: int, size: int) -> None:
        raise OSError(errno.EIO, "no")

    # A torn row that cannot be cut at once is cut before the next.
    whole = (tmp_path / "metrics.jsonl").stat().st_size
    with files_of_at_most(whole + 20), monkeypatch.context() as patched, pytest.raises(OSError):
        patched.setattr(os, "ftruncate", refuse)
        file.write([row(4)])
    file.write([row(5)])
    file.close()
    assert [one["version"] for one in written(tmp_path)] == ["0.1", "0.3", "0.5"]


def test_a_full_disk_costs_rows_and_one_log_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with files_of_at_most(0):
        writer = RowWriter(MetricsFile(tmp_path, CONFIG))
        for number in range(50):
            writer.offer([row(number)])
        writer.close()
    assert writer.num_lost == 50
    assert caplog.text.count("event=metrics_lost") == 1
    assert written(tmp_path) == []


class StuckDisk:
    """A write that does not return until it is let go."""

    def __init__(self) -> None:
        self.go_on, self.num_written = threading.Event(), 0

    def write(self, rows: Sequence[Row]) -> None:
        self.go_on.wait(60)
        self.num_written += len(rows)

    def close(self) -> None:
        pass


def test_a_disk_that_does_not_answer_blocks_nobody_and_what_has_no_room_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    disk = StuckDisk()
    writer = RowWriter(disk)
    offered = MOST_WAITING + 2000
    for number in range(offered):
        writer.offer([row(number)])  # would never return if it waited
    assert not writer.has_room
    lost = writer.num_lost
    assert 2000 - 256 <= lost <= 2000 and "not keep up" in caplog.text
    disk.go_on.set()
    writer.close()
    assert disk.num_written + lost == offered
