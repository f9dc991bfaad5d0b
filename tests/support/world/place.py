"""A run whose bus is in this process, so that its files and streams may be damaged while its trainer is down."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from streamrl.bus.memory import MemoryBus
from streamrl.config.tree import Config
from streamrl.consumers.training import worker as trainer_service
from streamrl.consumers.training.checkpoints import read_latest
from streamrl.data.model import ensure_model
from streamrl.models.directories import list_checkpoints
from streamrl.runtime.rundir import RunDir
from streamrl.runtime.worker import Worker
from streamrl.schemas.codec import decode
from streamrl.schemas.control import Latest
from streamrl.schemas.events import Event
from tests.support.harness import make_run, read_ledger, services
from tests.support.world.world import table_config


@dataclass
class Place:
    """A run whose trainer starts and ends while everybody else is up; `bus.lose` does what a power cut does."""

    config: Config
    run: RunDir
    bus: MemoryBus

    async def train(self, until: int | None = None) -> None:
        """A trainer to the run's end, or until the ledger has so many entries; it is drained then."""
        worker = Worker(config=self.config, run_dir=self.run, bus=self.bus, kind="trainer", index=0)
        trainer = asyncio.create_task(trainer_service.main(worker))
        async with asyncio.timeout(60):
            while until is not None and not trainer.done() and len(await read_ledger(self.bus, self.config.run.name)) < until:
                await asyncio.sleep(0.01)
            if until is not None:
                worker.draining.set()
            await trainer

    @property
    def kept(self) -> list[Path]:
        return [path for _, path in reversed(list_checkpoints(self.run.checkpoints, "main-"))]

    async def said(self) -> list[str]:
        found, last = [], await self.bus.last(f"{self.config.run.name}.events.notice")
        if last is not None:
            async for message in self.bus.read("events", after=0, subject=last.subject):
                found.append(decode(message.body, Event).detail["text"])
                if message.sequence == last.sequence:
                    break
        return found

    async def latest(self) -> Latest:
        found = await read_latest(self.bus, "main")
        assert found is not None
        return found


@asynccontextmanager
async def place(
    tmp_path: Path, *, kinds: Sequence[str] = ("engine", "producer", "feeder"), **sections: dict[str, object]
) -> AsyncGenerator[Place]:
    """A run of which these are up: everything but its trainer, or a part of that."""
    given: dict[str, dict[str, object]] = {
        "run": {"steps": 24},
        "trainer": {"checkpoint_every": 4, "keep_checkpoints": 3},
        "reward": {"kind": "random"},  # which needs no process, as a function would
    }
    run, config = make_run(tmp_path, table_config(tmp_path, **{**given, **sections}))
    ensure_model(config, run.model_dir)
    bus = MemoryBus(config.run.name, config.bus)
    try:
        async with services(config, run, bus, kinds):
            yield Place(config, run, bus)
    finally:
        await bus.close()
