"""The nats-server is killed under load and started again on its store; nobody else is restarted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from streamrl.bus.server import NatsServer
from tests.support.world.nursery import Nursery
from tests.support.world.world import table_config, world

pytestmark = pytest.mark.nats


async def test_kill_9_of_the_server(tmp_path: Path, own_server: NatsServer, children: Nursery) -> None:
    async with world(table_config(tmp_path, run={"steps": 120}), own_server, children) as w:
        async with w.around("engine", "producer", "feeder"):
            trainer = asyncio.create_task(w.child("trainer"))
            for target in (5, 20, 35, 50, 65):
                async with asyncio.timeout(60):
                    while await w.num_entries() < target:
                        assert not trainer.done(), "the trainer must outlive its server"
                        await asyncio.sleep(0.01)
                own_server.kill()
                own_server.start()
            async with asyncio.timeout(100):
                assert await trainer == 0
        assert await w.num_entries() == 120
        assert (await w.audit()).problems == []
        replay = await w.replay()
        assert replay.ok, replay.lines
