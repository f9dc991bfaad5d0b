"""The loop without a stream: the product's producer, engine and trainer, bound by a link and nothing else.

```text
roll_out (event loop)   task -> engine -> reward -> link.put(group)         at most (S + 1) B tasks ahead, as the feeder's credits
train (its thread)      link.get() x B -> TrainBatch -> trainer.step -> link.offer(weights)
```

There is no feeder, no HTTP, no encoding, no ledger, no checkpoint, and nothing survives a crash.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from streamrl.config.tree import Config
from streamrl.core.batches import TrainBatch
from streamrl.core.seeds import run_seed
from streamrl.data.problems import load_problems
from streamrl.data.tokenizer import load_tokenizer
from streamrl.engines.factory import make_engine
from streamrl.engines.protocol import HostedEngine
from streamrl.producers.feeder import plan_tasks
from streamrl.producers.functions import make_producer
from streamrl.producers.groups import GroupRunner
from streamrl.rewards.factory import make_reward
from streamrl.runtime.collection import keep_all
from streamrl.schemas.control import Grant
from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Manifest
from streamrl.trainers.factory import make_trainer
from streamrl.weights.manifest import Content, build
from streamrl.weights.protocol import Part


class Rollouts(msgspec.Struct, frozen=True, array_like=True):
    """A task's scored rollouts."""

    task: int
    prompt: tuple[int, ...]
    tokens: list[tuple[int, ...]]
    """Sampled, of each rollout."""
    logprobs: list[tuple[float, ...]]
    versions: list[tuple[tuple[int, int], ...]]
    """(length, version number) runs over the sampled tokens."""
    rewards: list[float]


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    """One trained batch."""

    time_s: float
    """Unix time at its end."""
    samples: int
    tokens: int
    staleness: float
    """Mean over its trained tokens, in versions."""
    wait_s: float
    step_s: float


class EngineLink(Protocol):
    """What the sampling half sees; its methods belong to its event loop."""

    async def put(self, group: Rollouts) -> None: ...

    async def weights(self) -> tuple[Manifest, memoryview] | None:
        """The next version, or None once training is over."""
        ...


class TrainerLink(Protocol):
    """What the training half sees; its methods belong to its thread."""

    def get(self) -> Rollouts: ...

    def offer(self, manifest: Manifest, data: memoryview) -> None: ...


async def roll_out(config: Config, model_dir: Path, link: EngineLink) -> None:
    """The half that samples, until the trainer is done."""
    tokenizer = load_tokenizer(model_dir)
    problems = load_problems(config.data.train, config.data, tokenizer)
    engine = await asyncio.to_thread(make_engine, config.engine, model_dir, engine_id="bench", max_len=config.model.max_len)
    await engine.start()
    keep_all()
    runner = GroupRunner(
        producer=make_producer(config.producer.function, key="producer.function"),
        reward=make_reward(config.reward),
        engine=engine,
        tokenizer=tokenizer,
        options=config.producer.options,
        max_len=config.model.max_len,
        chat_template=config.data.chat_template,
    )
    batch, ahead = config.tasks.batch_tasks, config.tasks.max_staleness + 1
    room = asyncio.Semaphore(config.producer.concurrency)
    granted = asyncio.Condition()
    newest = -1
    open_tasks: set[asyncio.Task[None]] = set()

    async def one(index: int) -> None:
        grant = Grant(granted=index + 1, version=newest, retired=newest * batch)
        (task,) = plan_tasks(grant, index, index + 1, problems, config)
        try:
            group = await runner.run(task)
        finally:
            room.release()
        await link.put(_rollouts(index, group.episodes))

    async def issue(tasks: asyncio.TaskGroup) -> None:
        for index in itertools.count():
            await room.acquire()
            async with granted:
                await granted.wait_for(lambda index=index: newest >= 0 and index < (newest + ahead) * batch)
            task = tasks.create_task(one(index))
            open_tasks.add(task)
            task.add_done_callback(open_tasks.discard)

    try:
        async with asyncio.TaskGroup() as tasks:
            issuing = tasks.create_task(issue(tasks))
            while (found := await link.weights()) is not None:
                manifest, data = found
                async with granted:
                    newest = manifest.version.number
                    granted.notify_all()
                await _serve(engine, manifest, data)
            for task in (issuing, *open_tasks):
                task.cancel()
    finally:
        await runner.close()
        await engine.stop()


def train(config: Config, model_dir: Path, link: TrainerLink, done: Callable[[Trained], None]) -> None:
    """The half that trains `run.steps` batches; in the thread that calls it."""
    trainer = make_trainer(config, model_dir)
    keep_all()
    seed = run_seed(config.run.name, config.run.seed)
    for number in range(config.run.steps):
        content = Content(trainer.shards())
        manifest = build(content, run=str(seed), policy="policy", version=Version(0, number), parts=(), transport="shm")
        data = np.empty(content.nbytes, np.uint8)
        content.fill(0, data)
        link.offer(manifest, data.data)
        began = time.perf_counter()
        groups = sorted((link.get() for _ in range(config.tasks.batch_tasks)), key=lambda group: group.task)
        waited = time.perf_counter() - began
        arrays = pack(groups, config, number)
        trainer.step(arrays)
        done(
            Trained(
                time_s=time.time(),
                samples=arrays.num_samples,
                tokens=arrays.num_tokens,
                staleness=float(arrays.staleness[arrays.loss_mask].mean()),
                wait_s=waited,
                step_s=time.perf_counter() - began - waited,
            )
        )


def pack(groups: Sequence[Rollouts], config: Config, number: int) -> TrainBatch:
    """The arrays of a batch that is trained from version `number`."""
    rows = [(group, rollout) for group in groups for rollout in range(len(group.tokens))]
    lengths = [len(group.prompt) + len(group.tokens[rollout]) for group, rollout in rows]

    def joined(kind: Any, prompt: Any, sampled: Callable[[Rollouts, int], Sequence[Any]]) -> Any:
        return np.concatenate([np.array([*(prompt(group)), *sampled(group, rollout)], kind) for group, rollout in rows])

    def aged(group: Rollouts, rollout: int) -> list[int]:
        return [number - version for length, version in group.versions[rollout] for _ in range(length)]

    num, sampling = sum(lengths), config.sampling
    return TrainBatch(
        kind="rl",
        version=Version(0, number),
        stage_step=number,
        tokens=joined(np.int32, lambda group: group.prompt, lambda group, rollout: group.tokens[rollout]),
        offsets=np.cumsum([0, *lengths]),
        loss_mask=joined(np.bool_, lambda group: (False,) * len(group.prompt), lambda group, rollout: (True,) * len(group.tokens[rollout])),
        sampler_logprobs=joined(np.float32, lambda group: (0.0,) * len(group.prompt), lambda group, rollout: group.logprobs[rollout]),
        staleness=joined(np.int32, lambda group: (0,) * len(group.prompt), aged),
        temperature=np.full(num, sampling.temperature, np.float32),
        top_p=np.full(num, sampling.top_p, np.float32),
        top_k=np.full(num, sampling.top_k, np.int32),
        rewards=np.array([group.rewards[rollout] for group, rollout in rows]),
        tasks=np.array([group.task for group, _ in rows]),
        rollouts=np.array([rollout for _, rollout in rows]),
        status=np.zeros(len(rows), np.int8),
    )


def _rollouts(task: int, episodes: Sequence[Any]) -> Rollouts:
    sampled = [episode.segments[1] for episode in episodes]
    return Rollouts(
        task=task,
        prompt=tuple(episodes[0].segments[0].token_ids),
        tokens=[tuple(segment.token_ids) for segment in sampled],
        logprobs=[tuple(segment.logprobs) for segment in sampled],
        versions=[tuple((span.length, span.version.number) for span in segment.spans) for segment in sampled],
        rewards=[float(episode.reward) for episode in episodes],
    )


async def _serve(engine: HostedEngine, manifest: Manifest, data: memoryview) -> None:
    async def whole() -> AsyncIterator[Part]:
        yield Part(0, data)

    await engine.stage(manifest, whole())
    await engine.commit(manifest.version)
