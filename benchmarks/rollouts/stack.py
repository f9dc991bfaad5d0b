"""The whole stack without a trainer: bus, engines, feeder and producers as `up` starts them, and a reader that only counts samples."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from msgspec.structs import replace

from streamrl.bus import connect
from streamrl.bus.protocol import Bus
from streamrl.config.tree import Config, TrainerConfig
from streamrl.consumers.training.reader import Incoming, open_message
from streamrl.core.records import Ended, Rollouts
from streamrl.errors import LaunchError
from streamrl.launch.local import LocalLauncher
from streamrl.launch.supervisor import Supervisor
from streamrl.runtime.bus_server import run_bus_server
from streamrl.runtime.kinds import num_workers
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.control import EnginePresence, Grant
from streamrl.schemas.subjects import KEY_GRANTED, PREFIX_PRESENCE, SAMPLES, TASKS, Subjects
from streamrl.schemas.versions import Version
from streamrl.trainers.factory import make_trainer
from streamrl.weights.factory import free_weights, make_publisher

logger = logging.getLogger(__name__)
T = TypeVar("T")

ENGINES, MAKERS = ("engine",), ("feeder", "producer", "rewarder")
"""Kinds of worker that stay, and those that are started again for answers of another length."""
_TICK_S = 0.1
_ENGINES = f"{PREFIX_PRESENCE}engines/"


class Stack(Protocol):
    """Workers over a bus."""

    bus: Bus
    run: RunDir

    def working(self, config: Config, kinds: Sequence[str]) -> AbstractAsyncContextManager[None]:
        """Workers of these kinds, with this configuration, until left; then they have drained."""
        ...

    def names(self) -> Mapping[int, str]:
        """Names of the workers by process id."""
        ...

    async def until(self, done: Awaitable[T]) -> T:
        """Wait for something that workers do; raises LaunchError when one of them has ended."""
        ...


class Processes:
    """Workers as processes of their own, over a nats-server; made by `started`."""

    def __init__(self, bus: Bus, run: RunDir, supervisor: Supervisor) -> None:
        self.bus = bus
        self.run = run
        self._supervisor = supervisor

    @asynccontextmanager
    async def working(self, config: Config, kinds: Sequence[str]) -> AsyncGenerator[None]:
        """See Stack."""
        self.run.write_config(config)
        names = [f"{kind}-{index}" for kind in kinds for index in range(num_workers(config, kind))]
        for name in names:
            kind, _, index = name.rpartition("-")
            self._supervisor.start(kind, int(index))
        yield
        for name in names:
            self._supervisor.retire(name)
        while not all(self._supervisor.children[name].over for name in names):
            self._supervisor.tick()
            await asyncio.sleep(_TICK_S)

    def names(self) -> Mapping[int, str]:
        """See Stack."""
        return {line.pid: name for name, line in self._supervisor.lines().items()}

    async def until(self, done: Awaitable[T]) -> T:
        """See Stack."""
        task = asyncio.ensure_future(done)
        try:
            while not (await asyncio.wait({task}, timeout=_TICK_S))[0]:
                self._supervisor.tick()
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def started(config: Config, run: RunDir) -> AsyncGenerator[Processes]:
    """A bus without workers. Whatever is started over it has ended when this is left.

    Raises:
        LaunchError: the bus does not start.
    """

    def note(text: str) -> None:
        logger.info("event=note text=%s", text)

    async with run_bus_server(config, run, note) as server:
        bus = await connect(server.address, run.name, config.bus, name="bench")
        supervisor = Supervisor(LocalLauncher(run, config), config.supervise, note=note)
        try:
            yield Processes(bus, run, supervisor)
        finally:
            await supervisor.kill_all()
            await bus.close()
            free_weights(config.weights, run.name, run.path)


async def publish_first(config: Config, stack: Stack, model_dir: Path) -> None:
    """Publish the model's own weights as version 0.0, as a trainer does that begins; read on the CPU."""
    backend = "table" if config.engine.traits.tabular else "torch"
    trainer_config = TrainerConfig(backend=backend, device="cpu", dtype=config.trainer.dtype)
    reading = Config(model=replace(config.model, path=str(model_dir)), trainer=trainer_config)
    trainer = await asyncio.to_thread(make_trainer, reading, model_dir)
    publisher = make_publisher(
        config.weights,
        bus=stack.bus,
        subjects=Subjects(config.run.name),
        policy="policy",
        run_dir=stack.run.path,
        loop=asyncio.get_running_loop(),
    )
    await asyncio.to_thread(lambda: publisher.offer(Version(0, 0), trainer.digest(), trainer.shards()))
    await asyncio.to_thread(publisher.close)


async def serving(config: Config, stack: Stack) -> list[EnginePresence]:
    """Wait until all engines serve a version; raises LaunchError when they do not come to that."""

    async def wait() -> list[EnginePresence]:
        while True:
            found = [decode(value, EnginePresence, where="presence") for value in (await stack.bus.kv.values(_ENGINES)).values()]
            if len(found) >= config.engine.workers:
                return found
            await asyncio.sleep(_TICK_S)

    limit_s = config.engine.sglang.start_timeout_s
    try:
        async with asyncio.timeout(limit_s):
            return await stack.until(wait())
    except TimeoutError as error:
        raise LaunchError(
            f"expected {config.engine.workers} engines that serve the first version within {limit_s:g} s, got fewer",
            hint=f"see {stack.run.logs}",
        ) from error


class Tally:
    """Counts what comes of a number of tasks, record by record."""

    def __init__(self, tasks: int) -> None:
        self.rollouts = 0
        self.failed = 0
        """Rollouts that ended without a sample."""
        self.tokens = 0
        self._missing = tasks
        self._left: dict[int, int] = {}
        """Rollouts of each task that have not ended."""
        self._ended: set[tuple[int, int]] = set()

    @property
    def complete(self) -> bool:
        """True once all rollouts of all tasks have ended."""
        return not self._missing

    def add(self, incoming: Incoming) -> None:
        """Take one record; what ends no rollout is passed over."""
        record = incoming.record
        if isinstance(record, Rollouts) and incoming.samples is not None:
            new = {(record.task, one.rollout) for one in record.rollouts} - self._ended
            self.rollouts += len(new)
            self.tokens += int(incoming.samples.span_length[incoming.samples.span_number >= 0].sum())
            self._end(record.task, record.group_size, new)
        elif isinstance(record, Ended):
            size = record.group_size
            named = range(size) if record.rollout is None else (record.rollout,)
            new = {(record.task, one) for one in named} - self._ended
            self.failed += len(new)
            self._end(record.task, size, new)

    def _end(self, task: int, size: int, new: set[tuple[int, int]]) -> None:
        before = self._left.get(task, size)
        self._left[task] = before - len(new)
        self._ended |= new
        self._missing -= before > 0 and self._left[task] == 0


async def roll(stack: Stack, tasks: int) -> dict[str, float]:
    """Grant `tasks` more tasks and wait until all of them have ended.

    Returns:
        `rollouts` and `tokens` that came, `failed` rollouts, and the `seconds` from the grant to the last of them on the stream.

    Raises:
        LaunchError: a worker has ended meanwhile.
    """
    bus = stack.bus
    issued, after = (await bus.state(TASKS)).last, (await bus.state(SAMPLES)).last
    began_s = time.time()
    await bus.kv.put(KEY_GRANTED, encode(Grant(issued + tasks, 0, issued)))
    tally, last_s = await stack.until(_read(bus, Tally(tasks), after=after))
    await bus.trim(SAMPLES, through=(await bus.state(SAMPLES)).last)
    return {"rollouts": tally.rollouts, "failed": tally.failed, "tokens": tally.tokens, "seconds": last_s - began_s}


async def _read(bus: Bus, tally: Tally, *, after: int) -> tuple[Tally, float]:
    messages = bus.read(SAMPLES, after=after)
    stored_s = 0.0
    try:
        async for message in messages:
            tally.add(open_message(message))
            stored_s = message.time_s
            if tally.complete:
                break
    finally:
        if isinstance(messages, AsyncGenerator):
            await messages.aclose()
    return tally, stored_s
