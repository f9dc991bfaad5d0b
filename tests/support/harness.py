"""Runs a whole loop inside the test process: the product's own services on one event loop, any bus."""

import asyncio
import importlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from msgspec.structs import replace

from streamrl.bus.protocol import Bus
from streamrl.config.tree import Config
from streamrl.runtime.kinds import MAINS
from streamrl.runtime.rundir import RunDir
from streamrl.runtime.worker import Worker
from streamrl.schemas.codec import decode
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.subjects import LEDGER, Subjects
from tests.support.memory import freed_after_test

DRAIN_S = 60.0
"""After that a service is cancelled, so that a test whose trainer fails says so and does not hang."""


def make_run(tmp_path: Path, config: Config) -> tuple[RunDir, Config]:
    """A prepared run directory for `config` (renamed to be unique per directory)."""
    run = RunDir(tmp_path / config.run.name)
    run.create()
    config = replace(config, run=replace(config.run, dir=str(tmp_path)))
    run.write_config(config)
    freed_after_test(config, run)
    return run, config


@asynccontextmanager
async def services(config: Config, run: RunDir, bus: Bus, kinds: Sequence[str]) -> AsyncIterator[dict[str, Worker]]:
    """Start the services `kinds`; leaving drains them all and raises what one of them raised."""
    workers = {kind: Worker(config=config, run_dir=run, bus=bus, kind=kind, index=0) for kind in kinds}
    mains = {kind: getattr(importlib.import_module(MAINS[kind].split(":")[0]), MAINS[kind].split(":")[1]) for kind in kinds}
    tasks = {kind: asyncio.create_task(mains[kind](workers[kind]), name=kind) for kind in kinds}
    try:
        yield workers
    finally:
        for worker in workers.values():
            worker.draining.set()
        stuck = (await asyncio.wait(tasks.values(), timeout=DRAIN_S))[1] if tasks else set[asyncio.Task[None]]()
        for task in stuck:
            task.cancel()
        done = await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert not stuck, f"did not drain within {DRAIN_S:g} s: {sorted(task.get_name() for task in stuck)}"
    for result in done:
        if isinstance(result, BaseException):
            raise result


async def run_to_end(config: Config, run: RunDir, bus: Bus, *, timeout_s: float = 120.0) -> None:
    """Feeder, producer, engine and trainer until the trainer says the run is finished."""
    async with services(config, run, bus, ["engine", "producer", "feeder"]):
        trainer = Worker(config=config, run_dir=run, bus=bus, kind="trainer", index=0)
        module, name = MAINS["trainer"].split(":")
        async with asyncio.timeout(timeout_s):
            await getattr(importlib.import_module(module), name)(trainer)


async def read_ledger(bus: Bus, run: str, trainer: str = "main") -> list[LedgerEntry]:
    subject = Subjects(run).ledger(trainer)
    newest = await bus.last(subject)
    entries: list[LedgerEntry] = []
    if newest is None:
        return entries
    async for message in bus.read(LEDGER, after=(await bus.state(LEDGER)).first - 1, subject=subject):
        entries.append(decode(message.body, LedgerEntry))
        if message.sequence >= newest.sequence:
            break
    return entries
