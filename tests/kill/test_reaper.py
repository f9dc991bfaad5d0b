"""Tasks that were acknowledged without a record: the trainer beside its reaper is ended before and after each of its calls."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from streamrl.bus.server import NatsServer
from tests.support.world.fuse import Spot
from tests.support.world.nursery import Nursery
from tests.support.world.world import World, table_config, world

pytestmark = pytest.mark.nats

CALLS = ("state tasks", "fetch tasks", "get fences", "publish tombstones")
"""In their order; `get fences` is asked once more than the fence is taken."""
SPOTS = [Spot(name, when, 2 if name == "get fences" else 1) for name in CALLS for when in ("before", "after")]


async def swallow(w: World, count: int) -> list[int]:
    """Take tasks off the queue as a producer that stores nothing."""
    found: list[int] = []
    async with asyncio.timeout(30):
        while len(found) < count:
            for lease in await w.bus.claim("main", max=count - len(found), wait_s=1.0):
                await lease.done()
                found.append(lease.sequence - 1)
    return found


async def test_a_lockstep_run_goes_on_past_tasks_that_were_acknowledged_without_a_record(
    tmp_path: Path, own_server: NatsServer, children: Nursery
) -> None:
    config = table_config(tmp_path, run={"steps": 8}, tasks={"max_staleness": 0})
    async with world(config, own_server, children) as w:
        async with w.around("feeder"):
            trainer = asyncio.create_task(w.child("trainer"))
            swallowed = await swallow(w, 2)
            async with w.around("engine", "producer"), asyncio.timeout(60):
                assert await trainer == 0
        report = await w.audit()
        ends = {drop.task: drop.reason for entry in await w.ledger() for drop in entry.drops if drop.retires and drop.task in swallowed}
        assert ends == dict.fromkeys(swallowed, "lost")
        assert sorted(problem.partition(" is lost: ")[0] for problem in report.problems) == [f"task {task}" for task in sorted(swallowed)]
        replay = await w.replay()
        assert replay.ok, replay.lines


async def test_every_call(tmp_path: Path, own_server: NatsServer, children: Nursery) -> None:
    config = table_config(tmp_path, run={"steps": 12}, tasks={"max_staleness": 0})
    async with world(config, own_server, children) as w:
        async with w.around("feeder"):
            await w.kill("trainer", [Spot("put granted", "after")])
            swallowed = await swallow(w, 2)
            async with w.around("engine", "producer"):
                await w.kill("trainer", SPOTS)
                async with asyncio.timeout(60):
                    assert await w.child("trainer") == 0
        stones = [drop for entry in await w.ledger() for drop in entry.drops if drop.task in swallowed]
        assert sorted((drop.task, drop.reason) for drop in stones) == [(task, "lost") for task in sorted(swallowed)], "each of them once"
        problems = (await w.audit()).problems
        assert all(" is lost: nobody held it" in problem for problem in problems) and len(problems) == 2, problems
        replay = await w.replay()
        assert replay.ok, replay.lines
