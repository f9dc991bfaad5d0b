"""A run goes on past tasks that were acknowledged without a record; `test_stream` ends the trainer at each call of its reaper."""

import asyncio
from pathlib import Path

import pytest

from streamrl.bus.server import NatsServer
from tests.support.world.nursery import Nursery
from tests.support.world.world import table_config, world

pytestmark = pytest.mark.nats


async def test_a_lockstep_run_goes_on_past_tasks_that_were_acknowledged_without_a_record(
    tmp_path: Path, own_server: NatsServer, children: Nursery
) -> None:
    config = table_config(tmp_path, run={"steps": 8}, tasks={"max_staleness": 0})
    async with world(config, own_server, children) as w:
        async with w.around("feeder"):
            trainer = asyncio.create_task(w.child("trainer"))
            async with w.swallowed():
                assert len(w.lost) == 2
            async with w.around("engine", "producer"), asyncio.timeout(60):
                assert await trainer == 0
        ends = {drop.task: drop.reason for entry in await w.ledger() for drop in entry.drops if drop.retires and drop.task in w.lost}
        assert ends == dict.fromkeys(w.lost, "lost")
        await w.check()
