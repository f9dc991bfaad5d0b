"""Time, held-out accuracy and effective sample size against the bound on staleness, under several corrections, on the quickstart.

Usage: python examples/off_policy/bounds.py run --out DIR [--parallel N] [--seeds 3] [--bounds 0 8 64] [--methods NAME ...] [--batches 200]
           [--deadline SECONDS] [--set SECTION.KEY=VALUE ...]
       python examples/off_policy/bounds.py report DIR [--picture FILE.png]

Every run is `streamrl up` on examples/quickstart with all its processes, about two cores each; it is as asynchronous as
`tasks.max_staleness` lets it be, nothing is delayed on purpose (curves.py does that). DIR keeps a table and the ledger
(NAME.ledger.jsonl.gz) of each run; one whose table is there is not run again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bound_report import draw, table
from methods import METHODS
from running import execute, keep_ledger, ledger, read_tables, run_all, write_table

from streamrl.cli.numbers import seconds
from streamrl.runtime.rundir import RunDir

QUICKSTART = Path(__file__).parents[1] / "quickstart" / "quickstart.toml"
COMPARED = ("tis", "ppo", "decoupled", "m2po", "vcpo")
MEASURED = ("rollout/raw_reward", "staleness/mean", "staleness/max", "train/ess_token", "train/ess_sequence")
COLUMNS = ("method", "bound", "seed", "batch", "seconds", *MEASURED, "heldout_first", "heldout_last")


class Job(NamedTuple):
    """One run."""

    method: str
    bound: int
    seed: int

    @property
    def name(self) -> str:
        """Of the run and of its table."""
        return f"{self.method}-{self.bound}-{self.seed}".replace("_", "-")


def settings(job: Job, batches: int, overrides: Sequence[str] = ()) -> list[str]:
    """What differs from the quickstart's file."""
    return [
        f"run.seed={job.seed}",
        f"run.steps={batches}",
        "run.max_seconds=0",
        "run.until_reward=0",
        f"tasks.max_staleness={job.bound}",
        "trainer.device=cpu",
        "trainer.minibatches=2",
        f"trainer.checkpoint_every={10 * batches}",
        *METHODS[job.method].settings,
        *overrides,
    ]


async def run_job(job: Job, sets: Sequence[str], out: Path, limit_s: float) -> bool:
    """Run it and keep its table and ledger; False when it failed."""
    table_path = out / f"{job.name}.csv"
    if table_path.exists():
        return True
    code = await execute(QUICKSTART, job.name, sets, out, limit_s)
    directory = RunDir.find(job.name, base=out / "runs")
    entries = await ledger(directory)
    if code == 0:
        keep_ledger(out / f"{job.name}.ledger.jsonl.gz", entries)
        summary = json.loads((directory.path / "summary.json").read_text(encoding="utf-8"))
        ends = (summary["heldout_first"], summary["heldout_last"])
        began_s = entries[0].time_s
        rows = ([*job, b, round(e.time_s - began_s, 3), *(e.metrics[name] for name in MEASURED), *ends] for b, e in enumerate(entries))
        write_table(table_path, COLUMNS, rows)
        shutil.rmtree(directory.path)
    print(f"{job.name}: {len(entries)} batches, exit code {code}", flush=True)
    return code == 0


def run_jobs(arguments: argparse.Namespace) -> list[str]:
    """Run all; the names of those that failed."""
    out = Path(arguments.out).absolute()
    out.mkdir(parents=True, exist_ok=True)
    jobs = [Job(m, bound, seed) for seed in range(arguments.seeds) for bound in sorted(arguments.bounds) for m in arguments.methods]

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
    running.add_argument("--bounds", type=int, nargs="+", default=[0, 8, 64])
    running.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(COMPARED))
    running.add_argument("--batches", type=int, default=200)
    running.add_argument("--deadline", type=seconds, default=86_400.0)
    running.add_argument("--set", dest="overrides", action="append", default=[])
    reporting = verbs.add_parser("report")
    reporting.add_argument("directory", type=Path)
    reporting.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    if arguments.verb == "run":
        if failed := run_jobs(arguments):
            sys.exit(f"{len(failed)} runs failed or had no time: {' '.join(failed)}")
        return
    found = read_tables(arguments.directory.glob("*.csv"))
    if not found:
        sys.exit(f"no tables in {arguments.directory}: run `bounds.py run --out {arguments.directory}` first")
    print(table(found), end="")
    if arguments.picture:
        draw(found, arguments.picture)


if __name__ == "__main__":
    main()
