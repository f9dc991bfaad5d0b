"""The trainer is ended before and after every line of its loop; the run goes on, and its books are in order."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from streamrl.bus.memory import MemoryBus
from streamrl.bus.server import NatsServer
from streamrl.config.tree import Config
from streamrl.data.model import ensure_model
from tests.support.harness import make_run, read_ledger, run_to_end
from tests.support.world.fuse import Spot
from tests.support.world.nursery import Nursery
from tests.support.world.world import World, table_config, vandalise, world

pytestmark = pytest.mark.nats

LINES = (
    "put fences",
    "read ledger",
    "get latest",
    "load",
    "state",
    "get positions",
    "put granted",
    "shards",
    "offer",
    "put blob",
    "publish weights",
    "fetch",
    "read samples",
    "publish dead",
    "step",
    "publish ledger",
    "save",
    "put latest",
    "put positions",
    "delete blob",
)
"""Every call of the loop at which it may end, in the order of a resumed process; only that has something to load and to fetch."""
EVERY = [Spot(name, when) for name in LINES for when in ("before", "after")] + [Spot("saved", "after")]
AGAIN = [
    Spot(name, when, count)
    for name, count in (("step", 3), ("publish ledger", 3), ("put granted", 5), ("offer", 3), ("put latest", 2), ("put positions", 2))
    for when in ("before", "after")
]


@contextlib.asynccontextmanager
async def vandals(w: World) -> AsyncIterator[None]:
    """Somebody who writes onto the sample stream what does not belong there."""
    task = asyncio.create_task(vandalise(w.bus, w.config.run.name))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def check(w: World, kills: int) -> None:
    """The audit finds nothing, every kill has been followed by a new fence, and a replay gives the ledger's digests."""
    report = await w.audit()
    assert report.problems == []
    assert report.counts["dropped"] > 5
    fence = await w.bus.kv.get("fences/main")
    assert fence is not None and fence.value is not None and int(fence.value) >= kills - 1
    replay = await w.replay()
    assert replay.ok and replay.same_fingerprint, replay.lines
    assert replay.versions == report.counts["versions"]


async def test_every_line(tmp_path: Path, own_server: NatsServer, children: Nursery) -> None:
    async with world(table_config(tmp_path, run={"steps": 60}), own_server, children) as w:
        async with w.around("engine", "producer", "feeder"), vandals(w):
            await w.kill("trainer", [Spot("put latest", "after", 2)])
            for part in range(0, len(EVERY), 8):
                await w.kill("trainer", EVERY[part : part + 8])
                assert (await w.audit(complete=False)).problems == [], "the audit must hold at any time"
            assert await w.child("trainer") == 0
        await check(w, len(EVERY))


@pytest.mark.parametrize("stale", ["mask", "wait"])
async def test_later_calls_with_a_warm_up(tmp_path: Path, own_server: NatsServer, children: Nursery, stale: str) -> None:
    config = table_config(
        tmp_path,
        run={"steps": 30},
        tasks={"stale": stale, "max_staleness": 1},
        warmup={"max_steps": 6, "until": 1.0},
        weights={"transport": "shm"},
    )
    async with world(config, own_server, children) as w:
        async with w.around("engine", "producer", "feeder"), vandals(w):
            await w.kill("trainer", AGAIN)
            assert await w.child("trainer") == 0
        await check(w, len(AGAIN))
        sources = [entry.source for entry in await w.ledger()]
        warm = sources.count("warmup")
        assert warm >= 6 and set(sources[:warm]) == {"warmup"} and set(sources[warm:]) == {"main"}


def lockstep(tmp_path: Path) -> Config:
    return table_config(tmp_path, run={"steps": 25}, tasks={"max_staleness": 0}, engine={"deterministic": True})


async def test_a_killed_lockstep_run_equals_an_undisturbed_one(tmp_path: Path, own_server: NatsServer, children: Nursery) -> None:
    run, config = make_run(tmp_path / "calm", lockstep(tmp_path))
    ensure_model(config, run.model_dir)
    bus = MemoryBus(config.run.name, config.bus)
    await run_to_end(config, run, bus)
    calm = await read_ledger(bus, config.run.name)
    await bus.close()
    async with world(lockstep(tmp_path), own_server, children) as w:
        async with w.around("engine", "producer", "feeder"), vandals(w):
            await w.kill("trainer", AGAIN)
            assert await w.child("trainer") == 0
        await check(w, len(AGAIN))
        killed = await w.ledger()
    assert len(calm) == config.run.steps and len({entry.digest for entry in calm}) == len(calm)
    assert [(entry.version, entry.digest) for entry in killed] == [(entry.version, entry.digest) for entry in calm]
    assert [[group.task for group in entry.used] for entry in killed] == [[group.task for group in entry.used] for entry in calm]


async def test_a_full_stream_is_trimmed_only_below_what_a_restart_needs(tmp_path: Path, own_server: NatsServer, children: Nursery) -> None:
    config = table_config(tmp_path, run={"steps": 40}, trainer={"checkpoint_every": 1000}, bus={"samples_bytes": 500_000})
    trims = [Spot(name, when) for name in ("save", "put latest", "put positions", "trim") for when in ("before", "after")]
    async with world(config, own_server, children) as w:
        async with w.around("engine", "producer", "feeder"):
            await w.kill("trainer", trims)
            assert (await w.audit(complete=False)).problems == []
            assert await w.child("trainer") == 0
        assert (await w.bus.state("samples")).first > 100, "the run must have outgrown the stream several times"
        assert (await w.audit()).problems == []
