"""Rewarders, and producers that ask them, are ended at every call, two of them share the work: no rollout is lost, none trained twice."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from streamrl.bus.server import NatsServer
from streamrl.schemas.subjects import GRADING
from tests.kill.test_producers import finished
from tests.kill.test_trainer import check
from tests.support.world.fuse import Spot
from tests.support.world.nursery import Nursery
from tests.support.world.world import table_config, world

pytestmark = pytest.mark.nats

REWARDER = [
    Spot("claim", "after", 1),
    *(Spot(name, when, 2) for name in ("publish rewards", "publish tombstones", "done") for when in ("before", "after")),
]
PRODUCER = [Spot(name, when, 2) for name in ("publish grading", "publish samples") for when in ("before", "after")]


@pytest.mark.parametrize("staleness", [0, pytest.param(2, marks=pytest.mark.slow)])
async def test_every_call(tmp_path: Path, own_server: NatsServer, children: Nursery, staleness: int) -> None:
    """Rewarders die while nobody else scores, so that the next one has to go on with what they left; then producers that ask them."""
    sections: dict[str, dict[str, object]] = {"reward": {"workers": 1}, "tasks": {"max_staleness": staleness}}
    config = table_config(tmp_path, run={"steps": 20}, bus={"ack_wait_s": 0.5}, **sections)
    async with world(config, own_server, children) as w:
        async with w.around("engine", "trainer", "feeder"):
            async with w.around("producer"):
                await w.kill("rewarder", REWARDER)
            async with w.around("rewarder"):
                await w.kill("producer", PRODUCER)
                assert (await w.audit(complete=False)).problems == []
            async with w.around("rewarder"), w.around("rewarder", "producer"), asyncio.timeout(100):
                await finished(w)
                while (await w.bus.state(GRADING)).messages:
                    await asyncio.sleep(0.05)
        await check(w, 0)


async def test_one_that_stands_still_is_overtaken_and_goes_on(tmp_path: Path, own_server: NatsServer, children: Nursery) -> None:
    """SIGSTOP with requests in its hands: they come to another one, and what it still publishes afterwards changes nothing."""
    config = table_config(tmp_path, run={"steps": 30}, bus={"ack_wait_s": 0.5}, reward={"workers": 1})
    async with world(config, own_server, children) as w:
        async with w.around("engine", "trainer", "feeder", "producer"):
            child = asyncio.create_task(w.child("rewarder"))
            async with asyncio.timeout(60):
                while await w.num_entries() < 5:
                    await asyncio.sleep(0.01)
                os.kill(w.nursery.pid, signal.SIGSTOP)
                try:
                    async with w.around("rewarder"):
                        while await w.num_entries() < 15:
                            await asyncio.sleep(0.01)
                finally:
                    os.kill(w.nursery.pid, signal.SIGCONT)
                await finished(w)
                while (await w.bus.state(GRADING)).messages:
                    await asyncio.sleep(0.05)
            os.kill(w.nursery.pid, signal.SIGTERM)
            assert await child == 0
        await check(w, 0)
