import contextlib
import io
import os
import pty
import subprocess
import sys
import termios
import threading
from collections.abc import Generator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from streamrl.config.load import load
from streamrl.monitor.board import Board
from streamrl.monitor.board_screen import BoardDisplay, BoardScreen
from streamrl.monitor.drawing import Ink
from streamrl.monitor.failures import MOST_CHARS
from streamrl.monitor.look import Look
from streamrl.monitor.numbers import RunNumbers, Standing, WorkerLine
from streamrl.monitor.rates import left_s
from streamrl.monitor.run_state import LENGTHS_S, RunState, StateFile, read_state, write_state
from streamrl.monitor.screen import PlainLines, clock, decimal, degraded_lines, plain_line, progress, short, sparkline
from streamrl.monitor.slo import line_of
from streamrl.monitor.status import RunLine, RunStatus, describe, list_runs, print_runs, print_status, steps_text
from streamrl.monitor.terminal import Terminal
from streamrl.monitor.view import RunView
from streamrl.monitor.waits import standing_line
from streamrl.runtime.lock import lock_run
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.control import EnginePresence, WorkerPresence
from streamrl.schemas.events import Event
from streamrl.schemas.versions import Version
from tests.monitor.conftest import MakeEntry, as_line, view_of
from tests.support.programs import surroundings
from tests.support.runs import bare_run, named_run
from tests.support.tiny import write_tiny

STATES = {
    "engine-0": WorkerLine(worker="engine-0", state="running", restarts=1),
    "producer-0": WorkerLine(worker="producer-0", state="waiting", restarts=2),
}


def shown(numbers: RunNumbers) -> str:
    return "\n".join(Board(Look(run="demo", state="running", numbers=numbers), 120, Ink.NONE).text())


def test_an_empty_run_can_be_shown_and_numbers_are_short() -> None:
    numbers = RunView("demo").numbers(elapsed_s=0.0)
    assert "starting" in shown(numbers)
    assert plain_line(numbers).startswith("[0:00] starting step=0 version=-")
    assert [short(count) for count in (0, 999, 1000, 12_345, 4_560_000, 7.8e9)] == ["0", "999", "1.0k", "12.3k", "4.6M", "7.8G"]
    assert [clock(seconds) for seconds in (0, 59.9, 61, 3661)] == ["0:00", "0:59", "1:01", "1:01:01"]


def test_a_plain_line_holds_the_numbers_and_who_is_in_trouble(learned_run: RunView) -> None:
    learned_run.worker("producer-0", WorkerPresence(worker="producer-0", kind="producer"))
    learned_run.event(Event(kind="stalled", worker="producer-0"))
    line = plain_line(learned_run.numbers(elapsed_s=65.0, supervised=STATES))
    assert line.startswith("[1:05] training step=80/80 warmup=20 version=0.100 reward=0.8")
    assert "heldout=0.910" in line and "staleness=1/2" in line and "stream-full=producer-0" in line
    assert line.endswith("workers=producer-0:waiting")


def test_the_time_left_is_said_once_it_is_known(entry: MakeEntry) -> None:
    view = view_of(entry(1, source="warmup"), steps=40)
    assert " left=- " in plain_line(view.numbers(elapsed_s=1.0))
    for number in range(2, 5):
        view.ledger(as_line(entry(number)))
    assert " left=- " in plain_line(view.numbers(elapsed_s=1.0)), "two steps do not say how fast it is"
    view.ledger(as_line(msgspec.structs.replace(entry(5), time_s=1009.0)))  # one step of 5 s after two of 1 s
    numbers = view.numbers(elapsed_s=1.0)
    assert numbers.left_s == pytest.approx(36 * 7 / 3)
    assert " left=1:24 " in plain_line(numbers) and "version 0.5   left 1:24" in progress(numbers)
    view.standing = Standing(what="credit", hint="")
    assert " left=- " in plain_line(view.numbers(elapsed_s=1.0))
    assert "left" not in plain_line(RunView("demo").numbers(elapsed_s=1.0)), "a run without an end"


def test_nights_do_not_count_and_an_engine_that_does_otherwise_than_asked_says_so(learned_run: RunView) -> None:
    times = [1000.0 + 2 * number for number in range(8)]
    assert left_s([*times, *(40_000 + one for one in times)], 10) == pytest.approx(20.0)
    assert left_s(times, 0) == left_s(times, -3) == 0.0
    assert left_s([0.0] * 30, 5) is None, "entries that do not say when"
    assert left_s([], 5) is left_s(times[:3], 5) is None
    serving = EnginePresence(engine="engine-0-cd", address="http://127.0.0.1:2", serving=Version(0, 99), degraded="every update pauses it")
    learned_run.engine("engine-0-cd", serving)
    numbers = learned_run.numbers(elapsed_s=65.0, supervised=STATES)
    assert [line.partition(": ")[0] for line in degraded_lines(numbers)] == ["engine-0-cd"]
    assert plain_line(numbers).endswith("degraded=engine-0-cd")
    assert degraded_lines(numbers)[0] in shown(numbers)


def test_plain_lines_are_sparse_but_notes_are_not_held_back(learned_run: RunView) -> None:
    out = io.StringIO()
    numbers = learned_run.numbers(elapsed_s=1.0)
    with PlainLines(out, every_s=3600.0) as lines:
        for _ in range(5):
            lines.show(numbers)
        lines.note("engine-0 ended")
        lines.note("engine-0 is back")
    assert len(out.getvalue().splitlines()) == 3


def test_plain_lines_hold_no_command_for_a_terminal_and_no_letter_that_it_has_not(learned_run: RunView) -> None:
    learned_run.worker("producer-\x1b[2J", WorkerPresence(worker="producer-\x1b[2J", kind="producer", state="stalled \x1b]0;owned\x07"))
    learned_run.event(Event(kind="stalled", worker="producer-\x1b[2J"))
    out = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    with PlainLines(out) as lines:
        lines.note("ü 日本 \x1b[2J\rnext \udcff")
        lines.page("http://\x1b[2J")
        lines.show(learned_run.numbers(elapsed_s=1.0))
    out.seek(0)
    said = out.read().splitlines()
    assert said[0].endswith("] ü ?? \xb7[2J\xb7next \xb7") and said[1].endswith("] page: http://\xb7[2J")
    assert "stream-full=producer-\xb7[2J" in said[2] and "\x1b" not in said[2] and len(said) == 3


@pytest.mark.parametrize(
    ("values", "bars"),
    [((), ""), ((0.0, 1.0), "▁█"), ((0.0, 0.5, 1.0), "▁▅█"), ((-1.0, 1.0), "▁█"), ((0.0, 4.0), "▁█"), ((0.5, 0.5), "▅▅")],
)
def test_a_sparkline_spans_0_to_1_and_what_lies_beyond(values: tuple[float, ...], bars: str) -> None:
    assert sparkline(values) == bars


@pytest.mark.parametrize(("value", "text"), [(0.6718, "0.672"), (-3.0, "-3.000"), (123456.0, "123456.000"), (1e38, "1.000e+38")])
def test_large_numbers_are_short(value: float, text: str) -> None:
    assert decimal(value) == text


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
    run = bare_run(tmp_path / "runs" / "demo")
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


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return named_run(tmp_path / "demo")


@pytest.mark.parametrize("state", ["finished", "stopped", "failed"])
def test_how_a_session_ended_is_told_with_its_steps(run: RunDir, state: str) -> None:
    write_state(run, RunState(state=state, step=3, steps=9, error="producer: ValueError: no" if state == "failed" else ""))
    line = describe(run)
    assert (line.state, line.step, line.steps, steps_text(line)) == (state, 3, 9, "3/9")
    assert line.error == ("producer: ValueError: no" if state == "failed" else "")


def test_a_run_without_supervisor_was_interrupted_and_one_that_is_up_has_no_error(run: RunDir) -> None:
    write_state(run, RunState(state="running", step=3, steps=9))
    with lock_run(run):
        assert describe(run).state == "running"
    assert describe(run).state == "interrupted"
    write_state(run, RunState(state="failed", error="former"))
    with lock_run(run):
        assert describe(run).error == ""


@pytest.mark.parametrize("content", [None, b"", b'{"state": "fini', b"[]", b"\xff"])
def test_a_run_of_an_earlier_version_or_with_a_broken_file_is_stopped(run: RunDir, content: bytes | None) -> None:
    if content is not None:
        run.state_path.write_bytes(content)
    assert read_state(run) is None
    line = describe(run)
    assert (line.state, steps_text(line)) == ("stopped", "-")


def test_lengths_alone_are_written_rarely_and_all_else_at_once(run: RunDir) -> None:
    file = StateFile(run)

    def told(step: int, length: int, now_s: float, state: str = "running") -> RunState | None:
        file.tell(RunState(state=state, step=step, steps=9, lengths={"lengths/trained": (length,)}), now_s=now_s)
        return read_state(run)

    first = told(0, 1, 100.0)
    assert first is not None and first.lengths == {"lengths/trained": (1,)}
    assert told(0, 2, 101.0) == told(0, 3, 99.9 + LENGTHS_S) == first
    later = told(0, 4, 100.0 + LENGTHS_S)
    assert later is not None and later.lengths == {"lengths/trained": (4,)}
    assert told(0, 5, 101.0 + LENGTHS_S) == later
    step = told(1, 6, 102.0 + LENGTHS_S)
    assert step is not None and (step.step, step.lengths) == (1, {"lengths/trained": (6,)})
    assert told(1, 7, 103.0 + LENGTHS_S) == step
    end = told(1, 8, 104.0 + LENGTHS_S, "finished")
    assert end is not None and (end.state, end.lengths) == ("finished", {"lengths/trained": (8,)})


def test_a_disk_that_takes_no_state_ends_nothing_and_is_tried_again(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    file = StateFile(run)
    run.state_path.mkdir()
    file.tell(RunState(state="running"), now_s=0.0)
    assert "event=state_not_written" in caplog.text
    run.state_path.rmdir()
    file.tell(RunState(state="running", step=1), now_s=1.0)
    assert read_state(run) == RunState(state="running", step=1)


def test_a_run_that_is_prepared_or_lies_in_brackets_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with lock_run(bare_run(tmp_path / "new")):
        assert [(line.run, line.state) for line in list_runs(tmp_path)] == [("new", "preparing")]
        print_runs(list_runs(tmp_path), as_json=False)
        assert "preparing" in capsys.readouterr().out
    assert [line.state for line in list_runs(tmp_path)] == ["interrupted"]
    base = tmp_path / "[b]" / "[" / "red]"
    named_run(base / "demo")
    print_runs(list_runs(base), as_json=False)
    assert "[/red]" in "".join(capsys.readouterr().out.split())


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("out", [io.StringIO, Tty])
def test_status_says_what_is_wrong_and_what_to_do_in_a_pipe_and_on_a_terminal(
    troubled: RunNumbers, out: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    stdout = out()
    monkeypatch.setattr("sys.stdout", stdout)
    line = RunLine(run="demo", path="runs/demo", state="running", supervisor=17, summary=None)
    print_status(RunStatus(line=line, numbers=troubled, checkpoints=("0.90", "0.80")), as_json=False)
    said = stdout.getvalue()
    assert out is io.StringIO or all(len(each) <= 80 for each in said.splitlines()), "nothing wraps"
    assert troubled.standing is not None
    for words in (
        standing_line(troubled.standing),
        *map(line_of, troubled.slo),
        troubled.newest_error,
        "0.90, 0.80; a restart can go back",
    ):
        assert words in said.replace("\n", " ")


def test_why_a_run_failed_is_one_line_of_bounded_length_without_commands_for_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    error = "the newest: failed:\n\x1b[2J[bold]\x1b]0;owned\x07 " + "x" * 100_000
    line = RunLine(run="demo", path="runs/demo", state="failed", supervisor=None, error=error, summary=None)
    print_status(RunStatus(line=line, numbers=None), as_json=False)
    (first, why) = capsys.readouterr().out.splitlines()
    assert first.startswith("run demo is failed")
    assert why.startswith("the newest: failed: \N{MIDDLE DOT}[2J[bold]\N{MIDDLE DOT}]0;owned\N{MIDDLE DOT} xxx")
    assert len(why) == MOST_CHARS and why.endswith("...")


def test_what_is_said_of_a_run_in_a_pipe_holds_no_command_for_a_terminal(troubled: RunNumbers, capsys: pytest.CaptureFixture[str]) -> None:
    nasty = "failed: \x1b[2J\nat\u202e last"
    workers = (WorkerLine(worker="producer-0", state=nasty, failed_rollouts=3),)
    line = RunLine(run="demo", path="runs/demo", state="running", supervisor=17, summary=None)
    numbers = replace(troubled, newest_error=nasty, workers=workers)
    print_status(RunStatus(line=line, numbers=numbers), as_json=False)
    said = capsys.readouterr().out
    assert not {"\x1b", "\u202e"} & set(said)
    assert "newest failure: failed: \N{MIDDLE DOT}[2J at\N{MIDDLE DOT} last\n" in said
    assert "; 3 rollouts failed lately\n" in said
