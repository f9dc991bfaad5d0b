"""The picture of a run: reward above, age of what was trained below; of a run of kind `sft` the loss alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from streamrl.monitor.numbers import Point
from streamrl.monitor.summary import learning_evaluations
from streamrl.monitor.view import RunView

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_REWARD, _HELDOUT, _AGE, _SWAP, _WARMUP = "#1f6f8b", "#d1495b", "#edae49", "#6c757d", "#e9ecef"
_SMOOTHING = 15
"""Batches in the smoothed curve."""


def write_plot(view: RunView, path: Path) -> None:
    """Draw reward and staleness, or the loss, over versions into the PNG `path`; needs at least one batch that is not of the warm-up."""
    # Imported here: it takes half a second, and only the end of a run needs it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    supervised = [point for point in view.reward_points if point.loss is not None]
    if supervised:
        _draw_loss(figure.subplots(), view, supervised)
        figure.savefig(path, metadata={"Software": None})
        return
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.4))
    _draw_reward(top, view)
    _draw_staleness(bottom, view)
    warmup = view.trained.points(warmup=True)
    cold = (warmup[0].number - warmup[0].num_batches, warmup[-1].number) if warmup else None
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dee2e6", linewidth=0.8)
        axes.set_axisbelow(True)
        if cold:
            axes.axvspan(*cold, color=_WARMUP, zorder=0)
    if cold:
        top.annotate("warm-up", (cold[1] / 2, 0.97), xycoords=("data", "axes fraction"), ha="center", va="top", color=_SWAP, fontsize=9)
    top.set_title(f"{view.run}: reward and age of the trained rollouts", loc="left", fontsize=12, fontweight="bold")
    bottom.set_xlabel("version (batches trained)")
    figure.savefig(path, metadata={"Software": None})


def _draw_loss(axes: Axes, view: RunView, points: Sequence[Point]) -> None:
    losses = [point.loss for point in points if point.loss is not None]
    numbers = [point.number for point in points]
    axes.plot(numbers, losses, color=_REWARD, alpha=0.3, linewidth=1, label="loss of a batch")
    axes.plot(numbers, smooth(losses, _SMOOTHING), color=_REWARD, linewidth=2.2, label="smoothed")
    axes.set_title(f"{view.run}: negative log-likelihood of the answers", loc="left", fontsize=12, fontweight="bold")
    axes.set_xlabel("version (batches trained)")
    axes.set_ylabel("loss (nats a token)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dee2e6", linewidth=0.8)
    axes.legend(loc="upper right", frameon=False, fontsize=9)


def _draw_reward(axes: Axes, view: RunView) -> None:
    points = [(point.number, point.reward) for point in view.reward_points if point.reward is not None]
    numbers = [number for number, _ in points]
    rewards = [reward for _, reward in points]
    axes.plot(numbers, rewards, color=_REWARD, alpha=0.3, linewidth=1, label="reward of a batch")
    thinned = any(point.num_batches > 1 for point in view.reward_points)
    label = "smoothed" if thinned else f"mean over {_SMOOTHING} batches"
    axes.plot(numbers, smooth(rewards, _SMOOTHING), color=_REWARD, linewidth=2.2, label=label)
    evaluations = [(one.version.number, one.accuracy) for one in learning_evaluations(view) if one.accuracy is not None]
    if evaluations:
        axes.plot(
            [number for number, _ in evaluations],
            [accuracy for _, accuracy in evaluations],
            "o--",
            color=_HELDOUT,
            markersize=6,
            linewidth=1,
            label="held-out accuracy",
        )
    axes.set_ylabel("reward")
    low, high = min([0.0, *rewards]), max([1.0, *rewards])
    axes.set_ylim(low - 0.02 * (high - low), high + 0.03 * (high - low))
    axes.legend(loc="lower right", frameon=False, fontsize=9)


def _draw_staleness(axes: Axes, view: RunView) -> None:
    from matplotlib.ticker import MaxNLocator

    points = view.reward_points
    numbers = [point.number for point in points]
    axes.fill_between(
        numbers,
        [point.age_min for point in points],
        [point.age_max for point in points],
        step="mid",
        color=_AGE,
        alpha=0.3,
        linewidth=0,
        label="youngest to oldest",
    )
    axes.plot(numbers, [point.age_mean for point in points], color=_AGE, linewidth=1.6, label="mean")
    highest = max((point.age_max for point in points), default=1)
    if view.swap_numbers:
        axes.plot(
            sorted(view.swap_numbers),
            [-0.22] * len(view.swap_numbers),
            "|",
            color=_SWAP,
            markersize=6,
            alpha=0.7,
            label="version seen in an engine",
        )
    axes.set_ylim(-0.45, max(1, highest) * 1.35)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("age (versions)")
    axes.legend(loc="upper right", frameon=False, fontsize=9, ncols=3)


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Mean over the `window` values around each place, of fewer at both ends; `window` is odd. Centred, so that it does not lag."""
    half = window // 2
    sums = [0.0, *itertools.accumulate(values)]
    edges = ((max(0, place - half), min(len(values), place + half + 1)) for place in range(len(values)))
    return [(sums[end] - sums[start]) / (end - start) for start, end in edges]
