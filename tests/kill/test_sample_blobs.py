"""Producers, feeder and trainer are ended around the storing of a blob, of its sample, and its removal: nothing is trained without it."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from streamrl.bus.reading import stretch
from streamrl.bus.server import NatsServer
from streamrl.config.tree import Config
from streamrl.consumers.training.reader import open_message
from streamrl.consumers.training.sample_blobs import blobs_named
from streamrl.schemas.subjects import HEADER_TASK, SAMPLES
from tests.support.images import write_rows
from tests.support.mixtures import write_mixture
from tests.support.world.fuse import Spot, around
from tests.support.world.nursery import TORCH, nursery
from tests.support.world.table import OTHERS
from tests.support.world.world import World, table_config, world

pytestmark = [pytest.mark.nats, pytest.mark.slow, pytest.mark.timeout(300)]

STORING = around("put sample blob", counts=(1, 5))
PUBLISHING = [*around("publish samples", counts=(2,)), Spot("done", "before", 2)]
ISSUING = Spot("publish tasks", "before", 2)
TRAINER = [
    *around("get sample blob"),
    Spot("get sample blob", "after", 12),
    *around("delete sample blob", "trim"),
    Spot("delete sample blob", "after", 7),
    Spot("trim", "after", 2),
]
STEPS = 24


def mixture_config(tmp_path: Path, **bus: object) -> Config:
    write_mixture(tmp_path / "mixture")
    return table_config(
        tmp_path,
        run={"steps": STEPS},
        model={"path": str(tmp_path / "mixture")},
        engine={"kind": "local"},
        trainer={"backend": "torch", "routing_replay": True},
        bus=bus,
    )


def picture_config(tmp_path: Path, **bus: object) -> Config:
    return table_config(tmp_path, run={"steps": STEPS}, bus=bus, **write_rows(tmp_path))


def support_config(tmp_path: Path, **bus: object) -> Config:
    return table_config(
        tmp_path, run={"steps": STEPS}, sampling={"max_new_tokens": 6, "top_p": 0.9}, trainer={"support_replay": True}, bus=bus
    )


CONFIGS = {"experts": mixture_config, "support": support_config, "images": picture_config}
ROOM = {"experts": 60_000, "support": 120_000, "images": 35_000}
"""Bytes: for the blobs of a few batches, or of five windows of tasks."""
kinds = pytest.mark.parametrize("kind", [pytest.param("experts", marks=pytest.mark.soak), "support", "images"])


async def named(w: World) -> tuple[set[str], set[str]]:
    """Names that samples on the stream have, and tasks that have messages there."""
    names: set[str] = set()
    tasks: set[str] = set()
    state = await w.bus.state(SAMPLES)
    async for message in stretch(w.bus, SAMPLES, first=state.first, last=state.last):
        samples = open_message(message).samples
        tasks.add(message.headers.get(HEADER_TASK, ""))
        names |= blobs_named(samples) if samples is not None else set()
    return names, tasks


async def check(w: World, *, whole: bool) -> None:
    assert (await w.audit()).problems == []
    ledger = await w.ledger()
    drops = [drop.reason for entry in ledger for drop in entry.drops]
    assert "blob_missing" not in drops and len(ledger) == STEPS
    routed, supported = w.config.trainer.routing_replay, w.config.trainer.support_replay
    assert not routed or all(0.5 < entry.metrics["train/routing_replayed"] < 1 for entry in ledger)
    assert not supported or all(entry.metrics["train/support_replayed"] == 1 for entry in ledger)
    names, tasks = await named(w)
    there = set(await w.bus.sample_blobs.names())
    # All that a sample names is there; what is there besides is of a task of which something is on the stream, and goes with that.
    assert names and names <= there
    if routed or supported:
        # When the run ended, the producer may have stored blobs of tasks that it had in hand, and not yet their samples.
        in_hand = w.config.producer.concurrency if supported else 0
        assert len({name.partition("/")[0] for name in there} - tasks) <= in_hand
        assert (there - names != set()) or not whole, "a producer that died before it could name a blob leaves it"
    if whole:
        replay = await w.replay()
        assert replay.ok and replay.versions == STEPS, replay.lines


@contextlib.asynccontextmanager
async def run_of(kind: str, tmp_path: Path, server: NatsServer, **bus: object) -> AsyncIterator[World]:
    modules = TORCH if kind == "experts" else ()
    async with nursery(tmp_path / "children.log", *modules) as children, world(CONFIGS[kind](tmp_path, **bus), server, children) as w:
        yield w


@kinds
async def test_who_stores_them_is_ended_around_each(kind: str, tmp_path: Path, own_server: NatsServer) -> None:
    """Experts and candidates: the producer. Images: the feeder, and the producer that names them."""
    async with run_of(kind, tmp_path, own_server, ack_wait_s=0.5) as w:
        async with w.around("engine", "trainer"):
            if kind == "images":
                async with w.around("producer"):
                    await w.kill("feeder", [*STORING, ISSUING])
            async with w.around("feeder"):
                await w.kill("producer", PUBLISHING[1:2] if kind == "images" else [*STORING, *PUBLISHING])
                async with w.around("producer"):
                    await w.finished()
        await check(w, whole=True)


@kinds
async def test_the_trainer_is_ended_around_each_removal(kind: str, tmp_path: Path, own_server: NatsServer) -> None:
    """With room for a few batches' blobs: the stream is trimmed for their sake, though it has room itself."""
    async with run_of(kind, tmp_path, own_server, sample_blobs_bytes=ROOM[kind]) as w:
        async with w.around(*OTHERS):
            await w.kill("trainer", TRAINER)
            assert await w.child("trainer") == 0
        assert (await w.bus.state(SAMPLES)).first > 1
        await check(w, whole=False)
