"""Share among the benchmarks' tests a machine that never was, a raw file of known numbers, and a loop that runs in the test's process."""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from benchmarks.loop import contender
from benchmarks.loop.plain import Trained
from benchmarks.loop.sampler import Sampler
from benchmarks.loop.ways import LoopSpec, Way, quickstart
from benchmarks.machine import Machine
from benchmarks.raw import Fact, Header, Raw, Round
from streamrl.config.load import dump
from streamrl.config.tree import Config

MACHINE = Machine(processor="a processor", cores=2, python="3.11", packages={"torch": "2"}, date="2026-11-21", load=0.5)


def raw_of(benchmark: str, spec: msgspec.Struct, rounds: Sequence[Round], facts: Sequence[Fact] = ()) -> Raw:
    """The raw file of a benchmark that has measured these rounds."""
    header = Header(benchmark=benchmark, command=f"streamrl bench {benchmark}", machine=MACHINE, spec=msgspec.to_builtins(spec))
    return Raw(header=header, rounds=list(rounds), facts=list(facts))


def small_quickstart(spec: LoopSpec, directory: Path, *, name: str, model: str = "") -> Config:
    """Stand in for `benchmarks.loop.ways.quickstart` with batches of 64 samples."""
    config = quickstart(spec, directory, name=name, model=model)
    return replace(config, tasks=replace(config.tasks, batch_tasks=8))


def contend_here(way: Way, config: Config, *, page: bool = False) -> tuple[list[Trained], Sampler]:
    """Stand in for `benchmarks.loop.run.contend` in this process; the stream runs over the bus in memory."""
    assert not page
    path = Path(config.run.dir) / f"{config.run.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dump(config), encoding="utf-8")
    with Sampler(os.getpid()) as sampler:
        if way == Way.QUEUES:
            return asyncio.run(contender.queues(config)), sampler
        if way == Way.PIPES:
            return asyncio.run(contender.pipes(config, path)), sampler
        return asyncio.run(contender.memory(config)), sampler
