"""The picture of a bus benchmark: tokens a second above, CPU time a token below, a column for every shape."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from streamrl.bench.bus.plan import Cell, Transport
from streamrl.bench.bus.report import BusReport, Row
from streamrl.bench.machine import describe

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
_SHADES = ((1.0, "producer"), (0.65, "server"), (0.35, "consumer"))


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
    _draw(above, report, cells, stacked=False)
    _draw(below, report, cells, stacked=True)
    above.set_ylabel("million tokens/s")
    below.set_ylabel("CPU ns a token")
    below.set_xlabel("samples x tokens of a message")
    above.set_title("publish, read, decode: one producer, one consumer", loc="left", fontsize=11, fontweight="bold")
    used = [transport for transport in Transport if any(row.transport is transport for row in report.rows)]
    above.legend([Patch(color=_COLORS[one]) for one in used], [_NAMES[one] for one in used], frameon=False, fontsize=8, ncols=2)
    below.legend([Patch(color="black", alpha=shade) for shade, _ in _SHADES], [name for _, name in _SHADES], frameon=False, fontsize=8)
    figure.text(0.995, 0.003, describe(report.machine), ha="right", va="bottom", fontsize=5, color="#868e96")
    figure.savefig(path, metadata={"Software": None})


def _draw(axes: Axes, report: BusReport, cells: list[Cell], *, stacked: bool) -> None:
    used = [transport for transport in Transport if any(row.transport is transport for row in report.rows)]
    width = 0.84 / len(used)
    for row in report.rows:
        x = cells.index(row.cell) + (used.index(row.transport) - (len(used) - 1) / 2) * width
        if stacked:
            _draw_stack(axes, row, x, width)
            continue
        speed = row.tokens_per_s
        axes.bar(x, speed.p50 / 1e6, width * 0.92, color=_COLORS[row.transport])
        axes.plot([x, x], [speed.low / 1e6, speed.high / 1e6], color="#212529", linewidth=0.9)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(range(len(cells)), [cell.name for cell in cells], fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dee2e6", linewidth=0.6)
    axes.set_axisbelow(True)


def _draw_stack(axes: Axes, row: Row, x: float, width: float) -> None:
    bottom = 0.0
    for (shade, _), part in zip(_SHADES, (row.producer_ns, row.server_ns, row.consumer_ns), strict=True):
        axes.bar(x, part, width * 0.92, bottom=bottom, color=_COLORS[row.transport], alpha=shade)
        bottom += part
