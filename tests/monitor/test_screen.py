from __future__ import annotations

import io

import msgspec
import pytest

from streamrl.monitor.board import Board
from streamrl.monitor.drawing import Ink
from streamrl.monitor.look import Look
from streamrl.monitor.numbers import RunNumbers, Standing, WorkerLine
from streamrl.monitor.rates import left_s
from streamrl.monitor.screen import PlainLines, clock, decimal, degraded_lines, plain_line, progress, short, sparkline
from streamrl.monitor.view import RunView
from streamrl.schemas.control import EnginePresence, WorkerPresence
from streamrl.schemas.events import Event
from streamrl.schemas.versions import Version
from tests.monitor.conftest import MakeEntry, as_line

STATES = {
    "engine-0": WorkerLine(worker="engine-0", state="running", restarts=1),
    "producer-0": WorkerLine(worker="producer-0", state="waiting", restarts=2),
}


def shown(numbers: RunNumbers) -> str:
    return "\n".join(Board(Look(run="demo", state="running", numbers=numbers), 120, Ink.NONE).text())


def test_an_empty_run_can_be_shown() -> None:
    numbers = RunView("demo").numbers(elapsed_s=0.0)
    assert "starting" in shown(numbers)
    assert plain_line(numbers).startswith("[0:00] starting step=0 version=-")


def test_a_plain_line_holds_the_numbers_and_who_is_in_trouble(learned_run: RunView) -> None:
    learned_run.worker("producer-0", WorkerPresence(worker="producer-0", kind="producer"))
    learned_run.event(Event(kind="stalled", worker="producer-0"))
    line = plain_line(learned_run.numbers(elapsed_s=65.0, supervised=STATES))
    assert line.startswith("[1:05] training step=80/80 warmup=20 version=0.100 reward=0.8")
    assert "heldout=0.910" in line
    assert "staleness=1/2" in line
    assert "stream-full=producer-0" in line
    assert line.endswith("workers=producer-0:waiting")


def test_the_time_left_is_said_once_it_is_known(entry: MakeEntry) -> None:
    view = RunView("demo", steps=40)
    view.ledger(as_line(entry(1, source="warmup")))
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


def test_a_night_in_which_the_run_was_down_does_not_count_for_the_time_left() -> None:
    times = [1000.0 + 2 * number for number in range(8)]
    assert left_s([*times, *(40_000 + one for one in times)], 10) == pytest.approx(20.0)
    assert left_s(times, 0) == left_s(times, -3) == 0.0
    assert left_s([0.0] * 30, 5) is None, "entries that do not say when"
    assert left_s([], 5) is left_s(times[:3], 5) is None


def test_an_engine_that_does_otherwise_than_asked_says_so(learned_run: RunView) -> None:
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


def test_counts_times_and_large_numbers_are_short() -> None:
    assert [short(count) for count in (0, 999, 1000, 12_345, 4_560_000, 7.8e9)] == ["0", "999", "1.0k", "12.3k", "4.6M", "7.8G"]
    assert [clock(seconds) for seconds in (0, 59.9, 61, 3661)] == ["0:00", "0:59", "1:01", "1:01:01"]


@pytest.mark.parametrize(("value", "text"), [(0.6718, "0.672"), (-3.0, "-3.000"), (123456.0, "123456.000"), (1e38, "1.000e+38")])
def test_large_numbers_are_short(value: float, text: str) -> None:
    assert decimal(value) == text
