"""The guarantee that a weight update pauses nobody, over everything real: publisher, shared memory, watcher, transformers model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from streamrl.bus.protocol import Bus
from streamrl.config.tree import Config, EngineConfig, ModelConfig, RunConfig
from streamrl.consumers.serving.weight_watcher import WeightWatcher
from streamrl.data.model import ensure_model
from streamrl.engines.batching.engine import BatchingEngine
from streamrl.engines.factory import make_engine
from streamrl.engines.protocol import GenerateRequest
from streamrl.schemas.subjects import Subjects
from streamrl.schemas.tasks import Sampling
from streamrl.schemas.versions import Version
from streamrl.weights.factory import free_weights, make_publisher, make_transports
from streamrl.weights.manifest import Content
from streamrl.weights.protocol import Shard

SUBJECTS = Subjects("r")
NUM_TOKENS = 1200
CONFIG = Config(
    run=RunConfig(name="r"),
    model=ModelConfig(hidden=32, layers=1, heads=2, kv_heads=1, intermediate=48, max_len=NUM_TOKENS + 50),
    engine=EngineConfig(slots=8),
)


def shards(model_dir: Path, number: int) -> list[Shard]:
    rng = np.random.default_rng(number)
    result = []
    for name, tensor in safetensors.numpy.load_file(model_dir / "model.safetensors").items():
        moved = np.ascontiguousarray(tensor + rng.normal(0, 0.05, tensor.shape).astype(tensor.dtype))
        data = moved.reshape(-1).view(np.uint8)
        result.append(Shard(name=name, dtype=str(tensor.dtype), global_shape=tensor.shape, shape=tensor.shape, data=data))
    return result


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[BatchingEngine]:
    model_dir = ensure_model(CONFIG, tmp_path / "model")
    made = make_engine(CONFIG.engine, model_dir, engine_id="engine-0", max_len=CONFIG.model.max_len)
    assert isinstance(made, BatchingEngine)
    await made.start()
    yield made
    await made.stop()


class Request:
    """One streamed request; `begun` is set with its first tokens."""

    def __init__(self, engine: BatchingEngine, name: str) -> None:
        self._engine = engine
        self._name = name
        self.begun = asyncio.Event()
        self.versions: list[int] = []
        self.num_logprobs = 0
        self.finish_reason: str | None = None

    async def run(self) -> None:
        sampling = Sampling(max_new_tokens=NUM_TOKENS, ignore_eos=True)
        request = GenerateRequest(request_id=self._name, prompt_ids=(1, 2, 3), sampling=sampling, seeds=(len(self._name),), stream=True)
        async for chunk in self._engine.generate(request):
            self.versions += [span.version.number for span in chunk.spans if span.version for _ in range(span.length)]
            self.num_logprobs += int(np.isfinite(chunk.logprobs).sum())
            self.finish_reason = chunk.finish_reason
            self.begun.set()


async def test_swaps_lie_inside_the_life_of_requests_that_finish_and_are_not_restarted(
    memory_bus: Bus, engine: BatchingEngine, tmp_path: Path
):
    transports = make_transports(CONFIG.weights, bus=memory_bus, run="r", policy="policy", run_dir=tmp_path)
    committed: asyncio.Queue[Version] = asyncio.Queue()
    watcher = WeightWatcher(memory_bus, SUBJECTS, engine, transports, policy="policy", engine="engine-0", committed=committed.put)
    watching = asyncio.create_task(watcher.run())
    loop = asyncio.get_running_loop()
    publisher = make_publisher(CONFIG.weights, bus=memory_bus, subjects=SUBJECTS, policy="policy", run_dir=tmp_path, loop=loop)

    async def update(number: int) -> None:
        content = shards(tmp_path / "model", number)
        await asyncio.to_thread(publisher.offer, Version(0, number), Content(content).digest, content)
        assert await asyncio.wait_for(committed.get(), 60) == Version(0, number)

    early, late = ([Request(engine, f"{when}-{index}") for index in range(3)] for when in ("early", "late"))
    try:
        async with asyncio.TaskGroup() as group:
            await update(1)
            for request in early:
                group.create_task(request.run())
            for request in early:
                await request.begun.wait()
            await update(2)
            for request in late:
                group.create_task(request.run())
            for request in late:
                await request.begun.wait()
            await update(3)
        await asyncio.to_thread(publisher.close)
        info = await engine.info()
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        free_weights(CONFIG.weights, "r", tmp_path)

    for request in (*early, *late):
        assert request.finish_reason == "length"
        assert len(request.versions) == request.num_logprobs == NUM_TOKENS
        assert request.versions == sorted(request.versions)
    assert {tuple(sorted(set(request.versions))) for request in early} == {(1, 2, 3)}
    assert {tuple(sorted(set(request.versions))) for request in late} == {(2, 3)}
    # Every token that was sampled was handed out once: no request began anew.
    assert info.tokens_total == 6 * NUM_TOKENS
    assert (info.swaps_total, info.running, info.waiting) == (3, 0, 0)
