"""The picture of a bus benchmark: tokens a second above, CPU time a token below, a column for every shape."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.bus.plan import Cell, Transport
from benchmarks.bus.report import BusReport, Row
from benchmarks.machine import describe

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = {
    Transport.STREAMRL: "#1f6f8b",
    Transport.REDIS_ORJSON: "#d1495b",
    Transport.REDIS_PICKLE: "#edae49",
    Transport.ZMQ_MSGPACK: "#8d96a3",
    Transport.RAY: "#66a182",
}
_NAMES = {
    Transport.STREAMRL: "streamrl (JetStream on disk, Arrow)",
    Transport.REDIS_ORJSON: "Redis stream in memory, orjson",
    Transport.REDIS_PICKLE: "Redis stream in memory, pickle",
    Transport.ZMQ_MSGPACK: "ZMQ, MessagePack (nothing stored)",
    Transport.RAY: "Ray object store (nothing stored)",
}


def write_picture(report: BusReport, path: Path) -> None:
    """Draw the PNG `path`."""
    # Imported here: it takes half a second, and only reports need it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    cells = list(dict.fromkeys(row.cell for row in report.rows))
    figure = Figure(figsize=(max(6.0, 1.3 + 1.35 * len(cells)), 6.4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1)
    _draw(above, report, cells, lambda row: (row.tokens_per_s.p50 / 1e6, row.tokens_per_s.low / 1e6, row.tokens_per_s.high / 1e6))
    _draw(below, report, cells, _cpu_ns)
    above.set_ylabel("million tokens/s")
    below.set_ylabel("CPU ns a token, all processes")
    below.set_xlabel("samples x tokens of a message")
    above.set_title("publish, read, decode: one producer, one consumer", loc="left", fontsize=11, fontweight="bold")
    above.set_title(describe(report.machine), loc="right", fontsize=4.5, color="#868e96")
    used = _used(report)
    above.legend([Patch(color=_COLORS[one]) for one in used], [_NAMES[one] for one in used], frameon=False, fontsize=8, ncols=2)
    figure.savefig(path, metadata={"Software": None})


def _used(report: BusReport) -> list[Transport]:
    return [transport for transport in Transport if any(row.transport is transport for row in report.rows)]


def _cpu_ns(row: Row) -> tuple[float, float, float]:
    # In full only: the parts of a bar have no meaning on a scale of powers of ten.
    total = row.producer_ns + row.server_ns + row.consumer_ns
    return total, total, total


def _draw(axes: Axes, report: BusReport, cells: list[Cell], heights: Callable[[Row], tuple[float, float, float]]) -> None:
    """A bar for each row, and a line from its least to its greatest value."""
    used = _used(report)
    width = 0.84 / len(used)
    for row in report.rows:
        x = cells.index(row.cell) + (used.index(row.transport) - (len(used) - 1) / 2) * width
        middle, low, high = heights(row)
        axes.bar(x, middle, width * 0.92, color=_COLORS[row.transport])
        axes.plot([x, x], [low, high], color="#212529", linewidth=0.9)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(range(len(cells)), [cell.name for cell in cells], fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dee2e6", linewidth=0.6)
    axes.set_axisbelow(True)
