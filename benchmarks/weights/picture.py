"""The timeline picture: every forward pass of a run above, single updates up close below."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.report import picture, plain
from benchmarks.weights.options import OURS, Mode
from benchmarks.weights.records import Forwards, Raw, UpdateRecord
from benchmarks.weights.stats import clock_offset_s, gaps_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = {
    Mode.STEADY: "#adb5bd",
    Mode.FLIP: "#2a9d8f",
    Mode.PACED: "#1f6f8b",
    Mode.COPY: "#edae49",
    Mode.TENSOR: "#d1495b",
    Mode.DISTRIBUTED: "#b23a6f",
    Mode.DISK: "#8d0801",
}
_NAMES = {
    Mode.FLIP: "ours, flip (unpaced)",
    Mode.PACED: "ours, flip (paced)",
    Mode.COPY: "ours, copy",
    Mode.TENSOR: "stock, pause + tensor",
    Mode.DISTRIBUTED: "stock, pause + distributed",
    Mode.DISK: "stock, pause + disk",
}
_OLD, _NEW, _PREFILL = "#ced4da", "#40798c", "#f4a261"
_LEAD_MS, _TAIL_MS = 60.0, 120.0
_NEAR_S = 2.0
"""Around an update, the passes that tie the GPU's clock to the host's."""


def write_timeline(raw: Raw, path: Path) -> None:
    """Draw the PNG `path` from the first rank's events."""
    shown = list(_typical_updates(raw))
    run = raw.run
    with picture(path, (12, 3.6 + 1.25 * len(shown))) as figure:
        grid = figure.subplots(1 + len(shown), 1, height_ratios=(2.6, *[1.0] * len(shown)), squeeze=False)[:, 0]
        _draw_run(grid[0], raw)
        for axes, update in zip(grid[1:], shown, strict=True):
            _draw_update(axes, raw.forwards[0], update)
        if shown:
            grid[-1].set_xlabel("ms since the trainer handed its weights over")
            _name_colors(grid[1])
        title = f"{raw.options.shape}, {raw.options.streams} streams, SGLang {run.sglang} on {run.num_devices} x {run.device}"
        grid[0].set_title(f"{title}: time between forward passes", loc="left", fontsize=12, fontweight="bold")


def _draw_run(axes: Axes, raw: Raw) -> None:
    from matplotlib.ticker import LogLocator

    gaps = gaps_of(raw.forwards[0])
    origin = raw.run.windows[0].start_s
    named: set[str] = set()
    tops: list[float] = []
    for window in raw.run.windows:
        color = _COLORS[Mode(window.mode)]
        chosen = (gaps.at_s >= window.start_s) & (gaps.at_s < window.end_s)
        label = "" if window.mode in named else _NAMES.get(Mode(window.mode), "no update")
        named.add(window.mode)
        axes.plot(gaps.at_s[chosen] - origin, gaps.ms[chosen], ".", color=color, markersize=2.5, label=label or None)
        if window.mode != Mode.STEADY:
            axes.axvspan(window.start_s - origin, window.end_s - origin, color=color, alpha=0.08, linewidth=0)
        tops.append(float(gaps.ms[chosen].max(initial=1.0)))
    for update in raw.updates:
        if update.window >= 0 and not update.error:
            axes.axvline(update.commit_s - origin, ymax=0.03, color=_COLORS[Mode(update.mode)], linewidth=0.8)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    axes.set_ylim(top=max(tops, default=1.0) * 1.6)
    axes.set_ylabel("ms (GPU events)")
    axes.set_xlabel("s; ticks at the bottom are commits")
    axes.legend(frameon=False, fontsize=8, ncols=6, loc="upper left", markerscale=3)
    plain(axes, grid="x")


def _typical_updates(raw: Raw) -> Iterator[UpdateRecord]:
    """Of each mode, the update whose time from publish to commit is the median."""
    for mode in _NAMES:
        updates = [update for update in raw.updates if update.mode == mode and update.window >= 0 and not update.error]
        if updates:
            yield sorted(updates, key=lambda update: update.commit_s - update.publish_s)[len(updates) // 2]


def _draw_update(axes: Axes, forwards: Forwards, update: UpdateRecord) -> None:
    origin = update.publish_s
    took_ms = (update.commit_s - origin) * 1e3
    low, high = -max(_LEAD_MS, took_ms * 0.2), took_ms + max(_TAIL_MS, took_ms * 0.3)
    near = np.abs(forwards.host_s - (origin + took_ms / 2e3)) < _NEAR_S + took_ms / 2e3
    offset_s = clock_offset_s(forwards.host_s[near], forwards.gpu_ms[near])
    ends = (forwards.gpu_ms / 1e3 + offset_s - origin) * 1e3 if near.any() else np.empty(0)
    ours = update.mode in OURS
    number = int(update.version.rpartition(".")[2])
    for i in range(1, len(ends)):
        if ends[i] < low or ends[i - 1] > high:
            continue
        new = forwards.version[i] >= number if ours else forwards.host_s[i] >= update.commit_s
        color = _PREFILL if forwards.extend[i] else _NEW if new else _OLD
        start = max(ends[i - 1], low)
        axes.barh(0, min(ends[i], high) - start, left=start, height=0.8, color=color, edgecolor="white", linewidth=0.6)
    color = _COLORS[Mode(update.mode)]
    busy = (update.announced_s - origin) * 1e3, ((update.staged_s if ours else update.commit_s) - origin) * 1e3
    axes.barh(1, max(busy[1] - busy[0], 0.3), left=busy[0], height=0.5, color=color)
    axes.axvline(0, color="#495057", linewidth=0.8, linestyle=":")
    axes.axvline(took_ms, color=color, linewidth=1.4)
    axes.set_xlim(low, high)
    axes.set_yticks([0, 1], ["forward passes", "staging" if ours else "paused"], fontsize=8)
    commit = f", commit {max(update.commit_ms):.2f} ms" if update.commit_ms else ""
    axes.set_title(f"{_NAMES[Mode(update.mode)]}: {took_ms:.0f} ms{commit}", loc="left", fontsize=9, color=color)
    plain(axes, grid="x")


def _name_colors(axes: Axes) -> None:
    from matplotlib.patches import Patch

    named = ((_OLD, "old version"), (_NEW, "new version"), (_PREFILL, "prefill of new requests"))
    handles = [Patch(color=color, label=label) for color, label in named]
    axes.legend(handles=handles, frameon=False, fontsize=8, ncols=3, loc="lower right", bbox_to_anchor=(1.0, 0.98))
