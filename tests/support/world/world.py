"""A run with the `table` backend on a nats-server of its own: services in the test's process, the one to be killed in a child."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from streamrl.bus import connect
from streamrl.bus.protocol import Bus
from streamrl.bus.server import NatsServer
from streamrl.config.tree import (
    BusConfig,
    Config,
    DataConfig,
    EngineConfig,
    ModelConfig,
    ProducerConfig,
    RewardConfig,
    RunConfig,
    TasksConfig,
    TrainerConfig,
    WeightsConfig,
)
from streamrl.data.model import ensure_model
from streamrl.history.replay import ReplayReport, verify
from streamrl.launch.prepare import prepare
from streamrl.runtime.run_record import write_or_check
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.subjects import Subjects
from streamrl.schemas.tasks import Sampling
from tests.support.audit.audit import Report, audit
from tests.support.audit.forge import rows
from tests.support.harness import read_ledger, services
from tests.support.memory import freed_after_test
from tests.support.world.fuse import BLOWN, Spot
from tests.support.world.nursery import Nursery
from tests.support.world.process import Request

# Some groups have no spread, one task in nine fails and ends as a tombstone, one in five takes `slow_s` longer.
REWARD = """
import asyncio

async def reward(task, episode, *, slow_s=0.0):
    if task.index % 5 == 0:
        await asyncio.sleep(slow_s)
    if task.index % 9 == 4:
        raise ValueError("no reward for this one")
    return float(len(episode.completion) % 3)
"""


def table_config(tmp_path: Path, **sections: dict[str, object]) -> Config:
    """A small run that goes through everything; `sections` replace fields, as in `run={"steps": 3}`."""
    problems = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(6) for b in range(5)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    (tmp_path / "reward.py").write_text(REWARD)
    config = Config(
        run=RunConfig(name="killed", dir=str(tmp_path), steps=20, seed=5, numerics="bitwise"),
        model=ModelConfig(max_len=24),
        data=DataConfig(train=str(tmp_path / "train.jsonl")),
        tasks=TasksConfig(batch_tasks=3, num_rollouts=3, max_staleness=2, max_deliveries=50),
        sampling=Sampling(max_new_tokens=5),
        producer=ProducerConfig(concurrency=6),
        reward=RewardConfig(kind=f"{tmp_path / 'reward.py'}:reward", children=1),
        engine=EngineConfig(kind="table", slots=12),
        trainer=TrainerConfig(backend="table", checkpoint_every=2, keep_checkpoints=2),
        weights=WeightsConfig(transport="bus"),
        bus=BusConfig(ack_wait_s=1.0, patience_s=30.0, samples_bytes=100_000_000, blobs_bytes=100_000_000),
    )
    return replace(config, **{name: replace(getattr(config, name), **values) for name, values in sections.items()})


@dataclass
class World:
    """A prepared run. `bus` is the test's own connection; the services in this process share it."""

    config: Config
    run: RunDir
    server: NatsServer
    bus: Bus
    nursery: Nursery

    @property
    def subjects(self) -> Subjects:
        return Subjects(self.config.run.name)

    async def child(self, kind: str, spot: Spot | None = None, mutant: str = "") -> int:
        """Run a service in a child to its end; returns the exit code."""
        return await self.nursery.run(Request(kind, str(self.run.path), spot, mutant))

    async def kill(self, kind: str, spots: Sequence[Spot], mutant: str = "") -> None:
        """Run the service again and again, each time until its fuse blows."""
        for spot in spots:
            async with asyncio.timeout(60):
                code = await self.child(kind, spot, mutant)
            assert code == BLOWN, f"expected the {kind} to end {spot}, it ended with {code}; see children.log"

    async def drain(self, kind: str, versions: int, mutant: str = "") -> None:
        """Run the service in a child until the ledger has so many entries, then have it drain."""
        child = asyncio.create_task(self.child(kind, None, mutant))
        async with asyncio.timeout(60):
            while await self.num_entries() < versions and not child.done():
                await asyncio.sleep(0.01)
        os.kill(self.nursery.pid, signal.SIGTERM)
        assert await child == 0

    async def num_entries(self) -> int:
        newest = await self.bus.last(self.subjects.ledger("main"))
        return 0 if newest is None else newest.sequence

    async def ledger(self) -> list[LedgerEntry]:
        return await read_ledger(self.bus, self.config.run.name)

    async def audit(self, *, complete: bool = True) -> Report:
        address = self.server.address
        return await audit(address.url, address.user, address.password, self.config.run.name, complete=complete, directory=self.run.path)

    async def replay(self) -> ReplayReport:
        return await verify(self.config, self.bus, ensure_model(self.config, self.run.model_dir))

    def around(self, *kinds: str) -> contextlib.AbstractAsyncContextManager[object]:
        """These services in this process."""
        return services(self.config, self.run, self.bus, kinds)


@contextlib.asynccontextmanager
async def world(config: Config, server: NatsServer, nursery: Nursery) -> AsyncIterator[World]:
    """Prepare a run on the server; its streams are removed at the end."""
    run = RunDir(Path(config.run.dir) / config.run.name)
    run.create()
    run.write_config(config)
    server.address.save(run.bus_path)
    freed_after_test(config, run)
    bus = await connect(server.address, config.run.name, config.bus)
    try:
        await write_or_check(bus, await prepare(config, run))
        yield World(config, run, server, bus, nursery)
        await bus.remove()
    finally:
        await bus.close()


async def vandalise(bus: Bus, run: str, every_s: float = 0.05) -> None:
    """Put onto the sample stream what nobody should: broken bodies, samples of tasks that nobody was given, repeats of what is there."""
    subjects = Subjects(run)
    last = 0
    while True:
        await asyncio.sleep(every_s)
        await bus.publish(subjects.samples("main"), b"no Arrow data")
        await bus.publish(subjects.samples("main"), rows(10**9))
        end = (await bus.state("samples")).last
        if end > last:
            last = end
            old = await bus.fetch("samples", max(1, end - 7))
            await bus.publish(old.subject, bytes(old.body), headers=dict(old.headers))
