"""A sample stream that is far too small for its run: it stalls producers, loses nothing, and goes on by itself."""

import asyncio
from pathlib import Path

import pytest

from streamrl.bus.protocol import Bus
from streamrl.bus.server import NatsServer
from streamrl.producers.episode import Episode, Segment, samples_of
from streamrl.producers.publishing import Publisher
from streamrl.schemas.codec import decode
from streamrl.schemas.samples import VersionSpan
from streamrl.schemas.subjects import SAMPLES
from streamrl.schemas.tasks import RolloutTask
from streamrl.schemas.versions import Version
from tests.support.world.fuse import BLOWN, Spot
from tests.support.world.nursery import Nursery
from tests.support.world.world import World, kept, table_config, world

pytestmark = pytest.mark.nats

NO_SPREAD_AT_FIRST = "def reward(task, episode):\n    return 0.0 if task.index < 100 else float(len(episode.completion) % 3)\n"


async def test_groups_that_are_dropped_cannot_fill_the_stream_for_good(tmp_path: Path, own_server: NatsServer, children: Nursery) -> None:
    """No batch closes while the first 100 groups are dropped, so no step could move the position: waiting must."""
    config = table_config(tmp_path, run={"steps": 2}, trainer={"checkpoint_every": 1000}, bus={"samples_bytes": 75_000})
    (tmp_path / "reward.py").write_text(NO_SPREAD_AT_FIRST)
    async with world(config, own_server, children) as w, asyncio.timeout(60):
        async with w.around("engine", "producer", "feeder"):
            assert await w.child("trainer") == 0
        assert (await w.bus.state(SAMPLES)).first > 1, "the stream must have been full"
        ledger = await w.ledger()
        assert len(ledger) == 2 and sum(drop.reason == "zero_variance" for drop in ledger[0].drops) >= 95
        assert (await w.audit()).problems == []


async def test_a_group_that_waits_for_its_rest_does_not_pin_the_stream(tmp_path: Path, own_server: NatsServer, children: Nursery) -> None:
    """Its first part is carried in checkpoints, over a kill too, while the stream is trimmed above it; then its rest still fits."""
    config = table_config(
        tmp_path, run={"steps": 24}, tasks={"stale": "mask"}, trainer={"checkpoint_every": 1000}, bus={"samples_bytes": 100_000}
    )
    async with world(config, own_server, children) as w, asyncio.timeout(100), w.around("engine", "feeder"):
        trainer = asyncio.create_task(w.child("trainer", Spot("trim", "after", 2)))
        [lease] = await w.bus.claim("main", max=1, wait_s=20)
        task = decode(lease.body, RolloutTask)
        async with kept(lease):
            first = await publish(w.bus, w, task, 0)
            async with w.around("producer"):
                assert await trainer == BLOWN
                assert (await w.bus.state(SAMPLES)).first > first, "the stream must have been trimmed above the waiting part"
                trainer = asyncio.create_task(w.child("trainer"))
                for rollout in range(1, task.num_rollouts):
                    await publish(w.bus, w, task, rollout)
                await lease.done()
                assert await trainer == 0
        ends = [drop.reason for entry in await w.ledger() for drop in entry.drops if drop.task == task.index]
        trained = [entry.version for entry in await w.ledger() for group in entry.used if group.task == task.index]
        assert len(trained) + ("stale" in ends) == 1, f"expected one end of task {task.index}, got {trained} and {ends}"
        assert (await w.audit()).problems == []


async def publish(bus: Bus, w: World, task: RolloutTask, rollout: int) -> int:
    """Store one rollout of a task, sampled by version 0, as a message of its own; returns where."""
    tokens = (4, 5, 6)
    episode = Episode(
        segments=(Segment(task.prompt_ids), Segment(tokens, (-0.5,) * 3, (VersionSpan(3, Version(0, 0)),))),
        finish_reason="length",
        rollout=rollout,
        reward=float(rollout),
        sampling=task.sampling,
    )
    await Publisher(bus, w.subjects).task(task, samples_of(task, [episode], producer="by-hand"), [])
    return (await bus.state(SAMPLES)).last
