"""Who keeps processes beside a run outlives what the machine does to it."""

from __future__ import annotations

import errno
import sys
from pathlib import Path

import pytest

from streamrl.config.tree import Config, SuperviseConfig
from streamrl.launch.local import LocalLauncher
from streamrl.launch.sidecars import Sidecar, Sidecars
from streamrl.runtime.rundir import RunDir
from tests.support.processes import until


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "demo")
    run.logs.mkdir(parents=True)
    return run


def test_the_end_of_a_log_is_read_where_it_can_be(run: RunDir) -> None:
    run.log_path("page-0").write_bytes("ä".encode() * 1_000_000 + b"\nerror: \xff no room\n\n")
    said = LocalLauncher(run, Config()).tail("page-0")
    assert said.endswith("\nerror: \N{REPLACEMENT CHARACTER} no room") and len(said) <= 4096
    run.log_path("page-1").write_text("\n".join(map(str, range(100))))
    assert LocalLauncher(run, Config()).tail("page-1").splitlines() == [str(number) for number in range(85, 100)]
    run.log_path("page-2").mkdir()
    run.log_path("page-3").touch()
    assert [LocalLauncher(run, Config()).tail(f"page-{number}") for number in (2, 3, 4)] == ["", "", ""]


@pytest.mark.process
async def test_what_one_meets_leaves_the_others_kept(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    looks: list[int] = []
    starts: list[bool] = []

    def fails(pid: int) -> None:
        looks.append(pid)
        raise OSError(errno.EMFILE, "too many open files")

    def command(again: bool) -> list[str]:
        starts.append(again)
        return [sys.executable, "-S", "-c", "raise SystemExit('error: over')"]

    notes: list[str] = []
    stays = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    both = [
        Sidecar(kind="page", called="the page", command=lambda again: stays, runs=fails),
        Sidecar(kind="sink-prometheus", called="the sink", command=command),
    ]
    config = Config(supervise=SuperviseConfig(backoff_s=0.0))
    async with Sidecars(both, run, config, note=notes.append, drain_s=0.2).kept():
        await until(lambda: len(starts) >= 3, within_s=60)
    assert looks and "event=sidecar_look_failed kind=page" in caplog.text
    assert starts[:3] == [False, True, True]
    assert [note for note in notes if note.startswith("the sink")] == [
        "the sink ended with exit code 1; over; it is started again until it runs, and the run goes on"
    ]
