"""Write what runs learned as small tables and one picture.

Usage: python curve.py RUN... [--dir runs] [--out DIRECTORY] [--since UNIX_SECONDS]

RUN is a run's name or directory, up or not, or a table that this program wrote. DIRECTORY (default: the working directory) gets RUN.csv for
each run, with a line for each batch and each evaluation, and curve.png with all of them. Seconds count from --since, or from the first
thing that the run measured.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from streamrl.monitor.metrics_read import Metrics
from streamrl.runtime.rundir import RunDir

COLUMNS = ("seconds", "version", "reward", "heldout", "rollouts", "tokens_made")


def read(run: RunDir, since: float | None = None) -> list[dict[str, float | str]]:
    """Read batches and evaluations of a run, the oldest first; `rollouts` and `tokens_made` count all that was made up to then."""
    rollouts = made = 0.0
    found: list[dict[str, float | str]] = []
    for row in Metrics(run).rows():
        since = row.time_s if since is None else since
        if row.kind == "window" and not row.of:
            made += row.values.get("tokens/sampled_total", 0.0)
            rollouts += row.values.get("producer/rollouts_total", 0.0)
        if row.kind in ("batch", "evaluation"):
            reward, heldout = (row.values.get(name, "") for name in ("rollout/raw_reward", "eval/heldout"))
            found.append(
                dict(zip(COLUMNS, (round(row.time_s - since, 1), row.version, reward, heldout, int(rollouts), int(made)), strict=True))
            )
    return found


def kind_of(name: str) -> str:
    """Give the name of a run without the number behind its last hyphen."""
    return name.rpartition("-")[0] or name


def draw(runs: dict[str, list[dict[str, float | str]]], path: Path) -> None:
    """Draw held-out shares against minutes, batches and rollouts; runs whose names differ in their number alone share a colour."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), sharey=True, constrained_layout=True)
    kinds = list(dict.fromkeys(map(kind_of, runs)))
    for name, rows in runs.items():
        kind = kind_of(name)
        first = name == next(one for one in runs if kind_of(one) == kind)
        evaluated = [row for row in rows if row["heldout"] != ""]
        shares = [float(row["heldout"]) for row in evaluated]
        minutes = [float(row["seconds"]) / 60 for row in evaluated]
        batches = [int(str(row["version"]).rpartition(".")[2]) for row in evaluated]
        rollouts = [float(row["rollouts"]) / 1000 for row in evaluated]
        for axis, across in zip(axes, (minutes, batches, rollouts), strict=True):
            label = kind if first else None
            axis.plot(across, shares, marker="o", markersize=3, linewidth=1.2, color=f"C{kinds.index(kind)}", label=label)
    for axis, what in zip(axes, ("minutes", "batches", "thousand rollouts"), strict=True):
        axis.set(xlabel=what, ylim=(0, 1))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("held-out share")
    axes[-1].legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Read the arguments and write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--dir", default="runs")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--since", type=float)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    found = {}
    for name in arguments.runs:
        if name.endswith(".csv"):
            with Path(name).open(newline="", encoding="utf-8") as file:
                found[Path(name).stem] = [{key: value or "" for key, value in row.items()} for row in csv.DictReader(file)]
            continue
        run = RunDir.find(name, base=arguments.dir)
        found[run.name] = read(run, arguments.since)
        with (arguments.out / f"{run.name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(found[run.name])
    draw(found, arguments.out / "curve.png")


if __name__ == "__main__":
    main()
