"""One long run in which every part is ended at every call, and the nats-server too: it goes on, and its books are in order."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from streamrl.bus.server import NatsServer
from streamrl.schemas.subjects import TASKS
from tests.support.world.nursery import Nursery
from tests.support.world.table import FEEDER, OTHERS, PRODUCER, REAPER, TRAINER
from tests.support.world.world import World, table_config, vandals, world

pytestmark = pytest.mark.nats

STEPS = 10_000
"""More than are trained: how many that is depends on how busy the machine is."""


async def kill_server(w: World, times: int) -> None:
    """The server is killed under load and started again on its store; nobody else is restarted."""
    trainer = asyncio.create_task(w.child("trainer"))
    for _ in range(times):
        await w.trained(await w.num_entries() + 4, trainer.done)
        assert not trainer.done(), "the trainer must outlive its server"
        w.server.kill()
        w.server.start()
    await w.trained(await w.num_entries() + 4, trainer.done)
    os.kill(w.nursery.pid, signal.SIGTERM)
    async with asyncio.timeout(100):
        assert await trainer == 0


async def test_every_call_of_every_part(tmp_path: Path, own_server: NatsServer, children: Nursery) -> None:
    async with world(table_config(tmp_path, run={"steps": STEPS}, bus={"ack_wait_s": 1.0}), own_server, children) as w:
        async with vandals(w):
            await w.disturb(TRAINER)
        async with w.around("feeder"):
            async with w.around("trainer"), asyncio.timeout(60):  # it trains what is there; nobody works for new batches
                while (await w.bus.state(TASKS)).messages < 4:
                    await asyncio.sleep(0.01)
            async with w.swallowed():
                assert len(w.lost) > 1
                await w.disturb(REAPER)
        await w.disturb(PRODUCER, FEEDER)
        async with w.around(*OTHERS):
            await kill_server(w, 3)
        stones = [drop for entry in await w.ledger() for drop in entry.drops if drop.task in w.lost]
        assert sorted((drop.task, drop.reason) for drop in stones) == [(task, "lost") for task in sorted(w.lost)], "each of them once"
        await w.check(complete=False)
        fence = await w.bus.kv.get("fences/main")
        assert fence is not None and fence.value is not None and int(fence.value) >= len(TRAINER.spots), "nearly every life took one"
