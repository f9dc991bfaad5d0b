"""Tables and the picture of lengths.py: who was trained, how old it was, what it cost, and what was learned."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from counting import LENGTHS
from running import mean_with_range

ARMS: Mapping[str, tuple[str, ...]] = {
    "lockstep": ("tasks.max_staleness=0",),
    "drop-2": ("tasks.max_staleness=2",),
    "mask-2": ("tasks.max_staleness=2", "tasks.stale=mask"),
    "wait-2": ("tasks.max_staleness=2", "tasks.stale=wait"),
    "drop-8": ("tasks.max_staleness=8",),
    "wait-8": ("tasks.max_staleness=8", "tasks.stale=wait"),
    "drop-8-paced": ("tasks.max_staleness=8", "tasks.hold_ahead=true"),
    "wait-8-paced": ("tasks.max_staleness=8", "tasks.stale=wait", "tasks.hold_ahead=true"),
}
"""Policies: what becomes of what is too old, the bound, and whether tasks are held back (`tasks.hold_ahead`)."""
Rows = Sequence[Mapping[str, str]]
EARLY = 10
"""Batches after the warm-up in which rollouts that take long have not come yet."""
_COLORS = dict(zip(LENGTHS, ("#66a182", "#edae49", "#d1495b"), strict=True))


def by_run(rows: Rows) -> dict[str, list[Rows]]:
    """arm -> the rows of each of its seeds, in the order of ARMS."""
    runs: dict[tuple[str, str], list[Mapping[str, str]]] = defaultdict(list)
    for row in rows:
        runs[row["arm"], row["seed"]].append(row)
    found: dict[str, list[Rows]] = {arm: [one for (of, _), one in runs.items() if of == arm] for arm in ARMS}
    return {arm: seeds for arm, seeds in found.items() if seeds}


def share(run: Rows, column: str, source: str) -> float:
    """Part of a source in the groups that a column counts; NaN where there are none."""
    total = sum(int(row[column]) for row in run)
    return sum(int(row[column]) for row in run if row["source"] == source) / total if total else float("nan")


def age(run: Rows, source: str) -> float:
    """Mean age in versions of a source's trained groups."""
    counted = [(int(row["trained"]), float(row["age"])) for row in run if row["source"] == source and int(row["trained"])]
    return float(np.average([age for _, age in counted], weights=[number for number, _ in counted])) if counted else float("nan")


def per_minute(run: Rows, column: str | None = None) -> float:
    """Batches a minute, or what a column has in a batch."""
    batches = {int(row["batch"]): row for row in run}
    elapsed = max(float(row["seconds"]) for row in run)
    amount = sum(float(row[column]) for batch, row in batches.items() if batch) if column else len(batches) - 1
    return 60 * amount / elapsed


def tables(rows: Rows) -> str:
    """Markdown: means over seeds, with the lowest and highest seed where seeds differ by more than rounding."""
    runs = by_run(rows)

    def late(run: Rows) -> Rows:
        return [row for row in run if int(row["batch"]) >= EARLY]

    def early(run: Rows) -> Rows:
        return [row for row in run if int(row["batch"]) < EARLY]

    sampling: list[tuple[str, Callable[[Rows], float], str]] = [
        (f"long, first {EARLY} batches", lambda run: share(early(run), "trained", "long"), ".0%"),
        ("long, later", lambda run: share(late(run), "trained", "long"), ".0%"),
        (
            "groups dropped",
            lambda run: (lost := sum(int(row["dropped"]) for row in run)) / (lost + sum(int(r["trained"]) for r in run)),
            ".0%",
        ),
        ("long among them", lambda run: share(run, "dropped", "long"), ".0%"),
        ("age of short", lambda run: age(late(run), "short"), ".1f"),
        ("age of long", lambda run: age(late(run), "long"), ".1f"),
    ]
    learning: list[tuple[str, Callable[[Rows], float], str]] = [
        ("batches a minute", per_minute, ".0f"),
        ("trained tokens/s", lambda run: per_minute(run, "tokens") / 60, ".0f"),
        *((f"accuracy {one}", lambda run, one=one: _accuracy(run, one, "last"), ".2f") for one in LENGTHS),
        ("accuracy long before", lambda run: _accuracy(run, "long", "first"), ".2f"),
    ]
    return "\n".join((_table(runs, sampling), _table(runs, learning)))


def _accuracy(run: Rows, source: str, when: str) -> float:
    return next(float(row[f"accuracy_{when}"]) for row in run if row["source"] == source)


def _table(runs: Mapping[str, list[Rows]], columns: Sequence[tuple[str, Callable[[Rows], float], str]]) -> str:
    lines = [f"| policy | {' | '.join(title for title, *_ in columns)} |", "|---|" + "---|" * len(columns)]
    for arm, seeds in runs.items():
        cells = [mean_with_range([f(run) for run in seeds], form) for _, f, form in columns]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(rows: Rows, path: Path) -> None:
    """Left: of which lengths the trained groups were; right: accuracy on long answers at the end, a dot a seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    runs = by_run(rows)
    figure = Figure(figsize=(11, 3.8), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    places = list(range(len(runs)))
    edge = np.zeros(len(runs))
    for source, color in _COLORS.items():
        widths = np.array([np.mean([share(run, "trained", source) for run in seeds]) for seeds in runs.values()])
        left.barh(places, widths, left=edge, color=color, label=source)
        edge += widths
    left.set_yticks(places, list(runs))
    left.invert_yaxis()
    left.set_xlim(0, 1)
    left.set_xlabel("part of the trained groups; a third of the tasks each")
    left.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False, fontsize=8)
    for place, seeds in zip(places, runs.values(), strict=True):
        right.plot([_accuracy(run, "long", "last") for run in seeds], [place] * len(seeds), "o", color=_COLORS["long"], alpha=0.8)
    right.set_xlabel("accuracy on long answers at the end")
    right.set_xlim(-0.02, 1.02)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Software": None})
