import asyncio
import io
import json
import os
import shutil
import signal
import socket
import sys
from pathlib import Path

import pytest

from streamrl.bus.memory import MemoryBus
from streamrl.config.load import load
from streamrl.config.tree import Config
from streamrl.errors import ConfigError, LaunchError
from streamrl.launch import down, shown
from streamrl.launch import up as launch
from streamrl.launch.prepare import prepare
from streamrl.launch.shown import Shown
from streamrl.monitor.follow import Follower
from streamrl.monitor.numbers import RunNumbers
from streamrl.monitor.screen import PlainLines
from streamrl.monitor.view import RunView
from streamrl.runtime.lock import holder
from streamrl.runtime.processes import signal_process
from streamrl.runtime.rundir import RunDir
from tests.launch.conftest import Here
from tests.support.errors import raises
from tests.support.processes import alive, descendants, find, read_pids, server_pid, until
from tests.support.programs import Start, said
from tests.support.runs import rows_of

pytestmark = pytest.mark.nats


def nothing_runs(run: RunDir) -> bool:
    return server_pid(run) is None and not any(alive(pid) for pid in read_pids(run.path / "pids"))


def all_are_up(run: RunDir, num: int = 5) -> bool:
    return len(read_pids(run.path / "pids")) == num


async def test_a_run_ends_when_its_trainer_has_finished_and_is_resumed_only_as_what_it_was(here: Here, run: RunDir, place: Path) -> None:
    outcome = await here.up("learn", "run.steps=30")
    summary = json.loads(run.summary_path.read_text())
    assert (summary["steps"], summary["tokens_trained"], summary["staleness_max"]) == (30, 300, 1)
    assert (summary["heldout_first"], summary["heldout_last"]) == (0.125, 0.875)
    assert summary["reward_last"] == pytest.approx(23 / 30)
    assert run.plot_path.read_bytes().startswith(b"\x89PNG")
    out = here.printed(outcome)
    assert "5 wrong" in out and "demo finished: 30 steps" in out
    assert nothing_runs(run)
    assert holder(run) is None
    assert (run.bus_path.stat().st_mode & 0o777, run.path.stat().st_mode & 0o777) == (0o600, 0o700)
    assert run.load_config().trainer.optimizer.decay_steps == 30

    config, rows = run.config_path.read_bytes(), (place / "train.jsonl").read_bytes()
    with (place / "train.jsonl").open("a") as file:
        file.write('{"prompt": "9+9=", "label": "18"}\n')
    with pytest.raises(ConfigError, match="dataset changed on resume") as caught:
        await here.up("learn", "run.steps=30")
    assert "--name" in caught.value.hint
    (place / "train.jsonl").write_bytes(rows)
    with raises(ConfigError, key="tasks.batch_tasks"):
        await here.up("learn", "run.steps=30", "tasks.batch_tasks=7")
    assert run.config_path.read_bytes() == config
    assert nothing_runs(run)

    notes = await here.notes("learn", "run.steps=50", "producer.workers=2", "engine.slots=4")
    assert "run.steps is 50, " in notes and "over 30 batches" in notes
    found = run.load_config()
    assert (found.run.steps, found.trainer.optimizer.decay_steps, found.producer.workers) == (50, 30, 2)


async def test_nothing_outlives_a_supervisor_that_is_killed_and_the_run_can_be_resumed(up: Start, here: Here, run: RunDir) -> None:
    """Its workers, its nats-server and a sink; the rows of both sessions are in its directory, each batch once."""
    process = await up("learn-and-stay", 'metrics.sinks=["tensorboard"]', "run.steps=30")
    await until(lambda: rows_of(run, "batch"), within_s=120)
    await until(lambda: find("streamrl.monitor.sinks", "tensorboard", "--run", str(run.path)), within_s=60)
    assert process.pid is not None and server_pid(run) is not None
    below = descendants(process.pid)
    assert set(find("streamrl.monitor.sinks", "tensorboard", "--run", str(run.path))) <= set(below)
    process.kill()
    await process.wait()
    await until(lambda: nothing_runs(run) and not any(alive(pid) for pid in below))
    with (run.metrics / "metrics.jsonl").open("ab") as file:
        file.write(b'{"time_s":17')
    notes = await here.notes("learn", "run.steps=30")
    assert "resuming" in notes.split("\n")
    assert [row.step for row in rows_of(run, "batch")] == list(range(1, 31))
    assert "" in {row.of for row in rows_of(run, "window")}
    assert all(line.endswith(b"}") for line in (run.metrics / "metrics.jsonl").read_bytes().splitlines())


async def test_what_is_killed_comes_back_and_ctrl_c_drains_in_order(up: Start, here: Here, run: RunDir) -> None:
    process = await up("endless")
    await until(lambda: all_are_up(run), within_s=60)
    with pytest.raises(LaunchError, match=f"process {process.pid}") as caught:
        await here.up("endless")
    assert "streamrl down demo" in caught.value.hint
    os.kill(read_pids(run.path / "pids")[0], signal.SIGKILL)
    await until(lambda: all_are_up(run, 6), within_s=60)
    first, address = server_pid(run), run.bus_path.read_bytes()
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: server_pid(run) not in (None, first), within_s=60)
    process.send_signal(signal.SIGINT)
    code, out, err = await said(process)
    assert (code, err) == (0, "")
    assert "signal SIGKILL; restart 1 " in out
    assert any("nats-server " in line and "SIGKILL" in line for line in out.splitlines())
    assert run.bus_path.read_bytes() == address
    assert (run.path / "order").read_text().split() == ["trainer", "producer", "evaluator", "engine", "feeder"]
    assert "demo stopped" in out
    assert nothing_runs(run)


async def test_a_trainer_that_leaves_with_exit_code_0_has_not_finished_the_run(here: Here, run: RunDir) -> None:
    notes = await here.notes("learn-and-leave", "run.steps=30")
    assert "trainer-0 ended with exit " in notes and "finished" in notes.split("\n")
    assert json.loads(run.summary_path.read_text())["steps"] == 30


async def test_a_trainer_that_is_sent_a_signal_stops_the_run(up: Start, run: RunDir) -> None:
    process = await up("learn-and-stay", "run.steps=30")
    await until(lambda: all_are_up(run) and run.metrics.exists() and rows_of(run, "batch"), within_s=120)
    (trainer,) = find("trainer", str(run.path))
    os.kill(trainer, signal.SIGTERM)
    code, out, err = await said(process)
    assert (code, err) == (0, "")
    assert "trainer-0 was told " in out and "demo stopped: 30" in out
    assert (run.path / "order").read_text().split() == ["trainer", "producer", "engine", "feeder"]
    assert nothing_runs(run)


async def test_a_second_ctrl_c_stops_at_once_and_leaves_nothing(up: Start, here: Here, run: RunDir) -> None:
    """Its summary has what the run had trained before."""
    await here.up("learn", "run.steps=30")
    (run.path / "pids").unlink()
    process = await up("stubborn", "supervise.drain_s=600", "run.steps=40")
    await until(lambda: all_are_up(run), within_s=60)
    process.send_signal(signal.SIGINT)
    await until(lambda: "draining" in run.events_path.read_text(), within_s=60)
    assert process.returncode is None
    process.send_signal(signal.SIGINT)
    code, out, _ = await said(process)
    assert code == 130
    assert "stopped at once" in out and "demo killed: 30" in out
    assert nothing_runs(run)


async def test_a_taken_port_and_a_launcher_that_fails_are_said(
    here: Here, place: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {port}") as caught:
            await here.up("learn", f"bus.port={port}")
    assert caught.value.hint
    # A secret lies in the folder by then.
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "streamrl.launch.ray", raising=False)
    (place / "reward.py").write_text("def one(task, episode, api_key):\n    return 1.0\n")
    with pytest.raises(LaunchError, match="ray cannot be imported"):
        await here.up("", "ray.address=local", "reward.kind=reward.py:one", "reward.options.api_key=abc")
    assert not run.path.exists()


async def test_a_reader_that_leaves_drains_the_run(up: Start, run: RunDir) -> None:
    reader, writer = os.pipe()
    process = await up("endless", stdout=writer)
    os.close(writer)
    await until(lambda: all_are_up(run), within_s=60)
    os.close(reader)
    await asyncio.wait_for(process.wait(), 60)
    assert (run.path / "order").read_text().split()[-1] == "feeder"
    assert nothing_runs(run)


async def test_starts_that_failed_bind_no_name_and_leave_no_model(here: Here, run: RunDir, place: Path) -> None:
    """A broken row, a function that is not there, and what a start that was killed may have left."""
    rows = (place / "train.jsonl").read_text()
    (place / "train.jsonl").write_text(rows + '{"prompt": "9+9=", "lab')
    with pytest.raises(ConfigError, match="line 5"):
        await here.up("learn")
    (place / "train.jsonl").write_text(rows)
    (place / "reward.py").write_text("def letters(task, episode):\n    return 1.0\n")
    with pytest.raises(ConfigError) as caught:
        await here.up("learn", "reward.kind=reward.py:leters")
    assert "'letters'" in caught.value.hint
    assert not run.path.exists()
    run.create()
    run.model_dir.mkdir()
    (run.model_dir / "of-other-settings").touch()
    assert (await here.up("learn", "reward.kind=reward.py:letters")).state == "finished"
    assert not (run.model_dir / "of-other-settings").exists()


@pytest.mark.parametrize("reading", ["whole", "stream"])
async def test_rows_that_cannot_be_used_are_counted_before_the_run_starts(run: RunDir, place: Path, reading: str) -> None:
    broken = "" if reading == "whole" else "{\n"
    with (place / "train.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "9" * 500, "label": "18"}) + "\n" + broken)
    (place / "heldout.jsonl").write_text(json.dumps({"prompt": "1+1=", "label": "2"}) + "\n")
    notes: list[str] = []
    run.create()
    await prepare(load(place / "demo.toml", [f"data.heldout={place / 'heldout.jsonl'}", f"data.reading={reading}"]), run, notes.append)
    expected = "data.train: 1 of 5 rows" if reading == "whole" else "data.train: 2 of the first 6 rows"
    assert any(note.startswith(expected) for note in notes), notes


async def test_a_run_is_stopped_while_prepared(up: Start, start: Start, run: RunDir, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reward takes until the signal is sent to load."""

    def signalled(pid: int, began: str, number: signal.Signals) -> None:
        signal_process(pid, began, number)
        (place / "go").touch()

    monkeypatch.setattr(down, "signal_process", signalled)
    waits = "Path('begun').touch()\nwhile not Path('go').exists():\n    time.sleep(0.01)\n"
    (place / "reward.py").write_text(f"import time\nfrom pathlib import Path\n{waits}def one(task, episode):\n    return 1.0\n")
    process = await up("learn", "reward.kind=reward.py:one")
    await until((place / "begun").exists, within_s=60)
    code, out, _ = await said(await start("-m", "streamrl", "status", "demo"))
    assert (code, "preparing" in out) == (0, True)
    assert await asyncio.to_thread(down.stop_run, run, now=False, timeout_s=60.0)
    assert (await said(process))[0] == 0
    assert not run.path.exists()


class Failing(PlainLines):
    """A display that raises `times` times."""

    def __init__(self, times: int, out: io.StringIO) -> None:
        super().__init__(out, every_s=0.0)
        self._times = times

    def show(self, numbers: RunNumbers, view: RunView | None = None) -> None:
        if self._times:
            self._times -= 1
            raise ValueError("no such colour")
        super().show(numbers, view)


@pytest.mark.parametrize(("times", "then"), [(2, "it is shown again"), (1000, "the run goes on unshown")])
async def test_a_screen_that_fails_is_said_and_shown_again_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int, then: str
) -> None:
    monkeypatch.setattr(shown, "_SHOW_S", 0.01)
    run, bus, view, out = RunDir(tmp_path / "demo"), MemoryBus("demo", Config().bus), RunView("demo"), io.StringIO()
    run.create()
    screen = Shown(Config(), run, Failing(times, out), lambda: None)
    async with Follower(bus, view) as follower:
        following = asyncio.create_task(screen.follow(bus, view, follower, dict))
        if times == 2:
            await until(lambda: "step=0" in out.getvalue())
            following.cancel()
        await asyncio.wait({following}, timeout=60)
    assert following.done() and (following.cancelled() or following.exception() is None)
    assert out.getvalue().count("ValueError") == (2 if times == 2 else 6)
    assert out.getvalue().count(then) == (2 if times == 2 else 1)
    await screen.close()
    await bus.close()


async def test_a_bus_that_is_given_up_is_not_waited_for(here: Here, run: RunDir) -> None:
    keys = ("supervise.max_restarts=0", "supervise.drain_s=600", "bus.patience_s=600")
    running = asyncio.create_task(here.up("stubborn", *keys))
    await until(lambda: all_are_up(run), within_s=60)
    server = server_pid(run)
    assert server is not None
    os.kill(server, signal.SIGKILL)
    with pytest.raises(LaunchError, match="nats-server ended 1 times"):
        await asyncio.wait_for(running, 120)
    assert "the bus is gone" in here.said
    assert nothing_runs(run)


async def test_a_disk_that_fills_up_ends_the_run_at_once(here: Here, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """One moment without room is none."""
    looks: list[int] = []

    def free(place: Path) -> int:
        looks.append(0 if all_are_up(run) and looks.count(1 << 40) != 1 else 1 << 40)
        return looks[-1] if place == run.path else 0

    monkeypatch.setattr(launch, "free_bytes", free)
    monkeypatch.setattr(launch, "_DISK_EVERY_S", 0.01)
    with raises(LaunchError, path=str(run.path)):
        await asyncio.wait_for(here.up("stubborn", "supervise.drain_s=600"), 120)
    assert "; stopping at once" in here.said and looks[-2:] == [0, 0]
    assert nothing_runs(run)


@pytest.mark.parametrize(("runs", "shm", "path"), [(1 << 20, 1 << 40, "a run"), (1 << 40, 1 << 10, "weights")])
async def test_a_start_without_room_leaves_nothing(
    here: Here, run: RunDir, monkeypatch: pytest.MonkeyPatch, runs: int, shm: int, path: str
) -> None:
    usage = shutil.disk_usage

    def free(place: Path | str) -> object:
        found = usage(place)
        return found._replace(free=shm if str(place) == "/dev/shm" else runs)

    monkeypatch.setattr(shutil, "disk_usage", free)
    with pytest.raises(LaunchError) as caught:
        await here.up("learn", "run.steps=30")
    assert path in caught.value.message and not run.path.exists()
