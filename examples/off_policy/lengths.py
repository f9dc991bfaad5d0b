"""What becomes of long answers under a bound on staleness: runs counting.toml under several policies, each for as long.

Usage: python examples/off_policy/lengths.py run --out DIR [--parallel N] [--seeds 3] [--arms NAME ...] [--seconds 60]
           [--deadline SECONDS] [--set SECTION.KEY=VALUE ...]
       python examples/off_policy/lengths.py report DIR [--picture FILE.png]

A third of the tasks has short answers, a third medium, a third long ones, and a rollout takes time in proportion to its tokens. Every run
is `streamrl up` with all its processes, about two cores each. DIR keeps a table and the ledger (NAME.ledger.jsonl.gz) of each run; one
whose table is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from counting import LENGTHS, write
from length_report import ARMS, draw, tables
from running import Comparison, command

from streamrl.cli.numbers import seconds
from streamrl.data.mixture import source_of
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.control import MixtureSegment
from streamrl.schemas.ledger import LedgerEntry

HERE = Path(__file__).parent
SOURCES = tuple(LENGTHS)
COLUMNS = ("arm", "seed", "batch", "seconds", "reward", "tokens", "source", "trained", "dropped", "age", "accuracy_first", "accuracy_last")
"""A row for each batch and source: groups trained and dropped, mean age in versions of the trained groups' oldest tokens."""


class Job(NamedTuple):
    """One run."""

    arm: str
    seed: int

    @property
    def name(self) -> str:
        """Of the run and of its table."""
        return f"{self.arm}-{self.seed}"


def settings(job: Job, seconds: float, overrides: Sequence[str] = ()) -> list[str]:
    """What differs from counting.toml."""
    return [f"run.seed={job.seed}", f"run.max_seconds={seconds:g}", "trainer.device=cpu", *ARMS[job.arm], *overrides]


def by_source(entries: Sequence[LedgerEntry], seed: int) -> list[dict[str, tuple[int, int, float]]]:
    """For each batch and source: groups trained, groups dropped, mean age of the trained ones (NaN: none).

    Raises:
        ValueError: the ledger's own count of a batch's sources differs.
    """
    first = min(task for entry in entries for task in (*(used.task for used in entry.used), *(drop.task for drop in entry.drops)))
    segment = MixtureSegment(first=0, version=0, weights=(1.0,) * len(SOURCES), places=(0,) * len(SOURCES))

    def source(task: int) -> str:
        return SOURCES[source_of(seed, segment, task - first)[0]]  # sources count from the warm-up's end

    found: list[dict[str, tuple[int, int, float]]] = []
    for entry in entries:
        trained = Counter(source(used.task) for used in entry.used)
        ages = Counter[str]()
        for used, age in zip(entry.used, entry.staleness, strict=True):
            ages[source(used.task)] += age
        dropped = Counter(source(drop.task) for drop in entry.drops if drop.retires)
        told = {name: tally.groups for name, tally in (entry.sources or {}).items()}
        if told != dict(trained):
            raise ValueError(f"expected the sources of version {entry.version} to be {told}, got {dict(trained)}")
        found.append({one: (trained[one], dropped[one], ages[one] / trained[one] if trained[one] else float("nan")) for one in SOURCES})
    return found


def rows(job: Job, entries: Sequence[LedgerEntry], directory: RunDir) -> list[list[Any]]:
    """The table of a run, as COLUMNS says."""
    evaluations = json.loads((directory.path / "summary.json").read_text(encoding="utf-8"))["evaluations"]
    table: list[list[Any]] = []
    for batch, (entry, groups) in enumerate(zip(entries, by_source(entries, job.seed), strict=True)):
        common = [*job, batch, round(entry.time_s - entries[0].time_s, 3), entry.metrics["rollout/raw_reward"], entry.num_tokens]
        table += [[*common, name, *groups[name], evaluations[name]["first"], evaluations[name]["last"]] for name in SOURCES]
    return table


def options(running: argparse.ArgumentParser) -> None:
    running.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    running.add_argument("--seconds", type=seconds, default=60.0)


def jobs(arguments: argparse.Namespace) -> list[Job]:
    return [Job(arm, seed) for seed in range(arguments.seeds) for arm in arguments.arms]


def problems(out: Path) -> Path:
    """The run's file beside its rows and its producer, in a folder of `out`."""
    write(out / "problems")
    for name in ("counting.toml", "counting.py"):
        shutil.copy(HERE / name, out / "problems" / name)
    return out / "problems" / "counting.toml"


if __name__ == "__main__":
    command(
        Comparison(
            usage=__doc__,
            options=options,
            jobs=jobs,
            file=problems,
            settings=lambda job, arguments: settings(job, arguments.seconds, arguments.overrides),
            columns=COLUMNS,
            rows=rows,
            report=tables,
            draw=draw,
        )
    )
