"""The report of every benchmark: medians over rounds, tables, targets and checks; and its files and its place in a document.

A report is a pure function of the raw file (`benchmarks.raw`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from benchmarks.machine import Machine, describe
from benchmarks.raw import Header, Round
from streamrl.errors import DataError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

T = TypeVar("T")


class Middle(msgspec.Struct, frozen=True):
    """Median over rounds, least and greatest."""

    p50: float
    low: float
    high: float


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One contender over all rounds."""

    cell: str
    contender: str
    rounds: int
    values: dict[str, Middle]


class Target(msgspec.Struct, frozen=True):
    """Something promised, and what was measured; `met` is None where this run could not measure it."""

    name: str
    wanted: str
    got: str
    met: bool | None


class Check(msgspec.Struct, frozen=True, tag="check"):
    """A statement about correctness and whether it held."""

    name: str
    held: bool
    detail: str = ""


class Table(msgspec.Struct, frozen=True):
    """Cells as they are shown."""

    header: Sequence[str]
    lines: Sequence[Sequence[str]]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers, and how they are shown."""

    benchmark: str
    command: str
    machine: Machine
    spec: dict[str, Any]
    rows: Sequence[Any]
    """`Row`s, or a benchmark's own kind."""
    shown: list[Table | str]
    """Tables and sentences in order; targets, checks and the machine follow."""
    targets: list[Target] = []
    checks: list[Check] = []


def about(header: Header) -> dict[str, Any]:
    """The fields of a report that stand in the raw file's header."""
    return msgspec.structs.asdict(header)


def rows_of(
    rounds: Sequence[Round], quantities: Callable[[Mapping[str, float]], dict[str, float]], against: Mapping[str, tuple[str, str]]
) -> list[Row]:
    """One row for each cell and contender, in order of appearance.

    Args:
        rounds: what was measured.
        quantities: makes of a round's values those that are shown.
        against: names of ratios, and for each a contender and a quantity: that contender's over the row's own in the same round of the
            same cell, left out where there is none.
    """
    measured: dict[tuple[str, str], dict[int, dict[str, float]]] = {}
    for one in rounds:
        measured.setdefault((one.cell, one.contender), {})[one.round] = quantities(one.values)
    rows: list[Row] = []
    for (cell, contender), own in measured.items():
        names = dict.fromkeys(name for values in own.values() for name in values)
        found = {name: middle([values.get(name, 0.0) for values in own.values()]) for name in names}
        for name, (other, quantity) in against.items():
            theirs = measured.get((cell, other), {})
            ratios = [theirs[number][quantity] / own[number][quantity] for number in own if number in theirs and own[number][quantity]]
            if ratios:
                found[name] = middle(ratios)
        rows.append(Row(cell=cell, contender=contender, rounds=len(own), values=found))
    return rows


def middle(values: Sequence[float]) -> Middle:
    """Median, least and greatest."""
    return Middle(statistics.median(values), min(values), max(values))


def turn(contenders: Sequence[T], number: int) -> list[T]:
    """The order of a round: each begins with another one, so that nobody always runs after the same neighbour."""
    start = number % len(contenders)
    return [*contenders[start:], *contenders[:start]]


def render(report: Report) -> str:
    """The whole report as Markdown, ending in a line break."""
    parts = [*report.shown]
    if report.targets:
        parts.append(Table(["target", "wanted", "got", "met"], [[t.name, t.wanted, t.got, _said(t.met)] for t in report.targets]))
    if report.checks:
        parts.append(Table(["check", "held", "over"], [[c.name, _said(c.held), c.detail] for c in report.checks]))
    parts.append(f"`{report.command}`: {describe(report.machine)}.")
    return "\n\n".join(part if isinstance(part, str) else table(part) for part in parts) + "\n"


def table(one: Table) -> str:
    """A Markdown table with its columns padded to equal width, so that it reads as plain text too."""
    widths = [max(len(line[i]) for line in (one.header, *one.lines)) for i in range(len(one.header))]
    lines = [_line(one.header, widths), "|" + "|".join("-" * (width + 2) for width in widths) + "|"]
    return "\n".join(lines + [_line(line, widths) for line in one.lines])


def short(value: float) -> str:
    """Three digits or so; a dash for what is not a number."""
    return "-" if math.isnan(value) else f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def write_report(out: Path, report: Report) -> None:
    """Write `report.json` and `table.md`."""
    (out / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    (out / "table.md").write_text(render(report), encoding="utf-8")


def marks(benchmark: str) -> tuple[str, str]:
    """The lines of a document between which a benchmark's tables stand."""
    several = " ..." if benchmark == "weights" else ""
    begin = f"<!-- bench {benchmark}: begin (written by streamrl bench {benchmark} --report DIR{several} --docs FILE) -->"
    return begin, f"<!-- bench {benchmark}: end -->"


def write_between(document: Path, benchmark: str, text: str) -> None:
    """Put tables between their marks in a document.

    Raises:
        DataError: the document does not have them, in this order.
    """
    begin, end = marks(benchmark)
    before, found_begin, rest = document.read_text(encoding="utf-8").partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise DataError(
            f"expected the marks {begin!r} and {end!r} in {document}, got none",
            hint="add both lines where the table belongs",
            path=str(document),
        )
    document.write_text(f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}", encoding="utf-8")


@contextmanager
def picture(path: Path, size: tuple[float, float]) -> Generator[Figure]:
    """A figure of that many inches, to be drawn on; written to the PNG `path` in the end."""
    # Imported here: it takes half a second, and only reports need it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    yield figure
    figure.savefig(path, metadata={"Software": None})


def plain(axes: Axes, *, grid: str = "") -> None:
    """No frame but the axes themselves; with `grid` ("x" or "y") faint lines behind."""
    axes.spines[["top", "right"]].set_visible(False)
    if grid:
        axes.grid(axis="x" if grid == "x" else "y", color="#dee2e6", linewidth=0.6)
        axes.set_axisbelow(True)


def bars(axes: Axes, names: Sequence[str], speeds: Sequence[Middle], colors: Sequence[str], title: str, *, size: int = 8) -> None:
    """A bar a row, from the top, with its least and its most; `size` is that of the names."""
    spread = [[speed.p50 - speed.low for speed in speeds], [speed.high - speed.p50 for speed in speeds]]
    axes.barh(range(len(speeds)), [speed.p50 for speed in speeds], xerr=spread, color=colors, error_kw={"elinewidth": 0.8})
    _names(axes, names, title, size)


def stacks(
    axes: Axes, names: Sequence[str], parts: Sequence[Mapping[str, float]], colors: Mapping[str, str], title: str, *, size: int = 8
) -> None:
    """A bar a row, from the top, made of the parts that have a color, in the order of the colors; `size` is that of the names."""
    left = [0.0] * len(parts)
    for part, color in colors.items():
        values = [row.get(part, 0.0) for row in parts]
        axes.barh(range(len(parts)), values, left=left, color=color, label=part)
        left = [before + value for before, value in zip(left, values, strict=True)]
    _names(axes, names, title, size)
    axes.legend(frameon=False, fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.1))


def _names(axes: Axes, names: Sequence[str], title: str, size: int) -> None:
    axes.set_yticks(range(len(names)), names, fontsize=size)
    axes.invert_yaxis()
    axes.set_title(title, loc="left", fontsize=10)
    plain(axes)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"


def _said(met: bool | None) -> str:
    return "not measured" if met is None else "yes" if met else "NO"
