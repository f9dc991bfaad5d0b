"""The publisher beside a trainer's thread that it holds back, and over transports that store bytes.

What it asks for, in which order, is in test_publisher_logic.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from streamrl.bus.memory import MemoryBus
from streamrl.config.registry import Role
from streamrl.config.tree import Config, EngineConfig, ModelConfig, TrainerConfig
from streamrl.core.batches import TrainBatch
from streamrl.engines.factory import make_engine
from streamrl.engines.protocol import GenerateRequest
from streamrl.errors import StreamFull, WeightSyncError
from streamrl.schemas.codec import decode
from streamrl.schemas.subjects import WEIGHTS, Subjects
from streamrl.schemas.tasks import Sampling
from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Manifest
from streamrl.trainers.factory import make_trainer
from streamrl.trainers.torch.snapshot import Published, SnapshotRing
from streamrl.weights.bus import BusTransport
from streamrl.weights.manifest import Content
from streamrl.weights.protocol import Shard
from streamrl.weights.publisher import Publisher
from streamrl.weights.shm import ShmTransport
from streamrl.weights.slices import OtherRanks, RankPublisher, Requests
from tests.support.digests import digest_of
from tests.support.errors import raises
from tests.support.models import started
from tests.support.scoring import score
from tests.support.wanted import slices


def shards(number: int) -> list[Shard]:
    data = np.full(32, number, np.float32)
    return [Shard(name="w", dtype="float32", global_shape=(32,), shape=(32,), data=data.view(np.uint8))]


class Gated(BusTransport):
    """A transport whose `publish` waits until the test opens it."""

    def __init__(self, bus: MemoryBus) -> None:
        super().__init__(bus.blobs, run="r", policy="policy")
        self.entered = asyncio.Event()
        self.open = asyncio.Event()

    async def publish(self, version: Version, shards: Iterator[Shard]) -> Manifest:
        self.entered.set()
        await self.open.wait()
        return await super().publish(version, shards)


def publisher(bus: MemoryBus, transport: Any, **options: Any) -> Publisher:
    return Publisher(bus, Subjects("r"), transport, policy="policy", loop=asyncio.get_running_loop(), **options)


def offer(to: Publisher, number: int, digest: str = "") -> None:
    to.offer(Version(0, number), digest or Content(shards(number)).digest, iter(shards(number)))


async def announced(bus: MemoryBus) -> list[Manifest]:
    state = await bus.state(WEIGHTS)
    return [decode((await bus.fetch(WEIGHTS, n)).body, Manifest) for n in range(state.first, state.last + 1)]


@pytest.fixture
async def held(memory_bus: MemoryBus) -> tuple[Gated, Publisher]:
    """A publisher that keeps every version, and the gate before its first."""
    gate = Gated(memory_bus)
    return gate, publisher(memory_bus, gate, keep=0)


async def test_keep_all_publishes_every_version_and_holds_the_trainer_back(memory_bus: MemoryBus, held: tuple[Gated, Publisher]) -> None:
    gate, one = held
    loop = asyncio.get_running_loop()
    returned: asyncio.Queue[int] = asyncio.Queue()

    def train() -> None:
        for number in range(8):
            offer(one, number)
            loop.call_soon_threadsafe(returned.put_nowait, number)

    training = asyncio.create_task(asyncio.to_thread(train))
    await gate.entered.wait()
    for number in range(5):  # one is being published, and four wait
        assert await returned.get() == number
    await asyncio.sleep(0.02)
    assert returned.empty()
    gate.open.set()
    await training
    await asyncio.to_thread(one.close)
    assert [manifest.version.number for manifest in await announced(memory_bus)] == list(range(8))


@pytest.mark.parametrize("end", ["error", "close"])
async def test_an_end_wakes_a_trainer_that_waits_for_room(memory_bus: MemoryBus, held: tuple[Gated, Publisher], end: str) -> None:
    gate, one = held
    for number in range(5):
        await asyncio.to_thread(offer, one, number, "bad" if end == "error" else "")
        await gate.entered.wait()
    training = asyncio.create_task(asyncio.to_thread(offer, one, 5))
    if end == "error":
        gate.open.set()
        with raises(WeightSyncError, version="0.0", expected="bad"):
            await training
        return
    closing = asyncio.create_task(asyncio.to_thread(one.close))
    with raises(WeightSyncError, version="0.5", closed=True):
        await training
    gate.open.set()
    await closing
    assert [manifest.version.number for manifest in await announced(memory_bus)] == list(range(5))


async def test_a_death_between_bytes_and_manifest_is_repeated_without_harm(memory_bus: MemoryBus, tmp_path: Path) -> None:
    dead, transport = (ShmTransport(run="r", policy="policy", directory=tmp_path) for _ in range(2))
    await dead.publish(Version(0, 1), iter(shards(1)))
    dead.close()
    one = publisher(memory_bus, transport, keep=1)
    await asyncio.to_thread(offer, one, 1)
    await asyncio.to_thread(one.close)
    (manifest,) = await announced(memory_bus)
    assert await transport.holds(manifest)
    transport.close()


async def test_a_full_bus_is_said_and_leaves_no_blobs(memory_bus: MemoryBus, monkeypatch: pytest.MonkeyPatch) -> None:
    put: Callable[..., Any] = memory_bus.blobs.put
    stored: list[str] = []

    async def with_room_for_two(name: str, data: bytes | memoryview) -> str:
        if len(stored) == 2:
            raise StreamFull("blobs: 0 bytes left")
        stored.append(name)
        return await put(name, data)

    monkeypatch.setattr(memory_bus.blobs, "put", with_room_for_two)
    one = publisher(memory_bus, BusTransport(memory_bus.blobs, run="r", policy="policy", part_bytes=50))
    await asyncio.to_thread(offer, one, 1)
    with raises(WeightSyncError, size_bytes=128) as caught:
        await asyncio.to_thread(one.close)
    assert "bus.blobs_bytes" in caught.value.hint and len(stored) == 2
    assert await memory_bus.blobs.names() == [] and await announced(memory_bus) == []


VOCAB = 64


def save_model(path: Path) -> Path:
    """Float32 weights and configuration: both sides are told another type."""
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCAB, **sizes, intermediate_size=64, tie_word_embeddings=True, eos_token_id=1))
    model.save_pretrained(path)
    return path


def batch(prompt: list[int], answer: list[int], logprobs: list[float]) -> TrainBatch:
    return TrainBatch.from_lists([prompt], [answer], rewards=[1.0], sampler_logprobs=[logprobs])


async def test_bfloat16_from_the_trainer_to_the_engine(memory_bus: MemoryBus, tmp_path: Path) -> None:
    model_dir = save_model(tmp_path)
    config = Config(model=ModelConfig(dtype="float32"), trainer=TrainerConfig(dtype="bfloat16", device="cpu"))
    trainer = make_trainer(config, model_dir)
    digest = trainer.step(batch([2, 3, 4], [5, 6], [-4.0, -4.0])).digest
    transport = BusTransport(memory_bus.blobs, run="r", policy="policy")
    manifest = await transport.publish(Version(0, 1), trainer.shards())
    assert manifest.digest == digest
    assert {spec.dtype for spec in manifest.tensors} == {"bfloat16"}
    engine = make_engine(EngineConfig(slots=2), model_dir, engine_id="e", dtype="bfloat16")
    async with started(engine):
        assert await engine.stage(manifest, transport.fetch(manifest, slices(manifest))) == digest
        assert (await engine.commit(manifest.version)).committed
        sampling = Sampling(max_new_tokens=12, ignore_eos=True)
        request = GenerateRequest(request_id="q", prompt_ids=(2, 3, 4), sampling=sampling, seeds=(7,))
        ids: list[int] = []
        logprobs: list[float] = []
        async for chunk in engine.generate(request):
            ids += chunk.token_ids
            logprobs += chunk.logprobs
    scores = score(trainer, batch([2, 3, 4], ids, logprobs), Role.POLICY)[3:]
    assert len(ids) == 12
    # Two implementations in a type of 8 bits of mantissa.
    assert np.abs(scores - np.array(logprobs)).max() < 0.1


CPU = torch.device("cpu")


def ring(tensor: torch.Tensor, shape: tuple[int, ...], offset: tuple[int, ...] = ()) -> SnapshotRing:
    """Waits for its buffer no longer than a version takes here by far."""
    return SnapshotRing([Published("w", tensor, tensor.dtype, shape, offset)], CPU, slots=1, holder_patience_s=20.0)


async def test_a_rank_offers_the_next_version_when_the_one_before_is_stored(tmp_path: Path) -> None:
    bus = MemoryBus("r")
    transport = ShmTransport(run="r", policy="policy", directory=tmp_path, rank=1)
    publisher = RankPublisher(bus.kv, "policy", {"shm": transport}, rank=1, loop=asyncio.get_running_loop())
    others = OtherRanks(1, lambda *_: None, 20.0)
    requests = Requests(bus.kv, "policy", others)
    own = ring(torch.ones(4, 3), (8, 3), (4, 0))
    for number in range(1, 4):
        await asyncio.to_thread(publisher.offer, others.word, Version(0, number), (), own.shards())
        await requests.ask(Version(0, number), "shm")
        assert len(await requests.contributions("shm")) == 1
    publisher.close()
    transport.close()


@pytest.mark.parametrize("keep", [0, 2])
async def test_a_trainer_offers_one_version_after_the_other(tmp_path: Path, keep: int) -> None:
    bus = MemoryBus("r")
    transport = ShmTransport(run="r", policy="policy", directory=tmp_path)
    publisher = Publisher(bus, Subjects("r"), transport, policy="policy", loop=asyncio.get_running_loop(), keep=keep)
    weights = torch.zeros(8, 3)
    own = ring(weights, (8, 3))
    for number in range(1, 6):
        weights += 1.0
        digest = digest_of([("w", weights)], "llama")
        await asyncio.to_thread(publisher.offer, Version(0, number), digest, own.shards())
    await asyncio.to_thread(publisher.close, 60.0)
    transport.close()
