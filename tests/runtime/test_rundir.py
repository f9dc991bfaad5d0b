"""The directory of a run and its locks, beats and retries; what a worker does to its process."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from streamrl.config.tree import Config, ModelConfig, RunConfig
from streamrl.errors import ConfigError, LaunchError, SchemaError
from streamrl.launch.down import stop_run
from streamrl.runtime.beats import LOADS, RUNS, VARIABLE, Pulse, Silence
from streamrl.runtime.lock import holder, lock_run
from streamrl.runtime.processes import signal_process, started
from streamrl.runtime.retries import FailureWindow, pause_s
from streamrl.runtime.rundir import RunDir, known_runs
from streamrl.schemas.versions import Version
from streamrl.system import write_private
from streamrl.weights.factory import weights_directory
from tests.support.errors import raises
from tests.support.processes import until
from tests.support.programs import Start
from tests.support.runs import bare_run, named_run


def test_a_run_directory_is_closed_to_others_and_its_configuration_comes_back(tmp_path: Path) -> None:
    run = named_run(tmp_path / "first")
    run.create()
    for path in (run.path, run.logs, run.checkpoints, run.hf, run.bus_store):
        assert path.stat().st_mode & 0o777 == 0o700
    assert run.config_path.stat().st_mode & 0o777 == 0o600
    assert named_run(tmp_path / "first").load_config() == Config(run=RunConfig(name="first"))


def test_a_run_is_found_by_name_or_the_known_ones_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = named_run(tmp_path / "runs" / "first")
    monkeypatch.chdir(tmp_path)
    for name in ("first", "runs/first", str(run.path)):
        assert RunDir.find(name).path == run.path
    with raises(ConfigError, run="frist") as caught:
        RunDir.find("frist", base=tmp_path)
    assert "there are no runs" in caught.value.hint
    named_run(tmp_path / "first")
    with pytest.raises(ConfigError) as caught:
        RunDir.find("frist", base=tmp_path)
    assert caught.value.hint.endswith(": first")


def test_runs_are_listed_newest_first(tmp_path: Path) -> None:
    for age, name in ((30, "old"), (10, "new"), (20, "middle")):
        run = named_run(tmp_path / name)
        os.utime(run.config_path, (1000 - age, 1000 - age))
    (tmp_path / "no_run").mkdir()
    assert [run.name for run in known_runs(tmp_path)] == ["new", "middle", "old"]


def test_policies_and_exports_have_their_places(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "first")
    assert run.policy_dir(Config()) == run.model_dir
    assert run.policy_dir(Config(model=ModelConfig(path="/models/x"))) == Path("/models/x")
    run = RunDir(tmp_path)
    assert [run.export_path(Version(epoch, 20)).name for epoch in (0, 1)] == ["v00000020", "v00000020-e1"]
    write_private(tmp_path / "x", b"one")
    write_private(tmp_path / "x", b"two")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"x": b"two"}


def test_what_is_no_run_or_place_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with raises(LaunchError, path=str(tmp_path / "file" / "first")) as caught:
        RunDir(tmp_path / "file" / "first").create()
    assert "run.dir" in caught.value.hint
    with pytest.raises(SchemaError):
        RunDir(tmp_path / "a b").create()
    with raises(ConfigError, path=str(tmp_path / "config.json")):
        RunDir(tmp_path).load_config()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return bare_run(tmp_path / "demo")


def test_a_run_has_one_holder_and_a_dead_one_is_none(run: RunDir) -> None:
    assert holder(run) is None
    with lock_run(run):
        found = holder(run)
        assert found is not None and found.pid == os.getpid()
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
        assert found is not None and found.pid == 0
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


class Listener:
    """Looks at a `Silence` ten times a second, on a clock of its own."""

    def __init__(self, limit_s: float = 60.0, loading_s: float = 600.0) -> None:
        self.now_s = 100.0
        self.silence = Silence(limit_s, loading_s, self.now_s)

    def hear(self, beat: str, seconds: float, *, every_s: float = 0.1) -> str:
        why = ""
        for _ in range(round(seconds / every_s)):
            self.now_s += every_s
            why = self.silence.look(beat, self.now_s)
        return why


def test_who_is_not_heard_is_silent_after_the_limit_unless_the_watcher_missed_it() -> None:
    listener = Listener()
    assert listener.hear(RUNS, 1000.0) == ""
    assert listener.hear("", 59.0) == ""
    assert listener.hear("", 2.0) == "silent for 60 s"
    listener = Listener()
    listener.hear(RUNS, 1.0)
    assert listener.hear("", 30.0) == ""
    listener.now_s += 3600.0  # stopped, or suspended
    assert listener.silence.look("", listener.now_s) == ""
    assert listener.silence.seconds == pytest.approx(31.0)
    listener = Listener(limit_s=0.0)
    listener.hear(RUNS, 1.0)
    assert listener.hear("", 10_000.0, every_s=1.0) == ""


def test_a_load_is_no_silence_but_one_without_end_is_too_long() -> None:
    listener = Listener()
    assert listener.hear("", 90.0) == ""
    assert listener.hear(LOADS, 10.0) == ""
    assert listener.hear("", 490.0) == ""
    assert listener.hear("", 20.0) == "loading for 600 s"
    listener = Listener(loading_s=100.0)
    listener.hear(LOADS, 99.0)
    assert listener.hear(RUNS, 500.0) == ""
    assert listener.hear(LOADS, 99.0) == ""  # an engine whose server is started again
    assert listener.hear(LOADS, 2.0) == "loading for 100 s"


def test_beats_go_through_the_pipe_that_the_environment_names_and_never_block() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    surroundings = {VARIABLE: str(writing)}
    pulse = Pulse.of(surroundings)
    assert surroundings == {}
    assert not os.get_inheritable(writing)
    pulse.beat(loading=True)
    pulse.beat(loading=False)
    assert os.read(reading, 16) == b"lr"
    for _ in range(1 << 17):  # more than a pipe holds
        pulse.beat(loading=False)
    os.close(reading)
    pulse.beat(loading=False)
    os.close(writing)


@pytest.mark.parametrize("named", ["", "no", "-1", "99999"])
def test_without_a_pipe_nobody_listens(named: str) -> None:
    Pulse.of({VARIABLE: named}).beat(loading=True)


def test_pauses_double_up_to_a_bound_and_old_failures_are_forgotten() -> None:
    assert [pause_s(failures, first_s=0.5, most_s=3.0) for failures in (1, 2, 3, 4, 5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert pause_s(10_000, first_s=0.5, most_s=30.0) == 30.0
    assert pause_s(3, first_s=0.0, most_s=30.0) == 0.0
    window = FailureWindow(10.0)
    assert [window.add(now_s) for now_s in (0.0, 4.0, 10.0, 10.5, 14.5, 100.0)] == [1, 2, 3, 3, 3, 1]
    assert [FailureWindow(0.0).add(5.0)] == [1]


CODE = """
import gc
from streamrl.runtime.collection import THRESHOLDS, collect_rarely, keep_all, keep_none

class Node:
    pass

own = gc.get_freeze_count()  # Python 3.12 freezes a few hundred objects itself
keep_all()
assert gc.get_freeze_count() == own  # not a worker
collect_rarely()
assert gc.get_threshold() == THRESHOLDS
kept = [Node() for _ in range(1000)]
keep_all()
assert gc.get_freeze_count() > 1000
assert not any(isinstance(found, Node) for found in gc.get_objects())
one = Node()
one.own = one
del one
assert gc.collect() >= 1  # what comes later is still collected
keep_none()
assert gc.get_freeze_count() == 0
"""


@pytest.mark.process
def test_what_is_there_is_left_alone_and_what_comes_later_is_collected() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True)


CHILD = """
import ctypes, os, sys, time
if sys.argv[1] == "elsewhere":
    ctypes.CDLL = lambda *given, **named: object()
from streamrl.runtime.service import die_with_parent
die_with_parent(os.getppid())
print(os.getpid(), flush=True)
time.sleep(600)
"""
PARENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]])
time.sleep(600)
"""


@pytest.mark.parametrize("system", ["linux", "elsewhere"])
async def test_a_child_ends_with_its_parent_however_that_ends(start: Start, system: str) -> None:
    parent = await start("-c", PARENT, CHILD, system)
    assert parent.stdout is not None
    child = int(await asyncio.wait_for(parent.stdout.readline(), 60))
    assert started(child)
    parent.kill()
    await until(lambda: not started(child), within_s=60)
