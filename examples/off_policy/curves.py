"""Reward at a forced staleness under several corrections: runs the quickstart many times, and draws the picture of docs/algorithms.md.

Usage: python examples/off_policy/curves.py run --out DIR [--parallel N] [--seeds 3] [--ages 0 2 8 32] [--batches 200] [--deadline SECONDS]
           [--set SECTION.KEY=VALUE ...]
       python examples/off_policy/curves.py report DIR [--picture FILE.png]

Every run is `streamrl up` on examples/quickstart with all its processes, about two cores each. `debug.delay_versions` = tasks.max_staleness
makes every batch exactly that many versions old. A run that failed is named and left out; one whose rows are there is not run again.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from methods import METHODS
from picture import draw, table
from running import execute, ledger, read_tables, run_all, write_table

from streamrl.cli.numbers import seconds
from streamrl.runtime.rundir import RunDir

QUICKSTART = Path(__file__).parents[1] / "quickstart" / "quickstart.toml"
COLUMNS = ("method", "age", "seed", "batch", "reward", "staleness_mean", "staleness_max", "grad_norm", "ess_token")


class Job(NamedTuple):
    """One run."""

    method: str
    age: int
    seed: int

    @property
    def name(self) -> str:
        """Of the run and of its table."""
        return f"{self.method}-{self.age}-{self.seed}".replace("_", "-")


def settings(job: Job, batches: int, overrides: Sequence[str] = ()) -> list[str]:
    """What differs from the quickstart's file."""
    return [
        f"run.seed={job.seed}",
        f"run.steps={batches}",
        "run.max_seconds=0",
        "run.until_reward=0",
        f"tasks.max_staleness={job.age}",
        f"debug.delay_versions={job.age}",
        "weights.keep=0",
        "data.heldout=",
        "trainer.device=cpu",
        "trainer.minibatches=2",
        f"trainer.checkpoint_every={10 * batches}",
        *METHODS[job.method].settings,
        *overrides,
    ]


async def run_job(job: Job, sets: Sequence[str], out: Path, limit_s: float) -> bool:
    """Run it and keep its ledger's numbers as `out/NAME.csv`; False when it failed."""
    table_path = out / f"{job.name}.csv"
    if table_path.exists():
        return True
    code = await execute(QUICKSTART, job.name, sets, out, limit_s)
    directory = RunDir.find(job.name, base=out / "runs")
    entries = await ledger(directory)
    names = ("rollout/raw_reward", "staleness/mean", "staleness/max", "train/grad_norm", "train/ess_token")
    write_table(table_path, COLUMNS, ([*job, batch, *(e.metrics.get(name, "") for name in names)] for batch, e in enumerate(entries)))
    shutil.rmtree(directory.path)
    print(f"{job.name}: {len(entries)} batches, exit code {code}", flush=True)
    return code == 0


def run_jobs(arguments: argparse.Namespace) -> list[str]:
    """Run all; the names of those that failed."""
    out = Path(arguments.out).absolute()
    out.mkdir(parents=True, exist_ok=True)
    # The oldest first: theirs take longest.
    jobs = [Job(m, age, seed) for seed in range(arguments.seeds) for age in sorted(arguments.ages, reverse=True) for m in arguments.methods]

    def run(job: Job, left_s: float) -> bool:
        return asyncio.run(run_job(job, settings(job, arguments.batches, arguments.overrides), out, left_s))

    return run_all(jobs, run, parallel=arguments.parallel, deadline=arguments.deadline)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    running = verbs.add_parser("run")
    running.add_argument("--out", required=True)
    running.add_argument("--parallel", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    running.add_argument("--seeds", type=int, default=3)
    running.add_argument("--ages", type=int, nargs="+", default=[0, 2, 8, 32])
    running.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    running.add_argument("--batches", type=int, default=200)
    running.add_argument("--deadline", type=seconds, default=86_400.0)
    running.add_argument("--set", dest="overrides", action="append", default=[])
    reporting = verbs.add_parser("report")
    reporting.add_argument("directory", type=Path)
    reporting.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    if arguments.verb == "run":
        failed = run_jobs(arguments)
        if failed:
            sys.exit(f"{len(failed)} runs failed or had no time: {' '.join(failed)}")
        return
    rows = read_tables(arguments.directory.glob("*.csv"))
    if not rows:
        sys.exit(f"no tables in {arguments.directory}: run `curves.py run --out {arguments.directory}` first")
    print(table(rows), end="")
    if arguments.picture:
        draw(rows, arguments.picture)


if __name__ == "__main__":
    main()
