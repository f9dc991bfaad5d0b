"""Our path: `Publisher` with its ids and outbox, JetStream on files, `RecordReader` with every check that a record goes through."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from benchmarks.bus.bus_thread import BusThread
from benchmarks.bus.lanes import Order, Ran, Receiver
from benchmarks.bus.payload import NUM_PATTERNS, group, with_task
from streamrl.bus import Bus, BusAddress, connect
from streamrl.consumers.training.reader import RecordReader
from streamrl.core.records import Rollouts
from streamrl.errors import BusError
from streamrl.producers.publishing import Publisher
from streamrl.schemas.samples import Sample
from streamrl.schemas.subjects import SAMPLES, Subjects
from streamrl.schemas.tasks import RolloutTask

RUN = "bench"
CONCURRENCY = 16
"""Tasks that a producer publishes at once, as its rollouts end by themselves."""
CAPACITY = 64
"""Records that wait for the training thread: 4 batches of 16 tasks."""
_WAIT_S = 120.0


class Producer:
    """A producer's process: one loop for the bus and for its tasks."""

    def __init__(self, address: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._bus: Bus = self._loop.run_until_complete(connect(BusAddress.load(Path(address)), RUN, name="bench-producer"))
        self._publisher = Publisher(self._bus, Subjects(RUN))
        self._tasks: list[tuple[RolloutTask, list[Sample]]] = []

    def prepare(self, order: Order) -> None:
        patterns = [group(order.cell, pattern) for pattern in range(NUM_PATTERNS)]
        self._tasks = []
        for number in range(order.num_tasks):
            index = order.first_task + number
            task = RolloutTask(run=RUN, index=index, source="main", num_rollouts=order.cell.samples)
            self._tasks.append((task, with_task(patterns[number % NUM_PATTERNS], index)))

    def run(self) -> Ran:
        start_s, cpu_s = time.monotonic(), time.process_time()
        self._loop.run_until_complete(self._publish())
        ran = Ran(start_s=start_s, end_s=time.monotonic(), cpu_s=time.process_time() - cpu_s, messages=len(self._tasks))
        self._tasks = []
        return ran

    async def _publish(self) -> None:
        left = iter(self._tasks)

        async def lane() -> None:
            for task, samples in left:
                await self._publisher.task(task, samples, [])

        async with asyncio.TaskGroup() as lanes:
            for _ in range(CONCURRENCY):
                lanes.create_task(lane())

    def close(self) -> None:
        self._loop.run_until_complete(self._bus.close())
        self._loop.close()


class Consumer(Receiver):
    """A trainer's process: the bus on a thread of its own, records taken on this one."""

    def __init__(self, address: str) -> None:
        where = BusAddress.load(Path(address))
        self._thread = BusThread(lambda: connect(where, RUN, name="bench-consumer"))
        self._thread.__enter__()
        self._reader: RecordReader | None = None

    def prepare(self, order: Order) -> None:
        super().prepare(order)
        self._reader = self._thread.run(self._open)

    async def _open(self, bus: Bus) -> RecordReader:
        after = (await bus.state(SAMPLES)).last
        await bus.trim(SAMPLES, through=after)
        return RecordReader(bus, asyncio.get_running_loop(), after=after, capacity=CAPACITY)

    def receive(self) -> tuple[int, int, int]:
        assert self._reader is not None
        incoming = self._reader.get(_WAIT_S)
        if incoming is None or incoming.samples is None or not isinstance(incoming.record, Rollouts):
            raise BusError(f"bench bus: expected samples within {_WAIT_S:.0f} s, got {incoming and incoming.record}")
        samples = incoming.samples
        return samples.num_rows, len(samples.tokens), samples.nbytes

    def run(self) -> Ran:
        ran = super().run()
        assert self._reader is not None
        self._reader.close()
        return ran

    def close(self) -> None:
        self._thread.__exit__(None, None, None)
