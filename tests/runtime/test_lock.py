from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from streamrl.config.tree import Config, RunConfig
from streamrl.errors import LaunchError
from streamrl.launch.down import stop_run
from streamrl.runtime.lock import holder, lock_run
from streamrl.runtime.processes import signal_process, started
from streamrl.runtime.rundir import RunDir
from streamrl.weights.factory import weights_directory


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    directory = RunDir(tmp_path / "demo")
    directory.create()
    return directory


def test_a_run_has_one_holder_and_a_dead_one_is_none(run: RunDir) -> None:
    assert holder(run) is None
    with lock_run(run):
        found = holder(run)
        assert found is not None
        assert found.pid == os.getpid()
        with pytest.raises(LaunchError) as caught, lock_run(run):
            pass
        assert caught.value.values["pid"] == os.getpid()
    assert holder(run) is None
    with lock_run(run):
        pass
    run.lock_path.write_text("999999999 1")
    assert holder(run) is None
    with lock_run(run):
        assert run.lock_path.read_text() == f"{os.getpid()} {started(os.getpid())}"


def test_who_looks_keeps_nobody_from_starting(run: RunDir) -> None:
    """`status` of a run takes its lock for an instant; a start in that instant is no second start."""
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            holder(run)

    lookers = [threading.Thread(target=look) for _ in range(2)]
    for thread in lookers:
        thread.start()
    try:
        for _ in range(300):
            with lock_run(run):
                pass
    finally:
        stop.set()
        for thread in lookers:
            thread.join()


@pytest.mark.parametrize("written", ["", "0", "1", "-1", "x", "1 1", "{parent} 1", "{parent}"])
def test_a_lock_that_names_nobody_is_never_signalled(run: RunDir, written: str) -> None:
    """0 would be our own process group, -1 everybody; an id with another start time is somebody else's by now."""
    run.write_config(Config(run=RunConfig(name="demo")))
    with lock_run(run):
        run.lock_path.write_text(written.format(parent=os.getppid()))
        found = holder(run)
        assert found is not None
        assert found.pid == 0
        with pytest.raises(LaunchError):
            stop_run(run, now=True, timeout_s=0.0)


@pytest.mark.process
def test_a_signal_reaches_only_who_was_meant() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        began = started(child.pid)
        assert began
        assert not signal_process(child.pid, f"{began}0", signal.SIGKILL)
        assert not signal_process(child.pid, "", signal.SIGKILL)
        for nobody in (1, 0, -1, -child.pid):
            with pytest.raises(ValueError):
                signal_process(nobody, began, signal.SIGKILL)
        assert child.poll() is None
        assert signal_process(child.pid, began, signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        assert not signal_process(child.pid, began, signal.SIGKILL)
    finally:
        child.kill()


def test_stopping_what_does_not_run_frees_what_a_killed_run_left(run: RunDir) -> None:
    config = Config(run=RunConfig(name="demo"))
    run.write_config(config)
    left = weights_directory(config.weights, "demo", run.path)
    left.mkdir()
    (left / "policy.0-1.abc.weights").write_bytes(b"1234")
    assert not stop_run(run, now=False, timeout_s=0.0)
    assert not left.exists()
    assert not stop_run(run, now=False, timeout_s=0.0)
