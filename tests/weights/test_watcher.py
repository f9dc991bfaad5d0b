"""The engine's side, on real engines: which version it takes, what it survives, and that generation never stops for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from streamrl.bus.protocol import Bus
from streamrl.config.tree import EngineConfig
from streamrl.consumers.serving.engine_worker import state_of
from streamrl.consumers.serving.weight_watcher import WeightWatcher
from streamrl.engines.batching.engine import BatchingEngine
from streamrl.engines.protocol import GenerateRequest
from streamrl.engines.table.engine import TableEngine
from streamrl.errors import BusUnavailable
from streamrl.runtime.worker import WEIGHTS_FAIL
from streamrl.schemas.codec import encode
from streamrl.schemas.subjects import WEIGHTS, Subjects
from streamrl.schemas.tasks import Sampling
from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Manifest
from streamrl.telemetry.names import metric
from streamrl.weights.bus import BusTransport
from streamrl.weights.manifest import Content
from streamrl.weights.protocol import Shard, WeightTransport
from streamrl.weights.publisher import Publisher
from streamrl.weights.shm import ShmTransport
from tests.support.models import started
from tests.weights.tables import table, write_table

SUBJECTS = Subjects("r")


class Run:
    """A trainer's and an engine's side of one run, and what the watcher told the world."""

    def __init__(self, bus: Bus, directory: Path, engine: BatchingEngine) -> None:
        self.bus = bus
        self.engine = engine
        self.shm = ShmTransport(run="r", policy="policy", directory=directory)
        self.blobs = BusTransport(bus.blobs, run="r", policy="policy", part_bytes=100)
        self.committed: asyncio.Queue[Version] = asyncio.Queue()
        self.taken: list[dict[str, Any]] = []
        self.failed: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.reported: list[str] = []

    def watcher(self) -> WeightWatcher:
        told: Any = {"metrics": self._metrics, "event": self._event, "committed": self.committed.put}
        served: Any = {"policy": "policy", "engine": "engine-0", "backoff_s": 0.01}
        return WeightWatcher(self.bus, SUBJECTS, self.engine, {"shm": self.shm, "bus": self.blobs}, **served, **told)

    async def _metrics(self, values: dict[str, float]) -> None:
        self.reported += values

    async def _event(self, kind: str, detail: dict[str, Any]) -> None:
        assert kind == "weights"
        if "error" in detail:
            await self.failed.put(detail)
        else:
            self.taken.append(detail)

    async def announce(self, manifest: Manifest) -> None:
        await self.bus.publish(SUBJECTS.weights("policy"), encode(manifest))

    async def publish(self, number: int, *, epoch: int = 0, via: WeightTransport | None = None) -> Manifest:
        manifest = await (via or self.shm).publish(Version(epoch, number), iter(table(number)))
        await self.announce(manifest)
        return manifest

    async def first_token(self) -> int:
        sampling = Sampling(max_new_tokens=1, ignore_eos=True)
        request = GenerateRequest(request_id="q", prompt_ids=(0,), sampling=sampling, seeds=(7,))
        chunk = await anext(aiter(self.engine.generate(request)))
        return chunk.token_ids[0]


@asynccontextmanager
async def watched(watcher: WeightWatcher) -> AsyncIterator[None]:
    """The watcher runs; if it ends, so does the test, with what it raised."""
    test = asyncio.current_task()
    assert test is not None
    task = asyncio.create_task(watcher.run())
    task.add_done_callback(lambda ended: None if ended.cancelled() else test.cancel())
    try:
        yield
    finally:
        if task.done():
            task.result()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def table_engine(tmp_path: Path) -> AsyncIterator[TableEngine]:
    engine = TableEngine(write_table(tmp_path), EngineConfig(kind="table", slots=4), engine_id="engine-0", policy="policy", max_len=1000)
    async with started(engine):
        yield engine


@pytest.fixture
def run(request: pytest.FixtureRequest, table_engine: TableEngine, tmp_path: Path):
    made = Run(request.getfixturevalue(getattr(request, "param", "memory_bus")), tmp_path / "weights", table_engine)
    yield made
    made.shm.close()


@pytest.mark.parametrize("run", ["memory_bus", pytest.param("nats_bus", marks=pytest.mark.nats)], indirect=True)
async def test_from_the_trainer_to_the_next_token(run):
    """The whole way: publisher, manifest on the bus, watcher, engine; over both transports."""
    loop = asyncio.get_running_loop()
    async with watched(run.watcher()):
        for number, transport in ((1, run.shm), (2, run.blobs)):
            publisher = Publisher(run.bus, SUBJECTS, transport, policy="policy", loop=loop)
            shards = table(number)
            await asyncio.to_thread(publisher.offer, Version(0, number), Content(shards).digest, shards)
            assert await run.committed.get() == Version(0, number)
            await asyncio.to_thread(publisher.close)
            assert await run.first_token() == number
    info = await run.engine.info()
    assert (info.serving, info.swaps_total) == (Version(0, 2), 2)
    assert [(detail["version"], detail["transport"]) for detail in run.taken] == [("0.1", "shm"), ("0.2", "bus")]
    assert all(metric(name).name == name for name in run.reported)


async def test_the_greatest_version_is_taken_whichever_was_announced_last(run):
    """One of a trainer that was replaced has come late."""
    for epoch, number in ((0, 2), (1, 1), (0, 3)):
        await run.publish(number, epoch=epoch)
    async with watched(run.watcher()):
        assert await run.committed.get() == Version(1, 1)
        await run.publish(4)
        await run.publish(2, epoch=1)
        assert await run.committed.get() == Version(1, 2)
    assert [detail["version"] for detail in run.taken] == ["1.1", "1.2"]


@pytest.mark.parametrize("bad", ["wrong bytes", "another model", "no manifest", "another run"])
async def test_what_is_no_version_of_this_run_is_said_and_not_served(run, bad):
    other = Shard(name="other", dtype="float32", global_shape=(1,), shape=(1,), data=np.zeros(4, np.uint8))
    await run.publish(1)
    watcher = run.watcher()
    async with watched(watcher):
        assert await run.committed.get() == Version(0, 1)
        manifest = await run.shm.publish(Version(0, 2), iter([other] if bad == "another model" else table(2)))
        found, said = {
            "wrong bytes": (msgspec.structs.replace(manifest, digest="0123456789abcdef"), "0123456789abcdef"),
            "another model": (manifest, "other"),
            "no manifest": (None, "expected a Manifest"),
            "another run": (msgspec.structs.replace(manifest, run="another"), "one of another/policy"),
        }[bad]
        await run.bus.publish(SUBJECTS.weights("policy"), encode(found) if found else b"\xc1 no MessagePack")
        error = (await run.failed.get())["error"]
        assert said in error and error in watcher.failure
        info = await run.engine.info()
        assert state_of(info, watcher.failure) == f"{WEIGHTS_FAIL} than 0.1: {watcher.failure}"
        assert error in state_of(msgspec.structs.replace(info, serving=None), watcher.failure)
        assert await run.first_token() == 1
        assert (await run.engine.info()).serving == Version(0, 1)
        await run.publish(3)
        assert await run.committed.get() == Version(0, 3)
        assert watcher.failure == ""


async def vanished(run: Run, number: int) -> None:
    """Announce a version whose bytes are gone."""
    gone = await run.shm.publish(Version(0, number), iter(table(number)))
    await run.shm.retire(Version(0, number + 1))
    await run.announce(gone)


async def test_a_vanished_version_is_left_for_a_newer_one(run):
    await run.publish(1)
    async with watched(run.watcher()):
        assert await run.committed.get() == Version(0, 1)
        await vanished(run, 2)
        failure = await run.failed.get()
        assert (failure["version"], failure["serving"]) == ("0.2", "0.1") and "cannot be reached" in failure["error"]
        assert await run.first_token() == 1
        await run.publish(3)
        assert await run.committed.get() == Version(0, 3)
        assert await run.first_token() == 3


async def test_lost_bytes_are_taken_once_they_are_announced_again_and_no_older_ones_in_their_place(run):
    await vanished(run, 3)
    async with watched(run.watcher()):
        await run.failed.get()
        await run.publish(2)
        while not run.failed.empty():
            run.failed.get_nowait()
        assert (await asyncio.wait_for(run.failed.get(), 30))["version"] == "0.3"
        await run.publish(3)
        assert await run.committed.get() == Version(0, 3)
    assert [detail["version"] for detail in run.taken] == ["0.3"]


async def test_an_engine_on_another_host_takes_the_mirror(run):
    far = msgspec.structs.replace(await run.shm.publish(Version(0, 1), iter(table(1))), host="elsewhere")
    mirror = await run.blobs.publish(Version(0, 1), iter(table(1)))
    async with watched(run.watcher()):
        await run.announce(far)
        assert "cannot be reached" in (await run.failed.get())["error"]
        await run.announce(msgspec.structs.replace(far, mirrors={"bus": mirror.parts}))
        assert await run.committed.get() == Version(0, 1)
    assert [detail["transport"] for detail in run.taken] == ["bus"]


async def test_a_trimmed_stream_does_not_stop_the_watcher(run):
    await run.publish(1)
    await run.bus.trim(WEIGHTS, through=(await run.bus.state(WEIGHTS)).last)
    async with watched(run.watcher()):
        await run.publish(2)
        assert await run.committed.get() == Version(0, 2)


async def test_the_watcher_outlives_a_bus_that_stays_away(run, monkeypatch):
    real = run.bus.last
    refusals = iter([True, True, False])

    async def last(subject: str):
        if next(refusals, False):
            raise BusUnavailable("no server for 60 s")
        return await real(subject)

    monkeypatch.setattr(run.bus, "last", last)
    await run.publish(1)
    async with watched(run.watcher()):
        assert await run.committed.get() == Version(0, 1)
