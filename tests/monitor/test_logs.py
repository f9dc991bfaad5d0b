from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from streamrl.cli import main
from streamrl.config.metrics import MetricsConfig
from streamrl.config.tree import Config, RunConfig
from streamrl.errors import ConfigError
from streamrl.monitor.logs import Logs
from streamrl.monitor.metrics_file import CURRENT, MetricsFile
from streamrl.monitor.recent import Recent
from streamrl.monitor.series import Row
from streamrl.runtime.lock import lock_run
from streamrl.runtime.rundir import RunDir
from streamrl.telemetry.logs import LineFormatter
from tests.support.errors import raises


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "runs" / "demo")
    run.create()
    run.write_config(Config(run=RunConfig(name="demo")))
    return run


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
    assert words(Logs(run).past(last=3)) == ["deep", "e", "f"]
    assert words(Logs(run).past(last=0)) == []
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

    steps = iter(
        [
            lambda: append(log, " a line\n"),
            lambda: append(log, at(2, "b")),
            rotate,
            lambda: append(run.log_path("engine-0"), at(5, "e", "engine-0")),
            lambda: log.write_text("f\n"),
            lambda: append(log, "g"),
        ]
    )

    def over() -> bool:
        step = next(steps, None)
        if step is not None:
            step()
        return step is None

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
