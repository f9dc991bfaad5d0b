"""The command line from start to end: a tabular policy learns, the run is looked at and replayed, its metrics have the declared names."""

import asyncio
import fcntl
import json
import math
import os
import pty
import signal
import struct
import subprocess
import termios
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyte
import pytest

from streamrl.monitor.metrics_file import decoded, files
from streamrl.runtime.lock import holder
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.codec import decode
from streamrl.schemas.events import MetricReport
from streamrl.schemas.subjects import METRICS as REPORTS
from streamrl.telemetry.names import LENGTHS, METRICS, declared
from streamrl.weights.factory import weights_directory
from tests.support.buses import bus_of
from tests.support.digits import TABLE, write_digits
from tests.support.harness import read_ledger
from tests.support.looked_at import STAYS, STRICT, LookedAt, sets, that_has_finished, that_stays
from tests.support.processes import server_pid, stopped, until
from tests.support.programs import STREAMRL, Start, said
from tests.support.shared import shared

pytestmark = pytest.mark.nats


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> LookedAt:
    with shared():
        return that_has_finished(tmp_path_factory.mktemp("finished"))


def test_a_run_learns_and_its_log_gives_its_ledger_again(finished: LookedAt) -> None:
    run, summary = finished.run, json.loads(finished.run.summary_path.read_bytes())
    assert (summary["steps"], summary["heldout_last"]) == (15, 1.0)
    assert summary["staleness_max"] <= 1
    assert summary["swaps"] > 0
    assert summary["slo"] == {} and "slo" not in finished.said_by_up, "a healthy run meets its objectives at the defaults"
    assert not weights_directory(run.load_config().weights, run.name, run.path).exists()
    report = finished.answer("replay", "digits", "--verify")
    assert report["ok"] is True
    assert report["equal"] == report["versions"] >= 15
    exported = finished.answer("export", "digits", "--out", "mine")
    assert exported["version"].endswith(f".{report['versions']}")
    (own,) = run.hf.glob(f"v{report['versions']:08d}")
    assert (finished.place / "mine" / "logits.npy").read_bytes() == (own / "logits.npy").read_bytes()
    again = finished.answer("export", "digits")
    assert (Path(again["path"]), again["from"]) == (own, "there already")
    code, _, err = finished.said("export", "digits", "--version", "0.1", "--out", "other")
    assert code == 1 and "got 0.1: there are" in err


def test_a_run_that_has_finished_is_left_alone(finished: LookedAt) -> None:
    log, summary = finished.log("trainer-0"), json.loads(finished.run.summary_path.read_bytes())
    code, out, err = finished.said("up", "run.toml", "--plain", *sets(*STRICT))
    assert (code, err) == (0, "")
    assert f"run.steps = {summary['steps']} with version" in out and f"digits finished: {summary['steps']} steps" in out
    assert finished.log("trainer-0") == log, "no worker was started"
    for task, rollout in ((10**6, 0), (0, 4)):
        code, _, err = finished.said("reward", "digits", "--task", str(task), "--rollout", str(rollout), "--reward", "1")
        assert (code, f"got {task or rollout}" in err) == (1, True)


def test_status_and_top_of_a_run_that_has_finished(finished: LookedAt) -> None:
    (listed,) = finished.answer("status")
    assert (listed["state"], listed["summary"]) == ("finished", json.loads(finished.run.summary_path.read_bytes()))
    code, out, err = finished.said("top", "digits", "--once")
    assert (code, err) == (0, "")
    assert out.startswith("streamrl digits  finished\n") and " steps in " in out
    code, out, _ = finished.said("top", "digits")
    assert code == 0 and "run digits is finished" in out
    assert finished.answer("top", "digits")["summary"]["tokens_trained"] > 0


async def test_a_terminal_that_lacks_letters_gets_a_sign_for_each(start: Start) -> None:
    name = "\N{HIRAGANA LETTER A}\N{LATIN SMALL LETTER E WITH ACUTE}"
    process = await start(*STREAMRL, "init", name, "--example", "calculator_tool", env={"PYTHONIOENCODING": "latin-1"})
    out, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")
    assert "streamrl up '?\N{LATIN SMALL LETTER E WITH ACUTE}/calculator.toml'" in out.decode("latin-1")


async def test_a_run_whose_weights_diverge_ends_with_that_word(start: Start, tmp_path: Path) -> None:
    write_digits(tmp_path, TABLE)
    code, out, err = await said(await start(*STREAMRL, "up", "run.toml", "--plain", *sets("warmup.learning_rate=1e60", "data.heldout=")))
    assert code == 1
    assert "the weights diverged" in err and "trainer.optimizer.learning_rate" in err
    assert "restart" not in out


async def reported(run: RunDir) -> tuple[set[str], set[str]]:
    """Names of all values, and of all histograms, in the ledger and in the workers' reports."""
    async with bus_of(run) as bus:
        entries, state = await read_ledger(bus, "digits"), await bus.state(REPORTS)
        bodies = [(await bus.fetch(REPORTS, number)).body for number in range(state.first, state.last + 1)]
    reports = [decode(body, MetricReport, where="reports") for body in bodies]
    assert reports and entries
    values = {name for entry in entries for name in entry.metrics}
    values |= {name for one in reports for group in (one.mean, one.sum, one.max, one.last) for name in group}
    return values, {name for one in (*entries, *reports) if isinstance(one.histograms, dict) for name in one.histograms}


async def test_every_name_without_a_condition_is_seen_and_every_name_that_is_seen_is_declared(finished: LookedAt) -> None:
    run = finished.run
    rows = [decoded(line) for path in files(run.metrics) for line in path.read_bytes().splitlines()]
    seen = {name for row in rows if row is not None for name, value in row.values.items() if math.isfinite(value)}
    assert [name for name, one in METRICS.items() if not one.when and name not in seen] == []
    assert {"eval/heldout", "train/answer_probability", "tokens/evaluated_total", "lengths/dropped_p50"} <= seen
    values, histograms = await reported(run)
    assert [name for name in values if declared(name) is None] == [] and histograms <= LENGTHS.keys() and "lengths/trained" in histograms


WORKERS_SHARES = {"starvation/trainer", "engine/share/decode", "producer/share/tools"}


PRODUCER = """
async def mine(task, engine):
    chat = engine.chat(task)
    await chat.generate()
    return chat.episode()
"""


class Tty:
    """A pseudo-terminal, and what a terminal that reads it shows."""

    def __init__(self, columns: int, lines: int) -> None:
        self.master, self.slave = pty.openpty()
        os.set_blocking(self.master, False)
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self.resize(columns, lines)

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.screen.resize(lines, columns)

    def look(self) -> list[str]:
        while True:
            try:
                self._stream.feed(os.read(self.master, 65536))
            except (BlockingIOError, OSError):
                return [line.rstrip() for line in self.screen.display]

    def shows(self, text: str) -> Callable[[], bool]:
        return lambda: any(text in line for line in self.look())

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def close(self) -> None:
        os.close(self.master)
        os.close(self.slave)


def fits(tty: Tty) -> bool:
    """Whether the head is on the first line and the foot on the last: nothing has wrapped or scrolled."""
    seen = tty.look()
    foot = ("q quit  p pause", "Ctrl-C stops  p pause")
    return seen[0].startswith(("streamrl digits  training", "streamrl digits  warm-up")) and seen[-1].startswith(foot)


@pytest.fixture
def terminal() -> Generator[Tty]:
    tty = Tty(80, 24)
    yield tty
    tty.close()


other = terminal
"""A second one."""


def on(tty: Tty) -> dict[str, Any]:
    """For a process that has this terminal, as a login shell would start it."""
    streams = {"stdin": tty.slave, "stdout": tty.slave, "stderr": tty.slave}
    return {**streams, "start_new_session": True, "env": {"TERM": "xterm-256color"}}


async def test_up_on_a_terminal_is_stopped_and_resumed_while_top_looks(start: Start, tmp_path: Path, terminal: Tty, other: Tty) -> None:
    write_digits(tmp_path, TABLE)
    run, streamrl, words = RunDir(tmp_path / "runs" / "digits"), partial(start, *STREAMRL), ("up", "run.toml", *sets(*STAYS))
    terminal.resize(100, 40)
    modes = termios.tcgetattr(terminal.slave)
    up = await streamrl(*words, **on(terminal))
    await until(terminal.shows("preparing run digits in "), within_s=60)
    await until(partial(fits, terminal), within_s=90)
    await until(terminal.shows("page: http://127.0.0.1:"), within_s=60)
    await until(terminal.shows("engine-0"), within_s=30)
    terminal.resize(40, 12)
    up.send_signal(signal.SIGWINCH)
    terminal.press("q\x1b[F")
    await until(partial(fits, terminal), within_s=60)
    await until(lambda: not terminal.shows("step  ")(), within_s=60)  # it has moved on

    up.send_signal(signal.SIGTSTP)
    await until(partial(stopped, up.pid), within_s=60)
    assert termios.tcgetattr(terminal.slave) == modes, "a shell has it now"
    up.send_signal(signal.SIGCONT)
    terminal.resize(240, 40)
    up.send_signal(signal.SIGWINCH)
    await until(partial(fits, terminal), within_s=60)

    top = await streamrl("top", "digits", **on(other))
    await until(partial(fits, other), within_s=90)
    await until(lambda: "event=training version" in run.log_path("trainer-0").read_text(), within_s=60)
    up.send_signal(signal.SIGINT)
    await until(terminal.shows("digits stopped: "), within_s=120)
    await asyncio.wait_for(up.wait(), 120)
    assert up.returncode == 0
    assert termios.tcgetattr(terminal.slave) == modes, "the terminal is as it was"
    assert terminal.shows("] draining")(), "the notes of the board"
    assert terminal.shows(f"  go on with: streamrl up run.toml {' '.join(sets(*STAYS))}")()
    assert holder(run) is None
    steps = json.loads(run.summary_path.read_text())["steps"]
    await until(other.shows("streamrl digits  stopped"), within_s=60)

    again = await streamrl(*words, "--plain")
    await until(partial(fits, other), within_s=90)
    other.press("q")
    assert await asyncio.wait_for(top.wait(), 30) == 0
    await until(lambda: run.log_path("trainer-0").read_text().count("event=training version") > 1, within_s=60)
    assert await said(await streamrl("down", "digits")) == (0, "run digits has stopped\n", "")
    code, out, err = await said(again)
    assert (code, err) == (0, "")
    assert "] resuming" in out and "digits stopped: " in out
    assert json.loads(run.summary_path.read_text())["steps"] >= steps


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LookedAt]:
    with that_stays(tmp_path_factory.mktemp("running")) as looked:
        yield looked


async def test_top_on_a_terminal_through_resize_keys_and_a_server_that_stands(start: Start, running: LookedAt, terminal: Tty) -> None:
    modes = termios.tcgetattr(terminal.slave)
    top = await start(*STREAMRL, "top", "digits", cwd=running.place, **on(terminal))
    await until(partial(fits, terminal), within_s=90)
    await until(terminal.shows("engine-0"), within_s=30)
    for columns, lines in ((50, 12), (132, 60)):
        terminal.resize(columns, lines)
        top.send_signal(signal.SIGWINCH)
        await until(partial(fits, terminal), within_s=60)
    await until(terminal.shows("> "), within_s=30)  # an answer: the whole board is on 60 lines
    for title in ("engines", "workers", "lag", "dropped", "samples"):
        assert any(line == title for line in terminal.look())
    terminal.resize(80, 24)
    top.send_signal(signal.SIGWINCH)
    terminal.press("\x1b[F")
    await until(terminal.shows("samples"), within_s=60)
    terminal.press("\x1b[Hp")
    await until(terminal.shows("paused"), within_s=60)
    terminal.press("p")
    await until(lambda: not terminal.shows("paused")(), within_s=60)

    server = server_pid(running.run)
    assert server is not None
    os.kill(server, signal.SIGSTOP)
    try:
        await until(terminal.shows("its bus does not answer"), within_s=60)
    finally:
        os.kill(server, signal.SIGCONT)
    await until(lambda: not terminal.shows("does not answer")(), within_s=60)

    terminal.press("q")
    await asyncio.wait_for(top.wait(), 30)
    assert top.returncode == 0
    assert termios.tcgetattr(terminal.slave) == modes, "the terminal is as it was"


async def test_top_once_as_text_and_json(running: LookedAt) -> None:
    look: dict[str, Any] = {}

    def all_have_reported() -> bool:
        look.update(running.answer("top", "digits"))
        numbers = look["numbers"]
        told = (look["shares"] or {}).keys() >= WORKERS_SHARES  # workers report one after the other
        return numbers and numbers["step"] + numbers["warmup_step"] > 3 and told

    await until(all_have_reported, within_s=120)
    assert (look["run"], look["state"], look["away"]) == ("digits", "running", "")
    assert [engine["engine"].startswith("engine-0") for engine in look["numbers"]["engines"]] == [True]
    assert all(0 <= look["shares"][name] <= 1 for name in WORKERS_SHARES)
    assert {"tokens/sampled_total", "tokens/open"} <= look["goodput"].keys()
    code, out, err = running.said("top", "digits", "--once", COLUMNS="80")
    assert (code, err) == (0, "")
    assert out.startswith("streamrl digits  ") and "engine-0" in out and "\x1b" not in out


async def test_a_run_is_joined_and_left(running: LookedAt) -> None:
    (running.place / "mine.py").write_text(PRODUCER)
    pipe = subprocess.PIPE
    with running.started("attach", "mine.py:mine", "--run", "digits", "--concurrency", "4", stdout=pipe, stderr=pipe) as guest:
        try:
            await until(lambda: "event=started" in running.log("producer-1"), within_s=60)
            workers = {worker["worker"] for worker in running.answer("status", "digits")["workers"]}
            assert workers == {"trainer-0", "engine-0", "feeder-0", "producer-0", "producer-1", "evaluator-0"}
            guest.send_signal(signal.SIGINT)
            out, _ = guest.communicate(timeout=60)
        finally:
            guest.kill()
    assert guest.returncode == 0
    assert "producer-1 has left" in out
