"""What the comparisons have in common: many runs of `streamrl up` side by side, what their ledgers say as tables, and tables read again."""

from __future__ import annotations

import asyncio
import csv
import gzip
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

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
    """Run `streamrl up` on a file, all its processes on the CPU with one thread each; its exit code. `out/NAME.log` has what it printed."""
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
            return await process.wait()


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


def run_all(jobs: Sequence[Each], run: Callable[[Each, float], bool], *, parallel: int, deadline: float) -> list[str]:
    """Run all jobs, `parallel` at a time; the names of those that failed, or for which fewer than 10 of the `deadline` seconds were left.

    `run` takes a job and the seconds that are left for it, and says whether it went well.
    """
    end = time.monotonic() + deadline

    def one(job: Each) -> bool:
        left = end - time.monotonic()
        return left > 10 and run(job, left)

    with ThreadPoolExecutor(parallel) as pool:
        done = list(pool.map(one, jobs))
    return [job.name for job, good in zip(jobs, done, strict=True) if not good]
