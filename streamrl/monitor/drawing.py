"""Lines of coloured text for a terminal: cut to a width, set in columns, written with the terminal's codes.

What a screen that is drawn every second needs, for a tenth of the time that rich takes.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple, TextIO

from rich.cells import cell_len, set_cell_size

_CODES = {"bold": "1", "dim": "2", "reverse": "7", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_COLOURS = frozenset({"red", "green", "yellow", "cyan"})
_WORDS = re.compile(" +|[^ ]+")
_GAP = 2
"""Cells between columns."""


class Part(NamedTuple):
    """Text of one look. `style` has names of `_CODES`, with spaces between."""

    text: str
    style: str = ""


Line = Sequence[Part]
Cell = str | Part | Line
"""What stands in a column of a line."""


class Ink(Enum):
    """What a terminal may be told beside the text."""

    NONE = 0
    """Nothing: it is no terminal."""
    GREY = 1
    """Bold and dim, but no colours (https://no-color.org)."""
    COLOURS = 2


def ink_of(out: TextIO) -> Ink:
    """What the reader of `out` wants."""
    if not draws(out):
        return Ink.NONE
    return Ink.GREY if os.environ.get("NO_COLOR") else Ink.COLOURS


def draws(out: TextIO) -> bool:
    """Whether `out` is a terminal that knows codes."""
    return out.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def parts_of(cell: Cell) -> list[Part]:
    """A cell's parts, with a point for what a terminal takes for a command."""
    parts = [Part(cell)] if isinstance(cell, str) else [cell] if isinstance(cell, Part) else cell
    return [Part(visible(text), style) for text, style in parts]


def width_of(line: Line) -> int:
    """Cells of a line of `parts_of`."""
    return sum([len(text) if text.isascii() else cell_len(text) for text, _ in line])


def fitted(line: Line, width: int) -> Line:
    """The line, or as much of it as there is room for and `…`."""
    if width_of(line) <= width:
        return line
    kept: list[Part] = []
    room = max(0, width - 1)
    for text, style in line:
        taken = cell_len(text)
        if taken > room:
            return [*kept, Part(set_cell_size(text, room) + "…"[:width], style)]
        kept.append(Part(text, style))
        room -= taken
    return kept


def folded(text: str, width: int) -> list[str]:
    """The text on as many lines as it takes, at least one. Only a word that is longer than a line goes on in the next one."""
    lines = [""]
    for word in _WORDS.findall(visible(text)):
        if cell_len(lines[-1]) + cell_len(word) <= width:
            lines[-1] += word
            continue
        lines[-1] = lines[-1].rstrip(" ")
        if lines[-1]:
            lines.append("")
        for one in word.strip(" "):
            if lines[-1] and cell_len(lines[-1]) + cell_len(one) > width:
                lines.append("")
            lines[-1] += one
    return lines


def columns(rows: Sequence[Sequence[Cell]], width: int, *, right: frozenset[int] = frozenset()) -> list[Line]:
    """A line a row, its cells below those of the other rows.

    Args:
        rows: all of one length.
        width: cells of a line; where the rows need more, the widest columns are cut.
        right: indices of columns that are set to the right.
    """
    if not rows:
        return []
    cells = [[parts_of(cell) for cell in row] for row in rows]
    widths = _squeezed([max(map(width_of, column)) for column in zip(*cells, strict=True)], width)
    return [fitted(_joined(row, widths, right), width) for row in cells]


def painted(line: Line, ink: Ink) -> str:
    """The text with the codes for its styles."""
    return "".join(_painted(text, style, ink) for text, style in line)


def visible(text: str) -> str:
    """`text` with a point for every character that has no shape of its own: controls, escapes, marks of direction."""
    if text.isprintable():
        return text
    return "".join("\N{MIDDLE DOT}" if unicodedata.category(one)[0] == "C" else one for one in text)


def visible_lines(text: str) -> str:
    """`visible`, but that the ends of its lines stay."""
    return "\n".join(map(visible, text.split("\n")))


def _squeezed(widths: list[int], width: int) -> list[int]:
    room = width - _GAP * (len(widths) - 1)
    while (over := sum(widths) - room) > 0 and (most := max(widths)) > 1:
        place = widths.index(most)
        next_most = max((one for one in widths if one < most), default=1)
        widths[place] = max(1, min(most - 1, max(most - over, next_most)))
    return widths


def _joined(row: Iterable[list[Part]], widths: Sequence[int], right: frozenset[int]) -> list[Part]:
    line: list[Part] = []
    last = len(widths) - 1
    for index, (cell, width) in enumerate(zip(row, widths, strict=True)):
        cut = fitted(cell, width)
        blank = width - width_of(cut)
        if index in right and blank:
            line.append(Part(" " * blank))
        line += cut
        if index < last:
            line.append(Part(" " * (_GAP + (0 if index in right else blank))))
    return line


def _painted(text: str, style: str, ink: Ink) -> str:
    names = [name for name in style.split() if ink is Ink.COLOURS or (ink is Ink.GREY and name not in _COLOURS)]
    return f"\x1b[{';'.join(_CODES[name] for name in names)}m{text}\x1b[0m" if names and text else text
