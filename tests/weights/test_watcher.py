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
from streamrl.engines.batching.delays import TokenDelay
from streamrl.engines.batching.engine import BatchingEngine
from streamrl.engines.protocol import Chunk, GenerateRequest
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

SUBJECTS = Subjects("r")
VOCAB, POSITIONS, EOS = 5, 3, 4


def table(number: int) -> list[Shard]:
    """Logits under which every token is almost surely `number`: what was drawn tells which weights drew it."""
    logits = np.zeros((POSITIONS, VOCAB, VOCAB), np.float32)
    logits[:, :, number] = 50.0
    return [Shard(name="logits", dtype="float32", global_shape=logits.shape, shape=logits.shape, data=logits.reshape(-1).view(np.uint8))]


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
        transports: dict[str, WeightTransport] = {"shm": self.shm, "bus": self.blobs}
        return WeightWatcher(
            self.bus,
            SUBJECTS,
            self.engine,
            transports,
            policy="policy",
            engine="engine-0",
            metrics=self._metrics,
            event=self._event,
            committed=self.committed.put,
            backoff_s=0.01,
        )

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

    async def generated(self, request: GenerateRequest) -> list[int]:
        return [token async for chunk in self.engine.generate(request) for token in chunk.token_ids]

    async def first_token(self) -> int:
        return (await self.generated(request(1)))[0]


def request(num_tokens: int, name: str = "q", *, stream: bool = False) -> GenerateRequest:
    sampling = Sampling(max_new_tokens=num_tokens, ignore_eos=True)
    return GenerateRequest(request_id=name, prompt_ids=(0,), sampling=sampling, seeds=(7,), stream=stream)


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
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "table.json").write_bytes(msgspec.json.encode({"vocab": VOCAB, "max_position": POSITIONS, "eos": EOS}))
    return tmp_path


@pytest.fixture
async def table_engine(model_dir: Path) -> AsyncIterator[TableEngine]:
    delay = TokenDelay(mean_s=0.004, sigma=0.0)
    engine = TableEngine(model_dir, EngineConfig(kind="table", slots=4), engine_id="engine-0", policy="policy", max_len=1000, delay=delay)
    await engine.start()
    yield engine
    await engine.stop()


@pytest.fixture(params=["memory", pytest.param("nats", marks=pytest.mark.nats)])
def bus(request: pytest.FixtureRequest) -> Bus:
    return request.getfixturevalue(f"{request.param}_bus")


@pytest.fixture
def run(bus: Bus, table_engine: TableEngine, tmp_path: Path):
    made = Run(bus, tmp_path / "weights", table_engine)
    yield made
    made.shm.close()


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


async def test_a_late_engine_takes_only_the_newest(run):
    for number in range(4):
        await run.publish(number)
    async with watched(run.watcher()):
        assert await run.committed.get() == Version(0, 3)
        await run.publish(1, epoch=1)
        assert await run.committed.get() == Version(1, 1)
    assert [detail["version"] for detail in run.taken] == ["0.3", "1.1"]
    assert run.failed.empty()


async def test_an_older_version_is_never_taken(run):
    async with watched(run.watcher()):
        await run.publish(3)
        assert await run.committed.get() == Version(0, 3)
        await run.publish(2)
        await run.publish(4)
        assert await run.committed.get() == Version(0, 4)
    assert [detail["version"] for detail in run.taken] == ["0.3", "0.4"]


async def test_a_vanished_version_is_left_for_a_newer_one(run):
    await run.publish(1)
    async with watched(run.watcher()):
        assert await run.committed.get() == Version(0, 1)
        gone = await run.shm.publish(Version(0, 2), iter(table(2)))
        await run.shm.retire(Version(0, 3))
        await run.announce(gone)
        failure = await run.failed.get()
        assert (failure["version"], failure["serving"]) == ("0.2", "0.1") and "cannot be reached" in failure["error"]
        assert await run.first_token() == 1
        await run.publish(3)
        assert await run.committed.get() == Version(0, 3)
        assert await run.first_token() == 3


async def test_lost_bytes_are_taken_once_they_are_announced_again(run):
    gone = await run.shm.publish(Version(0, 2), iter(table(2)))
    await run.shm.retire(Version(0, 3))
    await run.announce(gone)
    async with watched(run.watcher()):
        await run.failed.get()
        await run.publish(2)
        assert await run.committed.get() == Version(0, 2)


async def test_an_older_version_does_not_take_the_place_of_the_newest_that_is_tried_again(run):
    gone = await run.shm.publish(Version(0, 3), iter(table(3)))
    await run.shm.retire(Version(0, 4))
    await run.announce(gone)
    async with watched(run.watcher()):
        await run.failed.get()
        await run.publish(2)
        while not run.failed.empty():
            run.failed.get_nowait()
        assert (await asyncio.wait_for(run.failed.get(), 30))["version"] == "0.3"
        await run.publish(3)
        assert await run.committed.get() == Version(0, 3)
    assert [detail["version"] for detail in run.taken] == ["0.3"]


async def test_wrong_bytes_are_said_and_not_served(run):
    await run.publish(1)
    watcher = run.watcher()
    async with watched(watcher):
        assert await run.committed.get() == Version(0, 1)
        other = await run.shm.publish(Version(0, 2), iter(table(2)))
        await run.announce(msgspec.structs.replace(other, digest="0123456789abcdef"))
        error = (await run.failed.get())["error"]
        assert "0123456789abcdef" in error and error in watcher.failure
        info = await run.engine.info()
        assert state_of(info, watcher.failure) == f"{WEIGHTS_FAIL} than 0.1: {watcher.failure}"
        assert error in state_of(msgspec.structs.replace(info, serving=None), watcher.failure)
        assert await run.first_token() == 1
        assert (await run.engine.info()).serving == Version(0, 1)
        await run.publish(3)
        assert await run.committed.get() == Version(0, 3)
        assert watcher.failure == ""


async def test_another_model_is_said_and_not_served(run):
    shards = [Shard(name="other", dtype="float32", global_shape=(1,), shape=(1,), data=np.zeros(4, np.uint8))]
    async with watched(run.watcher()):
        await run.announce(await run.shm.publish(Version(0, 1), iter(shards)))
        assert "other" in (await run.failed.get())["error"]
        await run.publish(2)
        assert await run.committed.get() == Version(0, 2)


async def test_a_message_that_is_no_manifest_is_skipped(run):
    async with watched(run.watcher()):
        await run.bus.publish(SUBJECTS.weights("policy"), b"\xc1 no MessagePack")
        assert "expected a Manifest" in (await run.failed.get())["error"]
        manifest = await run.shm.publish(Version(0, 9), iter(table(3)))
        await run.announce(msgspec.structs.replace(manifest, run="another"))
        assert "one of another/policy" in (await run.failed.get())["error"]
        await run.publish(2)
        assert await run.committed.get() == Version(0, 2)


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


async def swap_during(run: Run, num_tokens: int) -> list[Chunk]:
    """Stream one request; when its first tokens are there, publish the next version; return all its chunks."""
    chunks: list[Chunk] = []
    await run.publish(1)
    assert await run.committed.get() == Version(0, 1)
    async for chunk in run.engine.generate(request(num_tokens, stream=True)):
        chunks.append(chunk)
        if len(chunks) == 1:
            await run.publish(2)
    assert await run.committed.get() == Version(0, 2)
    return chunks


async def test_a_swap_lies_inside_the_life_of_a_request_that_is_not_restarted(run):
    async with watched(run.watcher()):
        chunks = await swap_during(run, 250)
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    versions = [span.version.number for chunk in chunks for span in chunk.spans if span.version is not None for _ in range(span.length)]
    assert len(tokens) == 250 and chunks[-1].finish_reason == "length"
    flip = versions.index(2)
    assert 0 < flip < 250
    assert versions == [1] * flip + [2] * (250 - flip)
    # Each token is what its version's table makes certain: the stamp is the truth, and nothing was drawn twice.
    assert tokens == versions
