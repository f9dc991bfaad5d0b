"""The picture of two runs: reward, loss, staleness and importance weights over versions."""

from __future__ import annotations

from pathlib import Path

from streamrl.errors import ConfigError
from streamrl.history.compare import CompareReport
from streamrl.monitor.plot import smooth

_A, _B = "#1f6f8b", "#d1495b"
_PANELS = (
    ("reward", "rollout/raw_reward"),
    ("loss", "train/loss"),
    ("staleness (versions)", "staleness/mean"),
    ("importance weight", "train/tis"),
)
_SMOOTHING = 15


def write_comparison(report: CompareReport, path: Path) -> None:
    """Draw four panels of both runs into the PNG `path`; raises ConfigError where it cannot be written."""
    # Imported here: it takes half a second, and only this verb needs it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, metric) in zip(figure.subplots(2, 2, sharex=True).flat, _PANELS, strict=True):
        for side, color in ((report.a, _A), (report.b, _B)):
            curve = side.curves[metric]
            axes.plot(curve.numbers, curve.values, color=color, alpha=0.25, linewidth=1)
            axes.plot(curve.numbers, smooth(curve.values, _SMOOTHING), color=color, linewidth=2, label=side.name)
        axes.set_title(title, loc="left", fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dee2e6", linewidth=0.8)
        axes.set_axisbelow(True)
        if metric == "rollout/raw_reward":
            axes.legend(frameon=False, fontsize=9)
        if metric in ("staleness/mean", "train/tis"):
            axes.set_xlabel("version (batches trained)")
    try:
        figure.savefig(path, metadata={"Software": None}, format="png")
    except OSError as error:
        raise ConfigError(f"the picture cannot be written to {path}: {error.strerror}", hint="choose another file with --out") from error
