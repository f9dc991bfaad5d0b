"""What a trainer asks of the sample stream, and what it holds of it while no batch closes for long."""

import asyncio
import time
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from streamrl.bus.memory import MemoryBus
from streamrl.bus.protocol import StreamState
from streamrl.config.tree import BusConfig
from streamrl.consumers.training.calls import Caller
from streamrl.consumers.training.checkpoints import LOOK_EVERY_S, Checkpointer, read_latest
from streamrl.consumers.training.reader import RecordReader
from streamrl.consumers.training.stream_fold import FORGET_AT, StreamFold
from streamrl.core.fold_config import fold_config
from streamrl.core.state import FoldConfig, initial_state
from streamrl.data.model import ensure_model
from streamrl.schemas.sample_batch import SampleBatch
from streamrl.schemas.versions import Version
from streamrl.trainers.factory import make_trainer
from tests.support.bad_messages import GROUP, RUN, SUBJECTS, patched, template
from tests.support.harness import make_run
from tests.support.world.world import table_config


class Counting(MemoryBus):
    """Counts how often its state is asked for."""

    looks = 0

    async def state(self, stream: str) -> StreamState:
        self.looks += 1
        return await super().state(stream)


async def test_short_steps_look_at_the_stream_a_few_times_a_second_and_still_make_room(tmp_path: Path) -> None:
    run, config = make_run(tmp_path, table_config(tmp_path, bus={"samples_bytes": 20_000}))
    bus = Counting(config.run.name, config.bus)
    saver = Checkpointer(
        bus=bus,
        call=Caller(asyncio.get_running_loop()),
        trainer=make_trainer(config, ensure_model(config, run.model_dir)),
        settings=replace(config.trainer, checkpoint_every=10**9, keep_checkpoints=2),
        run_path=run.path,
        identity="",
    )
    state = initial_state(fold_config(config))

    def step(number: int) -> None:
        saver.after_step(replace(state, version=Version(0, number), cursor=9))

    began = time.monotonic()
    for number in range(1, 301):
        await asyncio.to_thread(step, number)
    assert 1 <= bus.looks <= 1 + (time.monotonic() - began) / LOOK_EVERY_S
    assert await read_latest(bus, "main") is None
    for _ in range(9):
        await bus.publish(f"{config.run.name}.samples.main", b"x" * 2000)
    async with asyncio.timeout(30):
        while (latest := await read_latest(bus, "main")) is None:
            number += 1
            await asyncio.to_thread(step, number)
    assert latest.cursor == 9
    assert (await bus.state("samples")).first == 10, "the stream was trimmed up to the position of the checkpoint"
    await bus.close()


TASKS = 400
CONFIG = FoldConfig(batch_tasks=2, group_size=GROUP, max_staleness=1, drop_zero_variance=True)


async def test_groups_without_spread_leave_no_messages_behind() -> None:
    """What was held for a dropped group is let go."""
    bus = MemoryBus(RUN, BusConfig())
    for task in range(TASKS):
        for rollout in range(GROUP):  # a group of two messages, whose rewards are equal
            await bus.publish(SUBJECTS.samples("main"), patched(template((rollout,), reward=1.0), task, 0))
    reader = RecordReader(bus, asyncio.get_running_loop(), after=0, capacity=8)
    messages: dict[int, SampleBatch] = {}
    held: list[int] = []
    started: Any = {"reader": reader, "config": CONFIG, "state": initial_state(CONFIG), "messages": messages}
    stream = StreamFold(**started, effects=lambda effects, incoming: held.append(len(messages)))
    try:
        assert await asyncio.to_thread(stream.next, None, lambda: stream.own.cursor == GROUP * TASKS) is None
    finally:
        reader.close()
        await bus.close()
    assert stream.own.retired == TASKS
    assert max(held) <= FORGET_AT
