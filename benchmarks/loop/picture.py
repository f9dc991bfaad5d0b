"""The picture of `bench loop`: batches a second and where the processor time goes, and what asynchrony gives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.loop.report import ASYNCHRONOUS, LOCKSTEP, LoopReport, Row
from benchmarks.loop.ways import TITLES, Way

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS: dict[str, str] = {
    Way.STREAM: "#1f6f8b",
    Way.QUEUES: "#adb5bd",
    Way.PIPES: "#ced4da",
    Way.MEMORY: "#8fb8c7",
    ASYNCHRONOUS: "#1f6f8b",
    LOCKSTEP: "#d1495b",
}
_PARTS = ("#1f6f8b", "#2a9d8f", "#edae49", "#d1495b", "#8d99ae", "#40798c", "#adb5bd")


def write_picture(report: LoopReport, path: Path) -> None:
    """Draw the PNG `path`."""
    # Imported here: it takes half a second, and only reports need it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.8), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    speed, cpu, tail = figure.subplots(1, 3, width_ratios=(1.0, 1.3, 0.8))
    names = [TITLES[Way(row.label)].replace(": ", ":\n") for row in report.overhead]
    _bars(speed, report.overhead, names, "batches/s, the quickstart's loop")
    _stacks(cpu, report.overhead)
    _bars(tail, report.tail, [row.label for row in report.tail], "batches/s, heavy tail of lengths")
    if report.gain is not None:
        tail.set_xlabel(f"{report.gain.time:.1f} times as fast")
    figure.savefig(path, metadata={"Software": None})


def _bars(axes: Axes, rows: Sequence[Row], names: Sequence[str], title: str) -> None:
    places = range(len(rows))
    values = [row.batches_per_s for row in rows]
    spread = [[row.batches_per_s - row.low for row in rows], [row.high - row.batches_per_s for row in rows]]
    axes.barh(places, values, xerr=spread, color=[_COLORS.get(row.label, "#8d99ae") for row in rows], error_kw={"elinewidth": 0.8})
    _names(axes, names, title)


def _stacks(axes: Axes, rows: Sequence[Row]) -> None:
    kinds = list(dict.fromkeys(kind for row in rows for kind in row.cpu_by_process_ms))
    left = [0.0] * len(rows)
    for kind, color in zip(kinds, _PARTS * (1 + len(kinds) // len(_PARTS)), strict=False):
        values = [row.cpu_by_process_ms.get(kind, 0.0) for row in rows]
        axes.barh(range(len(rows)), values, left=left, color=color, label=kind)
        left = [before + value for before, value in zip(left, values, strict=True)]
    _names(axes, [""] * len(rows), "CPU ms of a batch, by process")
    axes.legend(frameon=False, fontsize=7, ncols=2)


def _names(axes: Axes, names: Sequence[str], title: str) -> None:
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_title(title, loc="left", fontsize=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
