"""Reward at a forced staleness under several corrections: runs the quickstart many times, and draws the picture of docs/algorithms.md.

Usage: python examples/off_policy/curves.py run --out DIR [--parallel N] [--seeds 3] [--ages 0 2 8 32] [--batches 200] [--deadline SECONDS]
           [--set SECTION.KEY=VALUE ...]
       python examples/off_policy/curves.py report DIR [--picture FILE.png]

Every run is `streamrl up` on examples/quickstart with all its processes, about two cores each. `debug.delay_versions` = tasks.max_staleness
makes every batch exactly that many versions old. A run that failed is named and left out; one whose rows are there is not run again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

from methods import METHODS, QUICKSTART, shared
from picture import draw, table
from running import Comparison, command

from streamrl.runtime.rundir import RunDir
from streamrl.schemas.ledger import LedgerEntry

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
        *shared(job.method, job.age, job.seed, batches),
        f"debug.delay_versions={job.age}",
        "weights.keep=0",
        "data.heldout=",
        *overrides,
    ]


def rows(job: Job, entries: Sequence[LedgerEntry], _: RunDir) -> list[list[Any]]:
    """The table of a run, as COLUMNS says."""
    names = ("rollout/raw_reward", "staleness/mean", "staleness/max", "train/grad_norm", "train/ess_token")
    return [[*job, batch, *(entry.metrics.get(name, "") for name in names)] for batch, entry in enumerate(entries)]


def options(running: argparse.ArgumentParser) -> None:
    running.add_argument("--ages", type=int, nargs="+", default=[0, 2, 8, 32])
    running.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    running.add_argument("--batches", type=int, default=200)


def jobs(arguments: argparse.Namespace) -> list[Job]:
    """The oldest first: theirs take longest."""
    return [Job(m, age, seed) for seed in range(arguments.seeds) for age in sorted(arguments.ages, reverse=True) for m in arguments.methods]


if __name__ == "__main__":
    command(
        Comparison(
            usage=__doc__,
            options=options,
            jobs=jobs,
            file=lambda _: QUICKSTART,
            settings=lambda job, arguments: settings(job, arguments.batches, arguments.overrides),
            columns=COLUMNS,
            rows=rows,
            keeps_ledgers=False,
            report=table,
            draw=draw,
        )
    )
