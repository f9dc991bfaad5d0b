"""A rewarder stands still with requests in its hands and is overtaken: what it still publishes afterwards changes nothing."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from streamrl.bus.server import NatsServer
from streamrl.schemas.subjects import GRADING
from tests.support.processes import stopped, until
from tests.support.world.fuse import Spot
from tests.support.world.nursery import Nursery
from tests.support.world.world import table_config, world

pytestmark = pytest.mark.nats


async def test_one_that_stands_still_is_overtaken_and_goes_on(tmp_path: Path, own_server: NatsServer, children: Nursery) -> None:
    config = table_config(tmp_path, run={"steps": 14}, bus={"ack_wait_s": 0.5}, reward={"workers": 1})
    async with world(config, own_server, children) as w:
        async with w.around("engine", "trainer", "feeder", "producer"):
            child = asyncio.create_task(w.child("rewarder", Spot("publish rewards", count=5, stops=True)))
            await until(lambda: w.nursery.running and stopped(w.nursery.pid), within_s=60)
            async with w.around("rewarder"):
                await w.trained(await w.num_entries() + 3)
            os.kill(w.nursery.pid, signal.SIGCONT)
            await w.finished()
            async with asyncio.timeout(60):
                while (await w.bus.state(GRADING)).messages:
                    await asyncio.sleep(0.05)
            os.kill(w.nursery.pid, signal.SIGTERM)
            assert await child == 0
        await w.check()
