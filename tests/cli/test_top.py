"""`streamrl top`, and `streamrl up` with its board, on a real terminal, of a real run."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import signal
import struct
import termios
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path

import pyte
import pytest

from streamrl.runtime.rundir import RunDir
from tests.support.digits import TABLE, write_digits
from tests.support.processes import server_pid, stopped, until
from tests.support.programs import STREAMRL, Start, answer, said

pytestmark = pytest.mark.nats

LONG = ("--set", "run.steps=100000", "--set", "data.heldout=", "--set", "debug.token_delay_s=0.002")
WORKERS_SHARES = {"starvation/trainer", "engine/share/decode", "producer/share/tools"}


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
        """The lines on the screen now."""
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


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_digits(tmp_path, TABLE)
    return tmp_path


@pytest.fixture
def streamrl(start: Start) -> Start:
    return partial(start, *STREAMRL)


async def test_a_run_on_a_terminal_through_resize_keys_and_the_death_of_its_server(streamrl: Start, place: Path, terminal: Tty) -> None:
    run = RunDir(place / "runs" / "digits")
    up = await streamrl("up", "run.toml", "--plain", *LONG, stdout=asyncio.subprocess.DEVNULL)
    await until(lambda: run.exists, within_s=60)
    ends = {"stdin": terminal.slave, "stdout": terminal.slave, "stderr": terminal.slave, "start_new_session": True}
    modes = termios.tcgetattr(terminal.slave)
    top = await streamrl("top", "digits", env={"TERM": "xterm-256color"}, **ends)
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

    server = server_pid(run)
    assert server is not None
    os.kill(server, signal.SIGSTOP)
    try:
        await until(terminal.shows("its bus does not answer"), within_s=60)
    finally:
        os.kill(server, signal.SIGCONT)
    await until(lambda: not terminal.shows("does not answer")(), within_s=60)

    up.send_signal(signal.SIGTERM)
    await asyncio.wait_for(up.wait(), 120)
    await until(terminal.shows("streamrl digits  stopped"), within_s=60)
    up = await streamrl("up", "run.toml", "--plain", *LONG, stdout=asyncio.subprocess.DEVNULL)
    await until(partial(fits, terminal), within_s=90)

    terminal.press("q")
    await asyncio.wait_for(top.wait(), 30)
    assert top.returncode == 0
    assert termios.tcgetattr(terminal.slave) == modes, "the terminal is as it was"
    up.send_signal(signal.SIGTERM)
    await asyncio.wait_for(up.wait(), 120)


async def test_up_shows_the_board_with_the_pages_address_and_says_at_the_end_what_stood_on_it(
    streamrl: Start, place: Path, terminal: Tty
) -> None:
    terminal.resize(100, 40)
    ends = {"stdin": terminal.slave, "stdout": terminal.slave, "stderr": terminal.slave, "start_new_session": True}
    modes = termios.tcgetattr(terminal.slave)
    up = await streamrl("up", "run.toml", *LONG, env={"TERM": "xterm-256color"}, **ends)
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
    terminal.resize(100, 40)
    up.send_signal(signal.SIGWINCH)
    await until(partial(fits, terminal), within_s=20)

    up.send_signal(signal.SIGINT)
    await until(terminal.shows("digits stopped: "), within_s=120)
    await asyncio.wait_for(up.wait(), 120)
    assert up.returncode == 0
    assert termios.tcgetattr(terminal.slave) == modes, "the terminal is as it was"
    assert terminal.shows("] draining")(), "the notes of the board"


async def test_once_as_text_and_json_and_of_a_run_that_is_over(streamrl: Start, place: Path) -> None:
    run = RunDir(place / "runs" / "digits")
    up = await streamrl("up", "run.toml", "--plain", *LONG, "--set", "metrics.window_s=2", stdout=asyncio.subprocess.DEVNULL)
    await until(lambda: run.exists, within_s=60)

    async def ledger_begins() -> dict[str, object]:
        while True:
            look = await answer(await streamrl("top", "digits", "--json"))
            numbers = look["numbers"]
            told = (look["shares"] or {}).keys() >= WORKERS_SHARES  # workers report one after the other
            if numbers and numbers["step"] + numbers["warmup_step"] > 3 and told:
                return look
            await asyncio.sleep(0.5)

    look = await asyncio.wait_for(ledger_begins(), 120)
    numbers = look["numbers"]
    assert isinstance(numbers, dict)
    assert (look["run"], look["state"], look["away"]) == ("digits", "running", "")
    assert [engine["engine"].startswith("engine-0") for engine in numbers["engines"]] == [True]
    shares, goodput = look["shares"], look["goodput"]
    assert isinstance(shares, dict) and all(0 <= shares[name] <= 1 for name in WORKERS_SHARES)
    assert isinstance(goodput, dict) and {"tokens/sampled_total", "tokens/open"} <= goodput.keys()
    code, out, err = await said(await streamrl("top", "digits", "--once", env={"COLUMNS": "80"}))
    assert (code, err) == (0, "")
    assert out.startswith("streamrl digits  ") and "engine-0" in out and "\x1b" not in out
    up.send_signal(signal.SIGTERM)
    await asyncio.wait_for(up.wait(), 120)
    code, out, err = await said(await streamrl("top", "digits", "--once"))
    assert (code, err) == (0, "")
    assert out.startswith("streamrl digits  stopped\n") and " steps in " in out
    piped = await said(await streamrl("top", "digits"))
    assert piped[0] == 0 and "run digits is stopped" in piped[1]
    assert json.loads((await said(await streamrl("top", "digits", "--json")))[1])["summary"]["tokens_trained"] > 0
