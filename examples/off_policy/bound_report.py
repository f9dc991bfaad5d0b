"""The table and the picture of bounds.py."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from methods import METHODS
from running import mean_with_range

Rows = Sequence[Mapping[str, str]]
LAST = 20
"""Batches that rewards at the end are means of."""


def by_cell(rows: Rows) -> dict[int, dict[str, list[Rows]]]:
    """bound -> method -> the rows of each of its seeds, in order."""
    runs: dict[tuple[int, str, str], list[Mapping[str, str]]] = defaultdict(list)
    for row in rows:
        runs[int(row["bound"]), row["method"], row["seed"]].append(row)
    found: dict[int, dict[str, list[Rows]]] = defaultdict(lambda: defaultdict(list))
    for (bound, method, _), one in sorted(runs.items()):
        found[bound][method].append(sorted(one, key=lambda row: int(row["batch"])))
    return found


def column(run: Rows, name: str) -> np.ndarray:
    """[batches] of a column, float64."""
    return np.array([float(row[name]) for row in run])


MEASURES: Sequence[tuple[str, Callable[[Rows], float], str]] = (
    ("seconds", lambda run: column(run, "seconds")[-1], ".0f"),
    ("reward at the end", lambda run: column(run, "rollout/raw_reward")[-LAST:].mean(), ".2f"),
    ("held-out", lambda run: float(run[0]["heldout_last"]), ".2f"),
    ("mean age", lambda run: column(run, "staleness/mean").mean(), ".1f"),
    ("ESS, tokens", lambda run: column(run, "train/ess_token").mean(), ".2f"),
    ("ESS, samples", lambda run: column(run, "train/ess_sequence").mean(), ".2f"),
)
"""What is said of a run: its title, itself, and how it is written."""


def table(rows: Rows) -> str:
    """Markdown: means over seeds, with the lowest and highest seed."""
    lines = [f"| bound | method | {' | '.join(title for title, *_ in MEASURES)} |", "|---|---|" + "---|" * len(MEASURES)]
    for bound, methods in by_cell(rows).items():
        for method, (title, *_) in METHODS.items():
            if runs := methods.get(method):
                cells = [mean_with_range([measure(run) for run in runs], form) for _, measure, form in MEASURES]
                lines.append(f"| {bound} | {title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(rows: Rows, path: Path) -> None:
    """Three panels over the bound: seconds, held-out accuracy, ESS of tokens; means over seeds, and a dot a seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = by_cell(rows)
    bounds = sorted(found)
    figure = Figure(figsize=(11, 3.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    shown = [one for one in MEASURES if one[0] in ("seconds", "held-out", "ESS, tokens")]
    for axes, (title, measure, _) in zip(figure.subplots(1, 3), shown, strict=True):
        for offset, (method, style) in enumerate(METHODS.items()):
            cells = [[measure(run) for run in found[bound].get(method, [])] for bound in bounds]
            if not all(cells):
                continue
            places = np.arange(len(bounds)) + 0.05 * (offset - len(METHODS) / 2)
            axes.plot(places, [np.mean(cell) for cell in cells], color=style.color, linewidth=1.6, label=style.title)
            for place, cell in zip(places, cells, strict=True):
                axes.plot([place] * len(cell), cell, "o", color=style.color, markersize=3.5, alpha=0.7)
        axes.set_xticks(range(len(bounds)), [str(bound) for bound in bounds])
        axes.set_xlabel("tasks.max_staleness")
        axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dee2e6", linewidth=0.8)
    figure.axes[1].legend(loc="lower left", frameon=False, fontsize=8)
    figure.savefig(path, metadata={"Software": None})
