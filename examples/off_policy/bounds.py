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
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from bound_report import draw, table
from methods import METHODS, QUICKSTART, shared
from running import Comparison, command

from streamrl.runtime.rundir import RunDir
from streamrl.schemas.ledger import LedgerEntry

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
    return [*shared(job.method, job.bound, job.seed, batches), *overrides]


def rows(job: Job, entries: Sequence[LedgerEntry], directory: RunDir) -> list[list[Any]]:
    """The table of a run, as COLUMNS says."""
    summary = json.loads((directory.path / "summary.json").read_text(encoding="utf-8"))
    ends = (summary["heldout_first"], summary["heldout_last"])
    began_s = entries[0].time_s
    return [[*job, b, round(e.time_s - began_s, 3), *(e.metrics[name] for name in MEASURED), *ends] for b, e in enumerate(entries)]


def options(running: argparse.ArgumentParser) -> None:
    running.add_argument("--bounds", type=int, nargs="+", default=[0, 8, 64])
    running.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(COMPARED))
    running.add_argument("--batches", type=int, default=200)


def jobs(arguments: argparse.Namespace) -> list[Job]:
    return [Job(m, bound, seed) for seed in range(arguments.seeds) for bound in sorted(arguments.bounds) for m in arguments.methods]


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
            report=table,
            draw=draw,
        )
    )
