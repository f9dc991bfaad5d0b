"""What the comparisons have in common: many runs of `streamrl up` side by side, what their ledgers say as tables, and tables read again."""

from __future__ import annotations

import argparse
import asyncio
import csv
import gzip
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import numpy as np

from streamrl.cli.numbers import seconds
from streamrl.runtime.run_bus import open_bus
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.codec import decode
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.subjects import LEDGER, WARMUP_SOURCE, Subjects


class Job(Protocol):
    """One run."""

    @property
    def name(self) -> str:
        """Of the run and of its table."""
        ...


Each = TypeVar("Each", bound=Job)


async def execute(file: Path, name: str, settings: Iterable[str], out: Path, limit_s: float) -> int:
    """Run `streamrl up` on a file, all its processes on the CPU with one thread each, and keep what it prints in `out/NAME.log`.

    Its exit code, which is not 0 of a run that is ended at the limit.
    """
    words = [word for text in (f"run.dir={out / 'runs'}", *settings) for word in ("--set", text)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with (out / f"{name}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "streamrl", "up", str(file), "--plain", "--name", name, *words, stdout=log, stderr=log, env=environment
        )  # fmt: skip
        try:
            return await asyncio.wait_for(process.wait(), limit_s)
        except TimeoutError:
            process.terminate()
            return await process.wait() or 1  # it drains, and says that this went well


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


def keep_ledger(path: Path, entries: Iterable[LedgerEntry]) -> None:
    """Write entries as they are, a line of JSON each, compressed."""
    with gzip.open(path, "wb") as file:
        file.writelines(msgspec.json.encode(entry) + b"\n" for entry in entries)


def write_table(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)


def read_tables(paths: Iterable[Path]) -> list[dict[str, str]]:
    """The rows of all of them."""
    found: list[dict[str, str]] = []
    for path in sorted(paths):
        with path.open(newline="", encoding="utf-8") as file:
            found += csv.DictReader(file)
    return found


def mean_with_range(values: Iterable[float], form: str) -> str:
    """The mean of the finite ones, with the lowest and the highest where these differ by more than rounding."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return "-"
    low, high = format(min(known), form), format(max(known), form)
    return format(float(np.mean(known)), form) + (f" ({low}-{high})" if low != high else "")


@dataclass(frozen=True, kw_only=True)
class Comparison(Generic[Each]):
    """What a command compares, and how it looks at it."""

    usage: str | None
    options: Callable[[argparse.ArgumentParser], None]
    """Adds those that it has besides the common ones."""
    jobs: Callable[[argparse.Namespace], Sequence[Each]]
    """In the order in which they begin."""
    file: Callable[[Path], Path]
    """What `streamrl up` runs; given the folder of the results."""
    settings: Callable[[Each, argparse.Namespace], Sequence[str]]
    """What differs from that file."""
    columns: Sequence[str]
    rows: Callable[[Each, Sequence[LedgerEntry], RunDir], Iterable[Sequence[Any]]]
    """The table of a run, from the entries of its ledger and what else it has left."""
    keeps_ledgers: bool = True
    """Beside the tables."""
    report: Callable[[Sequence[dict[str, str]]], str]
    draw: Callable[[Sequence[dict[str, str]], Path], None]


async def run_job(comparison: Comparison[Each], job: Each, arguments: argparse.Namespace, out: Path, file: Path, limit_s: float) -> bool:
    """Run it and keep its table as `out/NAME.csv`; False when it failed."""
    code = await execute(file, job.name, comparison.settings(job, arguments), out, limit_s)
    directory = RunDir.find(job.name, base=out / "runs")
    entries = await ledger(directory)
    if code == 0:
        if comparison.keeps_ledgers:
            keep_ledger(out / f"{job.name}.ledger.jsonl.gz", entries)
        write_table(out / f"{job.name}.csv", comparison.columns, comparison.rows(job, entries, directory))
        shutil.rmtree(directory.path)
    print(f"{job.name}: {len(entries)} batches, exit code {code}", flush=True)
    return code == 0


def run_all(comparison: Comparison[Each], arguments: argparse.Namespace) -> list[str]:
    """Run all jobs that have no table yet; the names of those that failed, or for which fewer than 10 seconds were left."""
    out = Path(arguments.out).absolute()
    out.mkdir(parents=True, exist_ok=True)
    file, end = comparison.file(out), time.monotonic() + arguments.deadline

    def one(job: Each) -> bool:
        if (out / f"{job.name}.csv").exists():
            return True
        left = end - time.monotonic()
        return left > 10 and asyncio.run(run_job(comparison, job, arguments, out, file, left))

    jobs = comparison.jobs(arguments)
    with ThreadPoolExecutor(arguments.parallel) as pool:
        done = list(pool.map(one, jobs))
    return [job.name for job, good in zip(jobs, done, strict=True) if not good]


def command(comparison: Comparison[Each]) -> None:
    """The command line: `run` and `report`."""
    parser = argparse.ArgumentParser(description=comparison.usage, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    running = verbs.add_parser("run")
    running.add_argument("--out", required=True)
    running.add_argument("--parallel", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    running.add_argument("--seeds", type=int, default=3)
    comparison.options(running)
    running.add_argument("--deadline", type=seconds, default=86_400.0)
    running.add_argument("--set", dest="overrides", action="append", default=[])
    reporting = verbs.add_parser("report")
    reporting.add_argument("directory", type=Path)
    reporting.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    if arguments.verb == "run":
        if failed := run_all(comparison, arguments):
            sys.exit(f"{len(failed)} runs failed or had no time: {' '.join(failed)}")
        return
    found = read_tables(arguments.directory.glob("*.csv"))
    if not found:
        sys.exit(f"no tables in {arguments.directory}: run `{parser.prog} run --out {arguments.directory}` first")
    print(comparison.report(found), end="")
    if arguments.picture:
        comparison.draw(found, arguments.picture)
