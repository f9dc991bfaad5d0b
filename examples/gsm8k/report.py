"""Table and picture of a run: both sides' tokens a second, staleness, lag, swaps, and the log-probabilities' distance at every version.

Usage: python examples/gsm8k/report.py RUN [--dir runs] [--out DIRECTORY]

RUN is a run's name or directory, up or not. DIRECTORY (the run's own by default) gets report.md, report.png, versions.csv and
totals.json.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from measured import BEYOND_ROUNDING, Measured, Totals, read_run, totals

from streamrl.runtime.rundir import RunDir

if TYPE_CHECKING:
    from matplotlib.axes import Axes


ROWS = 24
"""Versions in the table; versions.csv has all."""
_SMOOTHING = 9
_MADE, _TRAINED, _AGE, _GREY, _RED = "#1f6f8b", "#d1495b", "#edae49", "#6c757d", "#b02a37"
COLUMNS = {
    "reward": "rollout/raw_reward",
    "age mean": "staleness/mean",
    "age max": "staleness/max",
    "wait s": "perf/wait_s",
    "step s": "perf/step_s",
    "|dlogp| same weights mean": "train/same_weights_logprob_abs_diff",
    "|dlogp| same weights p99": "train/same_weights_logprob_abs_diff_p99",
    "|dlogp| same weights max": "train/same_weights_logprob_abs_diff_max",
    "logp at that max": "train/same_weights_furthest_logprob",
    "sampler - float32 max": "train/float32_sampler_abs_diff_max",
    "trainer - float32 max": "train/float32_trainer_abs_diff_max",
    "|dlogp| all mean": "train/train_rollout_logprob_abs_diff",
    "|dlogp| all max": "train/train_rollout_logprob_abs_diff_max",
}
"""Column of the table to metric of the ledger."""


def rows(run: Measured) -> list[dict[str, float | None]]:
    """One row a version of reinforcement learning; rates over the time since the version before."""
    learned = run.learned
    times = [run.window[0], *(entry.time_s for entry in learned)]
    made = np.diff(run.tokens_made(times))
    seconds = np.maximum(np.diff(times), 1e-9)
    swaps = {swap.number: swap for swap in run.swaps}
    found: list[dict[str, float | None]] = []
    for place, entry in enumerate(learned):
        swap = swaps.get(entry.version.number)
        found.append(
            {
                "version": entry.version.number,
                "sampled tok/s": float(made[place] / seconds[place]),
                "trained tok/s": float(entry.num_tokens / seconds[place]),
                **{column: entry.metrics.get(name) for column, name in COLUMNS.items()},
                "publish to commit ms": None if swap is None else 1e3 * swap.lag_s,
                "commit ms": None if swap is None else swap.commit_ms,
            }
        )
    return found


def markdown(run: Measured, numbers: Totals, table: Sequence[dict[str, float | None]]) -> str:
    """The report as text."""
    lines = [f"# {run.run}", "", *summary_lines(numbers)]
    lines += [f"held-out accuracy: {', '.join(f'{accuracy:.3f} at version {number}' for number, accuracy in run.heldout)}"] * bool(
        run.heldout
    )
    shown = [table[place] for place in np.unique(np.linspace(0, len(table) - 1, ROWS).astype(int))]
    lines += ["", "| " + " | ".join(shown[0]) + " |", "|" + "---|" * len(shown[0])]
    lines += ["| " + " | ".join(cell(row[column]) for column in row) + " |" for row in shown]
    return "\n".join(lines) + "\n"


def summary_lines(numbers: Totals) -> list[str]:
    """The totals in words."""
    n = numbers
    rounding = f"mean {cell(n.rounding_mean)}, p99 {cell(n.rounding_p99)}, max {cell(n.rounding_max)} over {n.rounding_versions} versions"
    return [
        f"{n.batches} batches, {n.samples} rollouts in {n.seconds:.1f} s: {n.samples_per_s:.1f} rollouts/s; reward {n.reward_first:.3f} -> "
        f"{n.reward_last:.3f} (first and last 20 batches)",
        f"engines sampled {n.made_per_s:,.0f} tok/s ({cell(n.engine_running)} requests at a time), the trainer took {n.trained_per_s:,.0f} "
        f"tok/s (prompts included); it was busy {n.trainer_busy:.0%} and waited {n.trainer_waits:.0%} of the time",
        f"staleness mean {n.staleness_mean:.2f} (in flight {n.in_flight:.2f}, queued {n.queued:.2f}, publishing {n.publish_lag:.2f}), "
        f"max {n.staleness_max:g}; {n.dropped} rollouts dropped",
        f"{n.swaps} swaps: publication to commit p50 {cell(n.lag_ms_p50)} ms, p99 {cell(n.lag_ms_p99)} ms; commit p50 "
        f"{cell(n.commit_ms_p50)} ms, max {cell(n.commit_ms_max)} ms",
        f"|log-prob of trainer - of sampler|: under the same weights {rounding}; all tokens mean {cell(n.diff_mean)}, "
        f"max {cell(n.diff_max)}",
    ] + [
        f"the rollout of each version where they are furthest apart, against float32: sampler {cell(n.sampler_error)}, trainer "
        f"{cell(n.trainer_error)} (median over versions of its greatest); {n.unexplained} of {n.rounding_versions} versions are more than "
        f"rounding: the sampler over {BEYOND_ROUNDING:g} times as far as the trainer{_named(n.unexplained_at)}"
    ] * (n.sampler_error is not None)


def _named(versions: Sequence[int]) -> str:
    return f" (versions {', '.join(map(str, versions))})" * bool(versions)


def cell(value: float | None) -> str:
    """A number with four digits, or a dash."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


def draw(run: Measured, table: Sequence[dict[str, float | None]], path: Path) -> None:
    """The picture: everything by version."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 12), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels: list[Axes] = list(figure.subplots(5, 1, sharex=True, height_ratios=(1.3, 1.2, 1, 1, 1.3)))
    reward, rates, ages, lags, distances = panels
    plot(reward, table, "reward", _MADE, label="reward of a batch")
    if run.heldout:
        reward.plot(*zip(*run.heldout, strict=True), "o--", color=_TRAINED, label="held-out accuracy")
    reward.set_ylabel("reward")
    plot(rates, table, "sampled tok/s", _MADE, label="sampled by the engines", smooth=True)
    plot(rates, table, "trained tok/s", _TRAINED, label="taken by the trainer (with prompts)", smooth=True)
    rates.set_ylabel("tokens/s")
    plot(ages, table, "age mean", _AGE, label="mean")
    plot(ages, table, "age max", _GREY, label="oldest token")
    ages.set_ylabel("age (versions)")
    plot(lags, table, "publish to commit ms", _MADE, label="publication to commit", marks=".")
    plot(lags, table, "commit ms", _TRAINED, label="the commit itself", marks=".")
    lags.set_yscale("log")
    lags.set_ylabel("ms")
    for column, color, marks in (
        ("|dlogp| all max", _GREY, "."),
        ("|dlogp| all mean", _GREY, ""),
        ("|dlogp| same weights max", _RED, "."),
        ("|dlogp| same weights mean", _RED, ""),
    ):
        plot(distances, table, column, color, label=column.replace("|dlogp| ", "").replace("all", "all tokens"), marks=marks)
    distances.set_yscale("log")
    distances.set_ylabel("|log-prob difference|")
    distances.set_xlabel("version")
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dee2e6", linewidth=0.8)
        axes.legend(frameon=False, fontsize=8, ncols=4, loc="best")
    reward.set_title(run.run, loc="left", fontweight="bold")
    figure.savefig(path, metadata={"Software": None})


def plot(
    axes: Axes,
    table: Sequence[dict[str, float | None]],
    column: str,
    color: str,
    *,
    label: str,
    marks: str = "",
    smooth: bool = False,
) -> None:
    """One column over the versions, as a line or as marks."""
    points = [(row["version"], row[column]) for row in table if row[column] is not None]
    if not points:
        return
    x, y = (np.array(each, float) for each in zip(*points, strict=True))
    if smooth and len(y) >= _SMOOTHING:
        edge = np.pad(y, _SMOOTHING // 2, mode="edge")
        y = np.convolve(edge, np.ones(_SMOOTHING) / _SMOOTHING, mode="valid")
    axes.plot(x, y, marks or "-", color=color, label=label, markersize=4, linewidth=1.4, alpha=0.9)


def write_report(text: str, *, base: Path | str = "runs", out: Path | None = None) -> Totals:
    """Write the files of the run that `text` names and return its totals."""
    run = read_run(text, base=base)
    directory = out or RunDir.find(text, base=base).path
    directory.mkdir(parents=True, exist_ok=True)
    table, numbers = rows(run), totals(run)
    (directory / "report.md").write_text(markdown(run, numbers, table), encoding="utf-8")
    with (directory / "versions.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(table[0]))
        writer.writeheader()
        writer.writerows(table)
    (directory / "totals.json").write_bytes(msgspec.json.encode(numbers))
    draw(run, table, directory / "report.png")
    return numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--dir", default="runs")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    write_report(arguments.run, base=arguments.dir, out=arguments.out)
    directory = arguments.out or RunDir.find(arguments.run, base=arguments.dir).path
    print((directory / "report.md").read_text(encoding="utf-8"), end="")
    print(f"\n{directory / 'report.png'}")


if __name__ == "__main__":
    main()
