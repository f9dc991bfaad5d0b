"""Surround a producer in a test with a run's bus, tasks, an engine behind HTTP, and user code."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from msgspec import UNSET
from msgspec.structs import replace

from streamrl.bus.memory import MemoryBus
from streamrl.bus.protocol import Bus, Message
from streamrl.config.tree import BusConfig, Config, DataConfig, EngineConfig, ModelConfig, RunConfig, TrainerConfig, WarmupConfig
from streamrl.data.tokenizer import Tokenizer
from streamrl.engines.protocol import Engine
from streamrl.engines.server import serve
from streamrl.engines.table.engine import TableEngine
from streamrl.runtime.rundir import RunDir
from streamrl.runtime.worker import Worker
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.control import EnginePresence
from streamrl.schemas.decoding import decode_samples
from streamrl.schemas.samples import Sample, Tombstone
from streamrl.schemas.subjects import SAMPLES, TASKS, Subjects, kind_of
from streamrl.schemas.tasks import RolloutTask, Sampling
from streamrl.schemas.versions import Version
from tests.support.policies import make_model, script, start_engine

ACK_WAIT_S = 1.0
in_memory = pytest.mark.parametrize("make_bus", ["memory"], indirect=True)
"""Marks a test with `loop` or `bus` that needs no server: what user code does is the same on both."""
on_server = pytest.mark.parametrize("make_bus", [pytest.param("nats", marks=pytest.mark.nats)], indirect=True)
"""Marks a test of the server's own leases."""


class Loop:
    """A run's bus with the parts around the producer: tasks in, samples out, an engine behind HTTP."""

    def __init__(self, bus: Bus, config: Config, run_dir: RunDir, tokenizer: Tokenizer) -> None:
        self.bus = bus
        self.config = config
        self.run_dir = run_dir
        self.tokenizer = tokenizer
        self.subjects = Subjects(config.run.name)
        self.num_tasks = 0

    def worker(self, index: int = 0, *, bus: Bus | None = None, config: Config | None = None, kind: str = "producer") -> Worker:
        return Worker(config=config or self.config, run_dir=self.run_dir, bus=bus or self.bus, kind=kind, index=index)

    async def issue(
        self,
        count: int,
        *,
        source: str = "main",
        num_rollouts: int = 2,
        prompt: str = "<|user|>3+4<|end|><|assistant|>",
        greedy: bool = False,
    ) -> None:
        """Publish tasks as the feeder would; `greedy`: the last of their rollouts is."""
        for _ in range(count):
            task = RolloutTask(
                run=self.config.run.name,
                index=self.num_tasks,
                source=source,
                prompt_ids=tuple(self.tokenizer.encode(prompt)),
                prompt="3+4",
                label="7",
                num_rollouts=num_rollouts,
                sampling=Sampling(max_new_tokens=8),
                seed=self.num_tasks,
                greedy_baseline=True if greedy else UNSET,
            )
            await self.bus.publish(self.subjects.tasks(source), encode(task), expect_last=self.num_tasks)
            self.num_tasks += 1

    async def records(self, count: int, *, timeout_s: float = 60.0) -> list[Message]:
        """The first `count` messages of the sample stream, waiting for them."""
        found: list[Message] = []
        async with asyncio.timeout(timeout_s):
            async for message in self.bus.read(SAMPLES, after=0):
                found.append(message)
                if len(found) == count:
                    break
        return found

    async def queue_is_empty(self, *, timeout_s: float = 60.0) -> None:
        async with asyncio.timeout(timeout_s):
            while (await self.bus.state(TASKS)).messages:
                await asyncio.sleep(0.02)

    @contextlib.asynccontextmanager
    async def engine(self, logits: np.ndarray | None = None, *, name: str = "table-0", **options: object) -> AsyncIterator[TableEngine]:
        """A table engine behind HTTP, announced on the bus until the end."""
        logits = script(self.tokenizer, {(0, "<|assistant|>"): "7"}) if logits is None else logits
        engine = await start_engine(self.run_dir.model_dir, logits, engine_id=name, **options)  # type: ignore[arg-type]
        try:
            async with self.announced(engine, name):
                yield engine
        finally:
            await engine.stop()

    @contextlib.asynccontextmanager
    async def announced(self, engine: Engine, name: str) -> AsyncIterator[None]:
        """An engine behind HTTP, announced on the bus until the end."""
        server = await serve(engine, "127.0.0.1", 0)
        presence = EnginePresence(engine=name, address=server.address, serving=Version(0, 0), slots=64)
        await self.bus.kv.put(f"presence/engines/{name}", encode(presence))
        try:
            yield
        finally:
            await self.bus.kv.delete(f"presence/engines/{name}")
            await server.stop()

    @contextlib.asynccontextmanager
    async def serving(self, main: Callable[[Worker], object], worker: Worker) -> AsyncIterator[asyncio.Task[object]]:
        """A service that is drained at the end; raises what it raised."""
        service: asyncio.Task[object] = asyncio.ensure_future(main(worker))  # type: ignore[arg-type]
        try:
            yield service
        finally:
            worker.draining.set()
            await service


def samples_in(records: Sequence[Message]) -> list[Sample]:
    return [row for record in records if kind_of(record.subject) == "samples" for row in decode_samples(record.body).rows()]


def tombstones_in(records: Sequence[Message]) -> list[Tombstone]:
    return [decode(record.body, Tombstone) for record in records if kind_of(record.subject) == "tombstones"]


async def make_loop(folder: Path, run_id: str, make_bus: Callable[[BusConfig], Awaitable[Bus]]) -> Loop:
    """A run of this name below `folder`, on a bus that `make_bus` gives."""
    run_dir = RunDir(folder / run_id)
    run_dir.create()
    tokenizer = make_model(run_dir.model_dir)
    config = Config(
        run=RunConfig(name=run_id),
        model=ModelConfig(max_len=128),
        data=DataConfig(train="unused.jsonl"),
        engine=EngineConfig(kind="table"),
        trainer=TrainerConfig(backend="table"),
        warmup=WarmupConfig(max_steps=1),
        bus=BusConfig(ack_wait_s=ACK_WAIT_S, samples_bytes=1_000_000),
    )
    return Loop(await make_bus(config.bus), config, run_dir, tokenizer)


async def memory_loop(folder: Path, run_id: str) -> Loop:
    async def make_bus(config: BusConfig) -> Bus:
        return MemoryBus(run_id, config)

    return await make_loop(folder, run_id, make_bus)


def with_producer(config: Config, function: str, **fields: object) -> Config:
    return replace(config, producer=replace(config.producer, function=function, **fields))
