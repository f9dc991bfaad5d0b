"""Curves of reward over batches, one panel for each age, and the table of where they end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from methods import METHODS

from streamrl.monitor.plot import smooth

_SMOOTHING = 9
_LAST = 20
"""Batches that the table's rewards are means of."""

Rows = Sequence[dict[str, str]]
Curves = dict[int, dict[str, list[list[float]]]]


def curves(rows: Rows) -> Curves:
    """age -> method -> one list of rewards for each seed."""
    runs: dict[tuple[int, str, str], list[tuple[int, float]]] = defaultdict(list)
    for row in rows:
        runs[int(row["age"]), row["method"], row["seed"]].append((int(row["batch"]), float(row["reward"])))
    found: Curves = defaultdict(lambda: defaultdict(list))
    for (age, method, _), points in sorted(runs.items()):
        found[age][method].append([reward for _, reward in sorted(points)])
    return found


def table(rows: Rows) -> str:
    """Markdown: mean reward of the last 20 batches, over seeds, with the lowest and highest seed; measured ages beside the forced ones."""
    found = curves(rows)
    ages = sorted(found)
    measured = {age: np.mean([float(r["staleness_mean"]) for r in rows if int(r["age"]) == age and int(r["batch"]) >= age]) for age in ages}
    head = " | ".join(f"{measured[age]:.1f} versions" for age in ages)
    lines = [f"| mean age of trained tokens | {head} |", "|---|" + "---|" * len(ages)]
    for method, (title, *_) in METHODS.items():
        cells = [_cell([float(np.mean(run[-_LAST:])) for run in found[age].get(method, [])]) for age in ages]
        if any(cells):
            lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(ends: list[float]) -> str:
    return f"{np.mean(ends):.2f} ({min(ends):.2f}-{max(ends):.2f})" if ends else ""


def draw(rows: Rows, path: Path) -> None:
    """Write the picture: lines are means over seeds, bands reach from the lowest seed to the highest."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = curves(rows)
    figure = Figure(figsize=(11, 3.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for axes, age in zip(panels, sorted(found), strict=True):
        for method, runs in found[age].items():
            length = min(len(run) for run in runs)
            smoothed = np.array([smooth(run[:length], _SMOOTHING) for run in runs])
            style = METHODS[method]
            axes.plot(smoothed.mean(0), color=style.color, linewidth=1.8, label=style.title)
            axes.fill_between(range(length), smoothed.min(0), smoothed.max(0), color=style.color, alpha=0.15, linewidth=0)
        axes.set_title("on-policy" if age == 0 else f"{age} versions old", loc="left", fontsize=10, fontweight="bold")
        axes.set_xlabel("batches of reinforcement learning")
        axes.set_ylim(0, 1.02)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dee2e6", linewidth=0.8)
    panels[0].set_ylabel("reward")
    panels[0].legend(loc="lower right", frameon=False, fontsize=8)
    figure.savefig(path, metadata={"Software": None})
