"""`streamrl top`, and `streamrl up` with its board, on a real terminal, of a real run."""

import asyncio
import fcntl
import json
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

from streamrl.runtime.lock import holder
from streamrl.runtime.rundir import RunDir
from tests.support.digits import TABLE, write_digits
from tests.support.looked_at import STAYS, LookedAt, sets, that_stays
from tests.support.processes import server_pid, stopped, until
from tests.support.programs import STREAMRL, Start, said

pytestmark = pytest.mark.nats

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
    await until(partial(fits, terminal), within_s=20)
    await until(lambda: not terminal.shows("step  ")(), within_s=20)  # it has moved on

    up.send_signal(signal.SIGTSTP)
    await until(partial(stopped, up.pid), within_s=20)
    assert termios.tcgetattr(terminal.slave) == modes, "a shell has it now"
    up.send_signal(signal.SIGCONT)
    terminal.resize(240, 40)
    up.send_signal(signal.SIGWINCH)
    await until(partial(fits, terminal), within_s=20)

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
        await until(partial(fits, terminal), within_s=20)
    await until(terminal.shows("> "), within_s=30)  # an answer: the whole board is on 60 lines
    for title in ("engines", "workers", "lag", "dropped", "samples"):
        assert any(line == title for line in terminal.look())
    terminal.resize(80, 24)
    top.send_signal(signal.SIGWINCH)
    terminal.press("\x1b[F")
    await until(terminal.shows("samples"), within_s=20)
    terminal.press("\x1b[Hp")
    await until(terminal.shows("paused"), within_s=20)
    terminal.press("p")
    await until(lambda: not terminal.shows("paused")(), within_s=20)

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
            workers = {worker["worker"] for worker in running.answer("status", "digits")["numbers"]["workers"]}
            assert workers == {"trainer-0", "engine-0", "feeder-0", "producer-0", "producer-1", "evaluator-0"}
            guest.send_signal(signal.SIGINT)
            out, _ = guest.communicate(timeout=60)
        finally:
            guest.kill()
    assert guest.returncode == 0
    assert "producer-1 has left" in out
