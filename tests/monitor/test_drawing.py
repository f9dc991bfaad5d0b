from __future__ import annotations

import io

import pytest

from streamrl.monitor.drawing import Ink, Part, columns, fitted, folded, ink_of, painted, visible, width_of


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


def test_what_a_terminal_takes_for_a_command_is_a_point() -> None:
    assert visible("plain é 日本 ü") == "plain é 日本 ü"
    assert visible("a\nb\x1b[2J\u202e\u200d") == "a·b·[2J··"
    assert visible("\u00a0") == "\u00a0", "a blank that does not break is a shape"


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
