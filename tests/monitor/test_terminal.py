from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
import termios
import threading
from collections.abc import Generator
from pathlib import Path

import pytest

from streamrl.config.load import load
from streamrl.monitor.board_screen import BoardDisplay, BoardScreen
from streamrl.monitor.look import Look
from streamrl.monitor.terminal import Terminal
from streamrl.monitor.view import RunView
from streamrl.runtime.rundir import RunDir
from tests.support.programs import surroundings
from tests.support.tiny import write_tiny

SESSION = """
import fcntl, os, subprocess, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
for place in sys.argv[1].split():
    job = subprocess.Popen([sys.executable, *sys.argv[2:]], stdout=0, process_group=0 if place == "behind" else None)
    ended = os.waitpid(job.pid, os.WUNTRACED)[1]
    print("stopped" if os.WIFSTOPPED(ended) else ended, flush=True)
    if os.WIFSTOPPED(ended):
        job.kill()
        job.wait()
"""
"""With a terminal as standard input, runs a program on it in some places, and says of each that it was stopped, or its exit code."""

LOOK = "from streamrl.monitor.terminal import in_front; print(in_front(0), flush=True)"
SHOW = """
import asyncio, os, signal
from streamrl.config.load import load
from streamrl.monitor.board_screen import BoardDisplay
from streamrl.monitor.view import RunView

async def main():
    view = RunView("demo")
    with BoardDisplay(load("demo.toml")) as display:
        display.show(view.numbers(elapsed_s=0.0), view)
        display.note("first note")
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
        os.tcsetpgrp(0, os.getpgrp())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTTOU})
        display.show(view.numbers(elapsed_s=0.0), view)

asyncio.run(main())
"""
"""A display of `up` that comes to the front after its first look."""
ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"
SCREEN = 5, 40


class Pty:
    """A pseudo-terminal and what was written on it."""

    def __init__(self) -> None:
        self.master, self.slave = pty.openpty()
        termios.tcsetwinsize(self.slave, SCREEN)
        self._written: list[bytes] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        try:
            while data := os.read(self.master, 4096):
                self._written.append(data)
        except OSError:  # nobody has the other end any more
            return

    def hang_up(self) -> bytes:
        """All that was written on it."""
        os.close(self.slave)
        self._reader.join()
        os.close(self.master)
        return b"".join(self._written)


def jobs(folder: Path, places: str, *words: str) -> tuple[list[str], bytes]:
    """What became of a program in `front` of a terminal and `behind`, in the background, and what it wrote there."""
    terminal = Pty()
    command = [sys.executable, "-c", SESSION, places, *words]
    env = surroundings({"TERM": "xterm"})
    try:
        done = subprocess.run(
            command, stdin=terminal.slave, stdout=subprocess.PIPE, text=True, start_new_session=True, check=True, cwd=folder, env=env
        )
    finally:
        written = terminal.hang_up()
    return done.stdout.split(), written


@pytest.mark.process
def test_a_job_in_the_background_is_not_in_front_of_its_terminal(tmp_path: Path) -> None:
    ended, written = jobs(tmp_path, "front behind", "-c", LOOK)
    assert (ended, written.split()) == (["0", "0"], [b"True", b"False"])


@pytest.mark.process
def test_an_up_that_is_sent_to_the_background_while_it_prepares_is_not_stopped_and_takes_the_terminal_in_front(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    ended, written = jobs(tmp_path, "behind", "-c", SHOW)
    assert ended == ["0"], written
    line, _, board = written.partition(ENTER)
    assert b"first note" in line and b"starting" in board and board.count(LEAVE) == 1


@pytest.mark.process
def test_top_in_the_background_prints_lines(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    run = RunDir(tmp_path / "runs" / "demo")
    run.create()
    run.write_config(load(tmp_path / "demo.toml"))
    ended, written = jobs(tmp_path, "behind", "-m", "streamrl", "top", "demo")
    assert ended == ["0"] and b"run demo is stopped" in written and ENTER not in written, written


@contextlib.contextmanager
def streams(monkeypatch: pytest.MonkeyPatch, keys: int, out: int, encoding: str = "utf-8") -> Generator[None]:
    """Standard input and output are these terminals; at the end they are closed."""
    with open(keys, closefd=keys != out) as stdin, open(out, "w", encoding=encoding) as stdout, monkeypatch.context() as patched:
        patched.setattr("sys.stdin", stdin)
        patched.setattr("sys.stdout", stdout)
        yield


async def test_a_terminal_that_has_gone_is_an_os_error(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = pty.openpty()
    with streams(monkeypatch, slave, slave):
        terminal, screen = Terminal(lambda _: None, lambda: None), BoardScreen(keys="", gone=lambda: None)
        os.close(master)
        with pytest.raises(OSError, match="Input/output error"):
            terminal.enter()
        with pytest.raises(OSError, match="Input/output error"), screen:
            screen.show(Look(run="demo", state="running"))


async def test_the_newest_notes_are_said_again_below_the_board_with_what_the_terminal_has_letters_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny(tmp_path)
    config, view, terminal = load(tmp_path / "demo.toml"), RunView("demo"), Pty()
    both = os.dup(terminal.slave)
    with streams(monkeypatch, both, both, "latin-1"), BoardDisplay(config) as display:
        display.note("before \x1b[2J")
        display.show(view.numbers(elapsed_s=0.0), view)
        for number in range(101):
            display.note(f"note {number}")
        display.note("日本語 \x1b[2J\nü")
    before, _, after = terminal.hang_up().decode("latin-1").partition("\x1b[?1049h")
    assert before.endswith("before \xb7[2J\r\n")
    lines = after.rpartition("\x1b[?1049l")[2].splitlines()
    assert lines[0] == f"2 earlier notes are in {RunDir(Path(config.run.dir) / 'demo').events_path}"
    assert len(lines) == 101 and lines[1].endswith("] note 2") and lines[-1].endswith("] ??? \xb7[2J\xb7ü")


async def test_keys_are_given_back_though_what_is_drawn_on_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    (keys_end, keys), (out_end, out) = pty.openpty(), pty.openpty()
    modes = termios.tcgetattr(keys)
    with streams(monkeypatch, keys, out):
        with Terminal(lambda _: None, lambda: None):
            assert termios.tcgetattr(keys) != modes
            os.close(out_end)
        assert termios.tcgetattr(keys) == modes
    os.close(keys_end)
