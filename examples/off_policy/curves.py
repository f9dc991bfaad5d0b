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
import csv
import os
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from methods import METHODS
from picture import draw, table

from streamrl.cli.numbers import seconds
from streamrl.runtime.run_bus import open_bus
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.codec import decode
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.subjects import LEDGER, WARMUP_SOURCE, Subjects

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


def settings(job: Job, batches: int, runs: Path, overrides: Sequence[str] = ()) -> list[str]:
    """What differs from the quickstart's file."""
    return [
        f"run.dir={runs}",
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
    """Run it and keep its ledger's numbers as `out/NAME.csv`; False when it failed or there was no time left for it."""
    table_path = out / f"{job.name}.csv"
    if table_path.exists():
        return True
    if limit_s <= 10:
        return False
    words = [word for text in sets for word in ("--set", text)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with (out / f"{job.name}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "streamrl", "up", str(QUICKSTART), "--plain", "--name", job.name, *words,
            stdout=log, stderr=log, env=environment,
        )  # fmt: skip
        try:
            code = await asyncio.wait_for(process.wait(), limit_s)
        except TimeoutError:
            process.terminate()
            code = await process.wait()
    directory = RunDir.find(job.name, base=out / "runs")
    entries = await ledger(directory)
    with table_path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for batch, entry in enumerate(entries):
            names = ("rollout/raw_reward", "staleness/mean", "staleness/max", "train/grad_norm", "train/ess_token")
            writer.writerow([*job, batch, *(entry.metrics.get(name, "") for name in names)])
    shutil.rmtree(directory.path)
    print(f"{job.name}: {len(entries)} batches, exit code {code}", flush=True)
    return code == 0


async def ledger(directory: RunDir) -> list[LedgerEntry]:
    """The entries of reinforcement learning, in order."""
    config = directory.load_config()
    subject = Subjects(config.run.name).ledger(config.trainer.name)
    found: list[LedgerEntry] = []
    async with open_bus(directory) as bus:
        newest = await bus.last(subject)
        if newest is not None:
            async for message in bus.read(LEDGER, after=0, subject=subject):
                found.append(decode(message.body, LedgerEntry, where=LEDGER))
                if message.sequence >= newest.sequence:
                    break
    return sorted((entry for entry in found if entry.source != WARMUP_SOURCE), key=lambda entry: entry.version)


def run_all(arguments: argparse.Namespace) -> list[str]:
    """Run all jobs, `parallel` at a time; returns the names of those that failed."""
    out = Path(arguments.out).absolute()
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + arguments.deadline
    # The oldest first: theirs take longest.
    jobs = [Job(m, age, seed) for seed in range(arguments.seeds) for age in sorted(arguments.ages, reverse=True) for m in arguments.methods]

    def one(job: Job) -> bool:
        sets = settings(job, arguments.batches, out / "runs", arguments.overrides)
        return asyncio.run(run_job(job, sets, out, end - time.monotonic()))

    with ThreadPoolExecutor(arguments.parallel) as pool:
        done = list(pool.map(one, jobs))
    return [job.name for job, good in zip(jobs, done, strict=True) if not good]


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
        failed = run_all(arguments)
        if failed:
            sys.exit(f"{len(failed)} runs failed or had no time: {' '.join(failed)}")
        return
    rows = [
        row for path in sorted(arguments.directory.glob("*.csv")) for row in csv.DictReader(path.read_text(encoding="utf-8").splitlines())
    ]
    if not rows:
        sys.exit(f"no tables in {arguments.directory}: run `curves.py run --out {arguments.directory}` first")
    print(table(rows), end="")
    if arguments.picture:
        draw(rows, arguments.picture)


if __name__ == "__main__":
    main()
