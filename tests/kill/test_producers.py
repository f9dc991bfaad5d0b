"""Producers and the feeder are ended at every call; every task still ends once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from streamrl.bus.server import NatsServer
from tests.kill.test_trainer import check
from tests.support.world.fuse import Spot
from tests.support.world.nursery import Nursery
from tests.support.world.world import World, table_config, world

pytestmark = pytest.mark.nats

PRODUCER = [
    Spot("claim", "after", 2),
    *(Spot(name, when, 2) for name in ("publish samples", "publish tombstones", "done") for when in ("before", "after")),
    Spot("publish samples", "after", 7),
]
FEEDER = [Spot("publish tasks", when, count) for when in ("before", "after") for count in (1, 4)]


async def finished(w: World) -> None:
    while (await w.bus.last(w.subjects.events("finished"))) is None:
        await asyncio.sleep(0.02)


async def test_every_call(tmp_path: Path, own_server: NatsServer, children: Nursery) -> None:
    config = table_config(tmp_path, run={"steps": 60}, bus={"ack_wait_s": 0.5})
    async with world(config, own_server, children) as w:
        async with w.around("engine", "trainer"):
            async with w.around("feeder"):
                await w.kill("producer", PRODUCER)
            async with w.around("producer"):
                await w.kill("feeder", FEEDER)
                assert (await w.audit(complete=False)).problems == []
            async with w.around("feeder", "producer"), asyncio.timeout(100):
                await finished(w)
        await check(w, 0)
