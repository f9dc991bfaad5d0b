"""The board of a run, its lines, and the state that `status` tells; also on a terminal, and whatever any login may store."""

from __future__ import annotations

import contextlib
import io
import math
import os
import pty
import subprocess
import sys
import termios
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from rich.cells import cell_len
from rich.text import Text

from streamrl.config.load import load
from streamrl.config.metrics import SloConfig
from streamrl.monitor.board import Board, Place, moved
from streamrl.monitor.board_screen import BoardDisplay, BoardScreen
from streamrl.monitor.drawing import Ink, Part, columns, fitted, folded, ink_of, painted, visible, width_of
from streamrl.monitor.failures import MOST_CHARS
from streamrl.monitor.look import Look, SampleLine
from streamrl.monitor.numbers import RunNumbers, Standing, WorkerLine
from streamrl.monitor.rates import batch_s
from streamrl.monitor.run_state import LENGTHS_S, RunState, StateFile, read_state, write_state
from streamrl.monitor.runs import RunLine, describe, list_runs, print_runs, steps_text
from streamrl.monitor.screen import PlainLines, clock, decimal, degraded_lines, plain_line, progress, short, sparkline, warnings
from streamrl.monitor.series import Series
from streamrl.monitor.slo import Judge, Signs, detail_of, line_of
from streamrl.monitor.status import RunStatus, print_status
from streamrl.monitor.summary import summarize, summary_line
from streamrl.monitor.terminal import Terminal, keys_of
from streamrl.monitor.untrained import barren_line
from streamrl.monitor.view import RunView
from streamrl.monitor.waits import diagnose, standing_line
from streamrl.runtime.lock import lock_run
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.control import EnginePresence, Grant, WorkerPresence
from streamrl.schemas.events import Event, MetricReport
from streamrl.schemas.ledger import Drop
from streamrl.schemas.versions import Version
from streamrl.telemetry.names import METRICS
from tests.monitor.conftest import MakeEntry, as_line, drawn, view_of
from tests.support.programs import surroundings
from tests.support.runs import bare_run, named_run
from tests.support.tiny import write_tiny

INK = Ink.COLOURS


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


NASTY = "\x1b[2J\x1b]0;owned\x07[bold]日本語\u202e 😀\r\n" * 20


@pytest.fixture
def look(learned_run: RunView) -> Look:
    sample = SampleLine(task=7, rollout=1, reward=0.5, prompt=NASTY, answer="4 [red]2")
    return look_at(learned_run, notes=(f"engine-0: {NASTY}",), samples=(sample,))


def look_at(view: RunView, **more: object) -> Look:
    workers = {"engine-0": WorkerLine(worker="engine-0", state="running", pid=17, since_s=990.0)}
    numbers = view.numbers(elapsed_s=65.0, supervised=workers)
    return Look(run="demo", state="running", numbers=numbers, now_s=1000.0, samples_bytes=10**9, **more)  # type: ignore[arg-type]


def plain(lines: list[str]) -> list[str]:
    return [Text.from_ansi(line).plain for line in lines]


def test_rollouts_that_failed_lately_stand_beside_their_producer_where_there_are_any(troubled: RunNumbers) -> None:
    healthy = WorkerLine(worker="producer-0", state="running")
    failing = replace(healthy, worker="producer-1", failed_rollouts=212)
    assert "failed lately" not in "\n".join(drawn(replace(troubled, workers=(healthy,)), 80))
    (line,) = (line for line in drawn(replace(troubled, workers=(healthy, failing)), 80) if "producer-1" in line)
    assert line.split() == ["producer-1", "running", "212"]


def bare(text: str) -> str:
    """Without blanks, at which lines are folded, and in a word that is longer than one."""
    return "".join(text.split())


@pytest.mark.parametrize("width", [20, 41, 80, 200])
def test_no_line_is_wider_than_the_screen_and_none_holds_a_command_for_it(look: Look, width: int) -> None:
    board = Board(look, width, INK)
    for lines in (board.text(), board.frame(Place(), 24), board.frame(Place(line=10**6), 24)):
        for line in plain(lines):
            assert cell_len(line) <= width
            assert "\x1b" not in line and "\n" not in line and "\x07" not in line and "\u202e" not in line
    assert (len(board.frame(Place(), 24)), len(board.frame(Place(), 3))) == (24, 3)


def test_the_board_tells_everything(look: Look) -> None:
    text = "\n".join(plain(Board(look, 120, INK).text()))
    for words in (
        *("streamrl demo  training  1:05  version 0.100", "80/80   warm-up 20   version 0.100", "engine-0-ab", "running  0:10"),
        *("the oldest 0.0 s; 0B of 1.0GB", "p50 1  p95 2  max 2 versions", "zero_variance       160  100%", "160 (zero_variance 160)"),
        *("held-out 0.910", "in flight 0.25, queued 0.50", "7/1 reward 0.500", "> 4 [red]2"),
    ):
        assert words in text, f"{words!r} is not in\n{text}"


def test_where_time_and_tokens_went_fits_a_small_screen_and_comes_behind_the_lag(look: Look) -> None:
    shares = {"starvation/trainer": 0.5, "trainer/share/compute": 0.4, "trainer/share/wait_samples": 0.5, "trainer/share/down": 0.001}
    tokens = {"tokens/sampled_total": 1200.0, "tokens/cut_total": 200.0, "tokens/open": -5.0, "tokens/dropped_total/stale": 30.0}
    small = Board(replace(look, shares=shares, goodput=tokens), 80, INK)
    text = plain(small.text())
    assert "starved  trainer 50%" in [line.rstrip() for line in text]
    assert "trainer  wait samples 50%  compute 40%" in [line.rstrip() for line in text]
    assert "sampled  all 1.2k  published 0  cut 200  evaluated 0  open -5" in [line.rstrip() for line in text]
    assert "dropped  30 (stale 30)" in [line.rstrip() for line in text]
    begin = next(place for place, line in enumerate(text) if line.startswith("time, newest window"))
    assert plain(Board(look, 80, INK).text())[:begin] == text[:begin], "what is looked at first stays"
    assert len(small.starts) == len(Board(look, 80, INK).starts) + 2


def test_an_engines_line_says_how_far_it_is_behind_and_how_fast(entry: MakeEntry) -> None:
    view = view_of(entry(5))
    for at_s, tokens in ((0.0, 0), (2.0, 500)):
        presence = EnginePresence(
            engine="engine-1-x", address="", serving=Version(0, 2), tokens_total=tokens, slots=8, running=3, waiting=2
        )
        view.engine("engine-1-x", presence)
        view.mark(at_s)
    (line,) = [line for line in plain(Board(look_at(view), 80, INK).text()) if line.startswith("engine-1-x")]
    assert line.split() == ["engine-1-x", "0.2", "3", "3/8", "2", "250"]
    view.engine("engine-1-x", None)
    assert not [line for line in plain(Board(look_at(view), 80, INK).text()) if line.startswith("engine-1-x")]


def test_a_reason_of_user_code_is_shown_as_it_is_but_for_commands(entry: MakeEntry) -> None:
    view = view_of(entry(1, drops=[Drop(sequence=1, task=1, rollouts=(0,), reason="[red]\x1b[31m")]))
    assert any("[red]·[31m" in line for line in plain(Board(look_at(view), 80, INK).text()))


def test_a_run_that_is_unknown_away_or_over_can_be_shown_in_the_wanted_colours(look: Look, learned_run: RunView) -> None:
    empty = Look(run="demo", state="stopped")
    assert plain(Board(empty, 80, INK).frame(Place(), 4))[:2] == ["streamrl demo  stopped", "nothing is known of it yet"]
    away = Look(run="demo", state="running", away="its bus does not answer", numbers=look.numbers)
    assert "does not answer" in plain(Board(away, 80, INK).text())[0]
    summary = summarize(learned_run, wall_s=65.0)
    text = "".join(Board(Look(run="demo", state="stopped", summary=summary), 40, Ink.NONE).text())
    assert bare(summary_line(summary)) in bare(text)
    text = {ink: "".join(Board(look, 80, ink).text()) for ink in Ink}
    assert "\x1b[32m" in text[Ink.COLOURS] and "\x1b[1;36m" in text[Ink.COLOURS]
    assert "\x1b[32m" not in text[Ink.GREY] and "\x1b[1mstep" in text[Ink.GREY]
    assert "\x1b" not in text[Ink.NONE]


@pytest.mark.parametrize("width", [20, 80])
def test_what_is_wrong_is_said_once_and_whole(troubled: RunNumbers, width: int) -> None:
    text = "".join(drawn(troubled, width))
    assert troubled.standing is not None
    for words in (troubled.standing.hint, troubled.slo[0].causes[0].hint, troubled.newest_error, *troubled.unusable_rows):
        assert bare(text).count(bare(words)) == 1, f"{words!r} is not once in\n{text}"


@pytest.mark.parametrize("keys", ["Ctrl-C stops  ", "q quit  "])
def test_the_foot_says_where_one_is_on_narrow_screens_and_fits_80_columns(learned_run: RunView, keys: str) -> None:
    board = Board(look_at(learned_run, notes=["a note"] * 2000), 80, INK)
    assert plain(board.frame(Place(paused=True), 24, keys))[-1].endswith(
        f"lines 1-22 of {len(board.lines)}  arrows, pages scroll  tab section"
    )
    narrow = Board(look_at(learned_run), 40, INK)
    assert f"lines 1-8 of {len(narrow.lines)}" in plain(narrow.frame(Place(), 10, keys))[-1]


def test_keys_move_and_never_beyond_the_ends(look: Look) -> None:
    board, height = Board(look, 80, INK), 10
    last = board.last_start(height)
    assert last > 0
    end = moved(Place(), "end", board, height)
    assert end == Place(last) == moved(end, "down", board, height) == moved(end, "page down", board, height)
    assert moved(end, "home", board, height) == Place(0) == moved(Place(), "up", board, height) == moved(Place(), "left", board, height)
    assert moved(Place(), "tab", board, height) == Place(board.starts[1])
    assert moved(Place(board.starts[1]), "back tab", board, height) == Place(0)
    assert moved(Place(10**6), "x", board, height) == Place(last), "the screen has grown"
    assert moved(Place(2), "p", board, height) == Place(2, paused=True)
    small = Board(Look(run="demo", state="stopped"), 80, INK)
    assert moved(Place(), "tab", small, 24) == Place(0)


def test_codes_of_keys_have_names_and_what_a_terminal_takes_for_a_command_is_a_point() -> None:
    assert keys_of("q\x1b[A\x1bOB\x1b[5~p\t\x1b[Z\x1b[99~") == ["q", "up", "down", "page up", "p", "tab", "back tab"]
    assert keys_of("") == []
    assert visible("plain é 日本 ü") == "plain é 日本 ü"
    assert visible("a\nb\x1b[2J\u202e\u200d") == "a·b·[2J··"
    assert visible("\u00a0") == "\u00a0", "a blank that does not break is a shape"


def texts(rows: list[tuple[str, ...]], width: int, *right: int) -> list[str]:
    return [painted(line, Ink.NONE) for line in columns(rows, width, right=frozenset(right))]


def test_columns_stand_below_each_other_and_the_widest_are_cut_first() -> None:
    assert texts([("a", "1", "x"), ("bcd", "20", "")], 80, 1) == ["a     1  x", "bcd  20  "]
    assert texts([], 80) == [] and columns([()], 80) == [[]]
    assert texts([("engine-0", "a state that says much", "7")], 24) == ["engine-0  a state th…  7"]
    for width in range(1, 40):
        for line in columns([("12345678", "日本語日本語日本語", "x" * 400, ""), ("", "", "", "y")], width):
            assert width_of(line) <= width


@pytest.mark.parametrize(
    ("text", "width", "cut"),
    [("abc", 3, "abc"), ("abcd", 3, "ab…"), ("日本", 3, "日…"), ("日本語", 4, "日 …"), ("ab", 1, "…"), ("", 0, "")],
)
def test_what_is_too_long_ends_in_a_sign_of_it(text: str, width: int, cut: str) -> None:
    assert painted(fitted([Part(text, "red")], width), Ink.NONE) == cut
    assert painted(fitted([Part(one) for one in text], width), Ink.NONE).replace(" ", "") == cut.replace(" ", "")


def test_a_note_goes_on_in_the_next_line() -> None:
    assert folded("page: http", 4) == ["page", ":", "http"]
    assert folded("日本語", 3) == ["日", "本", "語"]
    hint = "raise tasks.max_staleness, see  docs/slo.md"
    assert folded(hint, 24) == ["raise", "tasks.max_staleness, see", "docs/slo.md"]
    assert folded(hint, 23) == ["raise", "tasks.max_staleness,", "see  docs/slo.md"]
    assert folded("a    b", 3) == ["a", "b"] and folded("abc  ", 4) == ["abc", ""]
    assert folded("日", 1) == ["日"]
    assert folded("", 5) == [""] and folded("a\x1b", 5) == ["a·"]


def test_ink_is_for_terminals_that_want_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert ink_of(Tty()) is Ink.COLOURS and ink_of(io.StringIO()) is Ink.NONE
    monkeypatch.setenv("NO_COLOR", "1")
    assert ink_of(Tty()) is Ink.GREY
    monkeypatch.setenv("TERM", "dumb")
    assert ink_of(Tty()) is Ink.NONE


NUMBERS = (math.nan, math.inf, -math.inf, 1e308, 2.0**63, -(2.0**63), -1.0)


def shown(view: RunView) -> str:
    """Everything that is made of a view about once a second, and at the end."""
    view.mark(1.0)
    view.mark(2.0)
    view.take_rows(5.0, end=True)
    numbers = view.numbers(elapsed_s=1.0)
    assert view.series is not None
    signs = Signs(numbers=numbers, window=view.series.window, decided=view.series.decided, stones=view.failures.all_reasons)
    judge = Judge(SloConfig(p95_age=1.0, versions_behind=1.0, starvation=0.5, hold_s=0.0))
    msgspec.json.encode((detail_of(judge.look(signs, now_s=1.0, time_s=1.0)), numbers, summarize(view, wall_s=1.0)))
    lines = [plain_line(numbers), barren_line(numbers, view.failures.all_reasons), diagnose(numbers).what]
    lines += [text for _, text in warnings(numbers)]
    return "\n".join([*lines, *drawn(numbers, 100)])


@pytest.mark.parametrize("reduction", ["mean", "max", "sum", "last"])
@pytest.mark.parametrize("value", NUMBERS)
def test_reports_of_any_number(reduction: str, value: float) -> None:
    for names in ([name] for name in METRICS if name.startswith(("producer/", "reward/", "engine/", "trainer/"))):
        view = RunView("demo", steps=100, series=Series(window_s=0.0))
        for worker in ("producer-0", "producer-1"):
            given: dict[str, Any] = {reduction: dict.fromkeys(names, value)}
            view.metric(decode(encode(MetricReport(worker=worker, **given)), MetricReport))
        assert 0 <= view.numbers(elapsed_s=1.0).tasks_in_flight <= 2e9
    view = RunView("demo", steps=100, series=Series(window_s=0.0))
    everything: dict[str, Any] = {reduction: dict.fromkeys(METRICS, value)}
    view.metric(MetricReport(worker="producer-0", **everything))
    assert shown(view)


@pytest.mark.parametrize("number", [0, -1, 2**63 - 1, -(2**63)])
def test_presences_and_grants_of_any_number_and_states_of_any_length(number: int) -> None:
    view = RunView("demo", steps=100, series=Series(window_s=0.0))
    counts = dict.fromkeys(("running", "waiting", "slots", "tokens_total", "swaps_total", "max_len"), number)
    view.engine("engine-0-a", EnginePresence(engine="engine-0-a", address="x", serving=Version(0, 2**62), **counts))
    view.grant(Grant(granted=number, version=number, retired=number))
    for name, since_s in zip(("trainer-0", "producer-0", "engine-0"), NUMBERS, strict=False):
        detail = {"dead": number, "unrewarded": number, "ended": {"stale": number, "failed": number}}
        presence = WorkerPresence(worker=name, kind=name[:-2], state="x" * 1_000_000, since_s=since_s, detail=detail)
        view.worker(name, decode(encode(presence), WorkerPresence))
    assert len(shown(view)) < 50_000


STATES = {
    "engine-0": WorkerLine(worker="engine-0", state="running", restarts=1),
    "producer-0": WorkerLine(worker="producer-0", state="waiting", restarts=2),
}


def test_an_empty_run_can_be_shown_and_numbers_are_short() -> None:
    numbers = RunView("demo").numbers(elapsed_s=0.0)
    assert "starting" in "\n".join(drawn(numbers, 120))
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
    assert batch_s([*times, *(40_000 + one for one in times)]) == pytest.approx(2.0)
    assert batch_s([0.0] * 30) is None, "entries that do not say when"
    assert batch_s([]) is batch_s(times[:3]) is None
    serving = EnginePresence(engine="engine-0-cd", address="http://127.0.0.1:2", serving=Version(0, 99), degraded="every update pauses it")
    learned_run.engine("engine-0-cd", serving)
    numbers = learned_run.numbers(elapsed_s=65.0, supervised=STATES)
    assert [line.partition(": ")[0] for line in degraded_lines(numbers)] == ["engine-0-cd"]
    assert plain_line(numbers).endswith("degraded=engine-0-cd")
    assert degraded_lines(numbers)[0] in "\n".join(drawn(numbers, 120))


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
    """Tells what became of a program in `front` of a terminal and `behind`, in the background, and what it wrote there."""
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
        *troubled.unusable_rows,
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
