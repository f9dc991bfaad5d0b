from __future__ import annotations

import io
import math
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from rich.cells import cell_len
from rich.text import Text

from streamrl.config.slo import SloConfig
from streamrl.monitor.board import Board, Place, moved
from streamrl.monitor.drawing import Ink, Part, columns, fitted, folded, ink_of, painted, visible, width_of
from streamrl.monitor.look import Look, SampleLine
from streamrl.monitor.numbers import RunNumbers, WorkerLine
from streamrl.monitor.screen import plain_line, warnings
from streamrl.monitor.series import Series
from streamrl.monitor.slo import Judge, Signs, detail_of
from streamrl.monitor.summary import summarize, summary_line
from streamrl.monitor.terminal import keys_of
from streamrl.monitor.untrained import barren_line
from streamrl.monitor.view import RunView
from streamrl.monitor.waits import diagnose
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.control import EnginePresence, Grant, WorkerPresence
from streamrl.schemas.events import MetricReport
from streamrl.schemas.ledger import Drop
from streamrl.schemas.versions import Version
from streamrl.telemetry.names import METRICS
from tests.monitor.conftest import MakeEntry, view_of

INK = Ink.COLOURS
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
    def board(*workers: WorkerLine) -> str:
        return "\n".join(Board(Look(run="demo", state="running", numbers=replace(troubled, workers=workers)), 80, Ink.NONE).text())

    healthy = WorkerLine(worker="producer-0", state="running")
    assert "failed lately" not in board(healthy)
    (line,) = (
        line for line in board(healthy, replace(healthy, worker="producer-1", failed_rollouts=212)).splitlines() if "producer-1" in line
    )
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
    text = "".join(Board(Look(run="demo", state="running", numbers=troubled), width, Ink.NONE).text())
    assert troubled.standing is not None
    for words in (troubled.standing.hint, troubled.slo[0].causes[0].hint, troubled.newest_error):
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
    class Tty(io.StringIO):
        def isatty(self) -> bool:
            return True

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
    return "\n".join([*lines, *Board(Look(run="demo", state="running", numbers=numbers), 100, Ink.NONE).text()])


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
