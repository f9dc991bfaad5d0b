"""The trainer dies late in its life, wakes beside its successor, and with a stream that is full: its books stay in order."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from streamrl.bus.server import NatsServer
from tests.support.processes import stopped, until
from tests.support.world.fuse import Spot, around
from tests.support.world.nursery import Nursery
from tests.support.world.table import OTHERS, TRAINER_AGAIN, TRIMMING
from tests.support.world.world import table_config, vandals, world

pytestmark = pytest.mark.nats
FENCED = 3


async def test_one_that_wakes_beside_its_successor_is_refused_at_the_ledger(
    tmp_path: Path, own_server: NatsServer, children: Nursery
) -> None:
    """It is stopped with its step done and nothing of it stored; the other trains the same batch."""
    async with world(table_config(tmp_path, run={"steps": 12}), own_server, children) as w:
        async with w.around(*OTHERS):
            old = asyncio.create_task(w.child("trainer", Spot("publish ledger", count=4, stops=True)))
            await until(lambda: w.nursery.running and stopped(w.nursery.pid), within_s=60)
            async with w.around("trainer"):
                await w.trained(6)
                os.kill(w.nursery.pid, signal.SIGCONT)
                async with asyncio.timeout(60):
                    assert await old == FENCED
                await w.finished()
        report = await w.audit()
        assert report.problems == [] and report.counts["fences"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("stale", [pytest.param("mask", marks=pytest.mark.soak), "wait"])
async def test_later_calls_with_a_warm_up(tmp_path: Path, own_server: NatsServer, children: Nursery, stale: str) -> None:
    config = table_config(
        tmp_path,
        run={"steps": 30},
        tasks={"stale": stale, "max_staleness": 1},
        warmup={"max_steps": 6, "until": 1.0},
        weights={"transport": "shm"},
    )
    async with world(config, own_server, children) as w:
        async with vandals(w):
            await w.disturb(TRAINER_AGAIN)
            async with w.around(*OTHERS):
                await w.kill("trainer", around("put ends"))
                assert await w.child("trainer") == 0
        await w.check()
        sources = [entry.source for entry in await w.ledger()]
        warm = sources.count("warmup")
        assert warm >= 6 and set(sources[:warm]) == {"warmup"} and set(sources[warm:]) == {"main"}


async def test_a_full_stream_is_trimmed_only_below_what_a_restart_needs(tmp_path: Path, own_server: NatsServer, children: Nursery) -> None:
    config = table_config(tmp_path, run={"steps": 30}, trainer={"checkpoint_every": 1000}, bus={"samples_bytes": 300_000})
    async with world(config, own_server, children) as w:
        await w.disturb(TRIMMING)
        async with w.around(*OTHERS):
            assert await w.child("trainer") == 0
        assert (await w.bus.state("samples")).first > 60, "the run must have outgrown the stream several times"
        assert (await w.audit()).problems == []
