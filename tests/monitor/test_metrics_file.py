"""The file of metrics, and the logs of workers."""

import contextlib
import errno
import json
import logging
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pandas
import pytest

from streamrl.cli import main
from streamrl.config.metrics import MetricsConfig
from streamrl.errors import ConfigError
from streamrl.monitor.logs import Logs
from streamrl.monitor.metrics_file import CURRENT, MetricsFile, decoded, encoded, files, numbered, written_version
from streamrl.monitor.recent import Recent
from streamrl.monitor.row_writer import MOST_WAITING, RowWriter
from streamrl.monitor.series import Row, Series
from streamrl.monitor.view import RunView
from streamrl.runtime.lock import lock_run
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.versions import Version
from streamrl.telemetry.logs import LineFormatter
from streamrl.telemetry.metrics import report
from tests.monitor.conftest import MakeEntry, as_line, view_of
from tests.support.errors import raises
from tests.support.runs import named_run

CONFIG = MetricsConfig()


def row(number: int, **values: float) -> Row:
    return Row(time_s=1000.0 + number, kind="batch", version=f"0.{number}", step=number, values={"train/loss": 0.5, **values})


def write(folder: Path, *rows: Row) -> None:
    file = MetricsFile(folder, CONFIG)
    file.write(rows)
    file.close()


def versions(folder: Path) -> list[str]:
    return [one["version"] for one in written(folder)]


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
        view = view_of(*(entry(number) for number in range(1, last + 1)), series=Series(after=written_version(tmp_path)))
        write(tmp_path, *view.take_rows(0.0))
    assert versions(tmp_path) == [f"0.{number}" for number in range(1, 10)]


def test_windows_before_the_ledger_is_read_again_do_not_set_the_version_back(tmp_path: Path, entry: MakeEntry) -> None:
    view = RunView("demo", series=Series(window_s=1.0, after=Version(0, 50)))
    view.take_rows(0.0)
    view.ledger(as_line(entry(1)))
    write(tmp_path, *view.take_rows(1.0))
    assert written_version(tmp_path) == Version(0, 50)
    write(tmp_path, Row(time_s=1.0, kind="evaluation", version="0.20", values={"eval/heldout": 0.5}))
    assert written_version(tmp_path) == Version(0, 50), "an evaluation is of an older version"


@pytest.mark.parametrize("torn", [b'{"time_s":10', b"\0" * 5000, b'{"time_s":1.0,"kind":"batch"}'])
def test_a_torn_last_line_is_cut(tmp_path: Path, torn: bytes, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(encoded(row(1)) + encoded(row(2)) + torn)
    assert written_version(tmp_path) == Version(0, 2)
    write(tmp_path, row(3))
    assert versions(tmp_path) == ["0.1", "0.2", "0.3"]
    assert "event=metrics_torn" in caplog.text


def test_a_whole_line_that_is_no_row_is_left_and_passed_over(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(encoded(row(1)) + b"what is this\n")
    write(tmp_path, row(2))
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
    assert versions(tmp_path) == ["0.1", "0.2"]


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
    assert versions(tmp_path) == ["0.1", "0.3"]

    def refuse(descriptor: int, size: int) -> None:
        raise OSError(errno.EIO, "no")

    # A torn row that cannot be cut at once is cut before the next.
    whole = (tmp_path / "metrics.jsonl").stat().st_size
    with files_of_at_most(whole + 20), monkeypatch.context() as patched, pytest.raises(OSError):
        patched.setattr(os, "ftruncate", refuse)
        file.write([row(4)])
    file.write([row(5)])
    file.close()
    assert versions(tmp_path) == ["0.1", "0.3", "0.5"]


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


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return named_run(tmp_path / "runs" / "demo")


def at(second: float, text: str, worker: str = "trainer-0") -> str:
    """A line as a worker writes it."""
    record = logging.LogRecord("streamrl.x", logging.INFO, "x.py", 1, text, None, None)
    record.created = 1_800_000_000.0 + second
    record.msecs = second % 1 * 1000
    return LineFormatter(worker).format(record) + "\n"


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def words(lines: object) -> list[str]:
    return [line.decode().split()[-1] for line in lines]  # type: ignore[attr-defined]


def test_lines_are_in_order_of_time_and_tracebacks_stay_together(run: RunDir) -> None:
    run.log_path("trainer-0").write_text(at(1, "a") + at(4, "d") + "Traceback\n  deep\n" + at(6, "f"))
    run.log_path("producer-0").write_text(at(2, "b", "producer-0") + at(5, "e", "producer-0"))
    local = time.strftime("%Y/%m/%d %H:%M:%S", time.localtime(1_800_000_003))
    (run.bus_store / "nats-server.log").write_text(f"[7] {local}.000000 [INF] c\n")
    assert words(Logs(run).past()) == ["a", "b", "c", "d", "Traceback", "deep", "e", "f"]
    assert (words(Logs(run).past(last=3)), words(Logs(run).past(last=0))) == (["deep", "e", "f"], [])
    assert words(Logs(run, "trainer").past()) == words(Logs(run, "trainer-0").past()) == ["a", "d", "Traceback", "deep", "f"]
    assert words(Logs(run, "nats-server").past()) == ["c"]


def test_what_was_rotated_or_is_no_log_is_shown_too(run: RunDir) -> None:
    newest = run.log_path("trainer-0")
    newest.write_text("rest\n" + at(3, "c"))
    newest.with_name("trainer-0.log.1").write_text(at(2, "b"))
    newest.with_name("trainer-0.log.2").write_text(at(1, "a"))
    newest.with_name("trainer-0.log.gz").write_text(at(0, "no"))
    assert words(Logs(run).past()) == ["a", "b", "rest", "c"]
    for path in newest.parent.iterdir():
        path.unlink()
    newest.write_bytes(b"\xff\x00\n2026-99-99 99:99:99.999Z INFO x\n" + b"x" * (3 << 20) + b"\nno end")
    run.log_path("feeder-0").touch()
    lines = list(Logs(run).past())
    assert lines[0] == b"\xff\x00\n" and lines[-1] == b"no end\n"
    assert max(map(len, lines)) <= (1 << 20) + 1 and sum(line.count(b"x") for line in lines) == (3 << 20) + 1


def test_what_cannot_be_read_is_refused(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    with raises(ConfigError, run="demo") as error:
        Logs(run)
    assert "streamrl status demo" in str(error.value)
    for name in ("trainer-0", "supervisor"):
        run.log_path(name).touch()
    with raises(ConfigError, run="demo") as error:
        Logs(run, "trainr")
    assert "got 'trainr'" in str(error.value) and "there are supervisor, trainer-0" in str(error.value)
    command = ["logs", "demo", "--dir", os.fspath(run.path.parent)]
    assert main([*command, "-n", "-1"]) == 1
    assert "at least 0" in capsys.readouterr().err
    run.log_path("trainer-0").unlink()
    run.log_path("trainer-0").mkdir()
    assert main(command) == 1
    assert f"Is a directory: {run.log_path('trainer-0')}" in capsys.readouterr().err


def test_what_comes_is_followed_over_rotation_and_new_workers(run: RunDir) -> None:
    log = run.log_path("trainer-0")
    log.write_text(at(1, "a") + "half")
    logs = Logs(run)
    assert words(logs.past(to_the_end=False)) == ["a"]

    def rotate() -> None:
        append(log, at(3, "c"))
        log.rename(log.with_name("trainer-0.log.1"))
        append(log, at(4, "d"))

    steps = [
        lambda: append(log, " a line\n"),
        lambda: append(log, at(2, "b")),
        rotate,
        lambda: append(run.log_path("engine-0"), at(5, "e", "engine-0")),
        lambda: log.write_text("f\n"),
        lambda: append(log, "g"),
    ]

    def over() -> bool:
        if not steps:
            return True
        steps.pop(0)()
        return False

    assert words(logs.follow(over)) == ["line", "b", "c", "d", "e", "f", "g"]


@pytest.mark.process
def test_the_verb_follows_a_run_until_it_is_down(run: RunDir, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    log = run.log_path("trainer-0")
    log.write_text(at(1, "a") + at(2, "b"))
    command = ["logs", "demo", "trainer", "--dir", str(run.path.parent)]
    assert main([*command, "-n", "1"]) == 0
    assert words(capfdbinary.readouterr().out.splitlines()) == ["b"]
    with lock_run(run):
        # A process of its own: what a thread writes while the capture is being read and emptied would be lost.
        following = subprocess.Popen([sys.executable, "-m", "streamrl", *command, "-f"], stdout=subprocess.PIPE)
        assert following.stdout is not None
        lines = [following.stdout.readline(), following.stdout.readline()]
        append(log, at(3, "c"))
        lines.append(following.stdout.readline())
    rest, _ = following.communicate(timeout=60)
    assert following.returncode == 0
    assert rest == b""
    assert words(lines) == ["a", "b", "c"]


def window(time_s: float, cut: float, **values: float) -> Row:
    return Row(time_s=time_s, kind="window", values={"tokens/cut_total": cut, **values})


def test_the_last_minute_is_added_up_and_a_folder_that_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    rows, recent = MetricsFile(tmp_path, MetricsConfig()), Recent(tmp_path)
    recent.look(0.0)
    assert (recent.shares, recent.goodput) == ({}, {})
    old = window(900.0, 1.0)
    rows.write(
        [old, window(1000.0, 10.0, **{"tokens/open": 7.0, "trainer/share/compute": 1.0, "starvation/trainer": 0.0, "lag/stream_s": 1.0})]
    )
    recent.look(1001.0)
    assert recent.shares == {"trainer/share/compute": 1.0, "starvation/trainer": 0.0}
    assert recent.goodput == {"tokens/cut_total": 10.0, "tokens/open": 7.0}
    worker = Row(time_s=1010.0, kind="window", of="engine-0", values={"tokens/cut_total": 1000.0, "engine/share/idle": 1.0})
    batch = Row(time_s=1011.0, kind="batch", values={"tokens/trained_total": 50.0, "tokens/waiting": 4.0})
    rows.write([window(1010.0, 100.0, **{"tokens/open": 3.0}), worker, batch])
    for _ in range(2):
        recent.look(1012.0)
        assert recent.shares == {}
        assert recent.goodput == {"tokens/cut_total": 110.0, "tokens/open": 3.0, "tokens/trained_total": 50.0, "tokens/waiting": 4.0}
    recent.look(1065.0)
    assert recent.goodput["tokens/cut_total"] == 100.0
    recent.look(2000.0)
    assert (recent.shares, recent.goodput) == ({}, {})
    (tmp_path / "file").touch()
    recent = Recent(tmp_path / "file")
    recent.look(0.0)
    assert recent.goodput == {}


def test_files_put_aside_and_torn_lines_are_passed_over(tmp_path: Path) -> None:
    rows, recent = MetricsFile(tmp_path, MetricsConfig(file_bytes=1 << 16)), Recent(tmp_path)
    for number in range(2000):
        rows.write([window(float(number), 1.0)])
        if number % 7 == 0:
            recent.look(0.0)
    recent.look(0.0)
    assert len(list(tmp_path.iterdir())) > 1
    assert recent.goodput["tokens/cut_total"] == pytest.approx(2000, rel=0.02), "at most what was written since the look before is lost"
    with (tmp_path / CURRENT).open("ab") as file:
        file.write(b'{"of":"","time_s":1}\n\xff\n{"time_s":1.0,"kind":"window","of":"","version":"","step":0,"tok')
    before = recent.goodput
    recent.look(0.0)
    assert recent.goodput == before
    (tmp_path / CURRENT).write_bytes(b"")
    recent.look(0.0)
    assert recent.goodput == before
