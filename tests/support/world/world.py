"""A run with the `table` backend on a nats-server of its own: services in the test's process, the one to be killed in a child.

A `World` is started, disturbed by a table of rows (who is ended, at which calls, beside whom), audited and replayed. Whole runs, which
`streamrl up` starts, are disturbed in `tests.support.world.disturbed`.
"""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from streamrl.bus import connect
from streamrl.bus.protocol import Bus, Lease
from streamrl.bus.reading import read_key
from streamrl.bus.server import NatsServer
from streamrl.config import tree
from streamrl.data.model import ensure_model
from streamrl.history.replay import ReplayReport, verify
from streamrl.launch.prepare import prepare
from streamrl.runtime.run_record import write_or_check
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.codec import decode
from streamrl.schemas.control import Grant
from streamrl.schemas.events import Event
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.subjects import EVENTS, KEY_GRANTED, TASKS, Subjects
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


def table_config(tmp_path: Path, **sections: dict[str, object]) -> tree.Config:
    """A small run that goes through everything; `sections` replace fields, as in `run={"steps": 3}`."""
    problems = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(6) for b in range(5)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    (tmp_path / "reward.py").write_text(REWARD)
    config = tree.Config(
        run=tree.RunConfig(name="killed", dir=str(tmp_path), steps=20, seed=5, numerics="bitwise"),
        model=tree.ModelConfig(max_len=24),
        data=tree.DataConfig(train=str(tmp_path / "train.jsonl")),
        tasks=tree.TasksConfig(batch_tasks=3, num_rollouts=3, max_staleness=2, max_deliveries=50),
        sampling=Sampling(max_new_tokens=5),
        producer=tree.ProducerConfig(concurrency=6),
        reward=tree.RewardConfig(kind=f"{tmp_path / 'reward.py'}:reward", children=1),
        engine=tree.EngineConfig(kind="table", slots=12),
        trainer=tree.TrainerConfig(backend="table", checkpoint_every=2, keep_checkpoints=2),
        weights=tree.WeightsConfig(transport="bus"),
        bus=tree.BusConfig(ack_wait_s=1.0, patience_s=30.0, samples_bytes=100_000_000, blobs_bytes=100_000_000),
    )
    return replace(config, **{name: replace(getattr(config, name), **values) for name, values in sections.items()})


class Row(NamedTuple):
    """One row of the table by which a world is disturbed: who is ended, at which calls, and who is up meanwhile."""

    part: str
    spots: Sequence[Spot]
    beside: tuple[str, ...]


@dataclass
class World:
    """A prepared run. `bus` is the test's own connection; the services in this process share it."""

    config: tree.Config
    run: RunDir
    server: NatsServer
    bus: Bus
    nursery: Nursery
    lost: list[int] = field(default_factory=list)
    """Tasks that nobody has any more: the audit must find each, and nothing else."""

    @property
    def subjects(self) -> Subjects:
        return Subjects(self.config.run.name)

    async def child(self, kind: str, spot: Spot | None = None, mutant: str = "") -> int:
        return await self.nursery.run(Request(kind, str(self.run.path), spot, mutant))

    async def disturb(self, *rows: Row) -> None:
        """Row after row; the audit must find nothing at any time, whoever has just been killed."""
        for row in rows:
            async with self.around(*row.beside):
                await self.kill(row.part, row.spots)
            unknown = [one for one in (await self.audit(complete=False)).problems if lost_task(one) not in self.lost]
            assert unknown == [], f"after the {row.part}'s deaths"

    async def kill(self, kind: str, spots: Sequence[Spot], mutant: str = "") -> None:
        """Run the service again and again, each time until its fuse blows."""
        for spot in spots:
            async with asyncio.timeout(60):
                code = await self.child(kind, spot, mutant)
            assert code == BLOWN, f"expected the {kind} to end {spot}, it ended with {code}; see children.log"

    async def drain(self, kind: str, versions: int, mutant: str = "") -> None:
        """Run the service in a child until the ledger has so many entries, then have it drain."""
        child = asyncio.create_task(self.child(kind, None, mutant))
        await self.trained(versions, child.done)
        os.kill(self.nursery.pid, signal.SIGTERM)
        assert await child == 0

    async def trained(self, versions: int, ended: Callable[[], bool] = lambda: False) -> None:
        """Wait for so many entries of the ledger, or until `ended`."""
        async with asyncio.timeout(60):
            while await self.num_entries() < versions and not ended():
                await asyncio.sleep(0.01)

    async def finished(self) -> None:
        async with asyncio.timeout(100):
            while (await self.bus.last(self.subjects.events("finished"))) is None:
                await asyncio.sleep(0.02)

    async def told(self, kind: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        if (last := await self.bus.last(self.subjects.events(kind))) is not None:
            async for message in self.bus.read(EVENTS, after=0, subject=last.subject):
                found.append(decode(message.body, Event).detail)
                if message.sequence >= last.sequence:
                    break
        return found

    @contextlib.asynccontextmanager
    async def swallowed(self) -> AsyncIterator[None]:
        """All tasks of the queue but the first are taken off it, as by a producer that stores nothing; the first is held meanwhile."""
        leases: list[Lease] = []
        async with asyncio.timeout(60):
            while (grant := await read_key(self.bus.kv, KEY_GRANTED, Grant)) is None or grant.granted > (await self.bus.state(TASKS)).last:
                await asyncio.sleep(0.01)
            while (left := (await self.bus.state(TASKS)).messages - len(leases)) > 0:
                leases += await self.bus.claim("main", max=left, wait_s=0.2)
        first, *rest = sorted(leases, key=lambda lease: lease.sequence)
        for lease in rest:
            await lease.done()
            self.lost.append(lease.sequence - 1)
        async with kept(first):
            yield
        await first.retry()

    async def check(self, *, complete: bool = True) -> None:
        """The audit finds nothing but the tasks that are known to be lost, and a replay gives the ledger's digests."""
        report = await self.audit(complete=complete)
        assert sorted(map(lost_task, report.problems)) == sorted(self.lost), report.problems
        assert report.counts["dropped"] > 5
        replay = await self.replay()
        assert replay.ok and replay.same_fingerprint and replay.versions == report.counts["versions"], replay.lines

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
        return services(self.config, self.run, self.bus, kinds)


@contextlib.asynccontextmanager
async def kept(lease: Lease) -> AsyncIterator[None]:
    """Keep a claimed task while the block runs."""

    async def keep() -> None:
        while True:
            await lease.keep()
            await asyncio.sleep(0.2)

    keeper = asyncio.create_task(keep())
    try:
        yield
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)


def lost_task(problem: str) -> int:
    """The task that the audit says is lost; -1: it says something else."""
    return int(problem.split()[1]) if problem.startswith("task ") and " is lost: " in problem else -1


@contextlib.asynccontextmanager
async def world(config: tree.Config, server: NatsServer, nursery: Nursery) -> AsyncIterator[World]:
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


@contextlib.asynccontextmanager
async def vandals(w: World, every: int = 6) -> AsyncIterator[None]:
    """Somebody who writes onto the sample stream what does not belong there."""
    subject, stranger = w.subjects.samples("main"), rows(10**9)

    async def vandalise() -> None:
        seen = 0
        while True:
            await asyncio.sleep(0.02)
            end = (await w.bus.state("samples")).last
            if end < seen + every:
                continue
            old = await w.bus.fetch("samples", max(1, end - 7))
            await w.bus.publish(subject, b"no Arrow data")
            await w.bus.publish(subject, stranger)
            seen = (await w.bus.publish(old.subject, bytes(old.body), headers=dict(old.headers))).sequence

    task = asyncio.create_task(vandalise())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
