"""Memory while no batch closes for long: what was held for a dropped group is let go."""

from __future__ import annotations

import asyncio

from streamrl.bus.memory import MemoryBus
from streamrl.config.tree import BusConfig
from streamrl.consumers.training.reader import RecordReader
from streamrl.consumers.training.stream_fold import FORGET_AT, StreamFold
from streamrl.core.state import FoldConfig, initial_state
from streamrl.schemas.sample_batch import SampleBatch
from tests.support.bad_messages import GROUP, RUN, SUBJECTS, patched, template

TASKS = 400
CONFIG = FoldConfig(batch_tasks=2, group_size=GROUP, max_staleness=1, drop_zero_variance=True)


async def test_groups_without_spread_leave_no_messages_behind() -> None:
    bus = MemoryBus(RUN, BusConfig())
    for task in range(TASKS):
        for rollout in range(GROUP):  # a group of two messages, whose rewards are equal
            await bus.publish(SUBJECTS.samples("main"), patched(template((rollout,), reward=1.0), task, 0))
    reader = RecordReader(bus, asyncio.get_running_loop(), after=0, capacity=8)
    messages: dict[int, SampleBatch] = {}
    held: list[int] = []
    stream = StreamFold(
        reader=reader,
        config=CONFIG,
        state=initial_state(CONFIG),
        messages=messages,
        effects=lambda effects, incoming: held.append(len(messages)),
    )
    try:
        assert await asyncio.to_thread(stream.next, None, lambda: stream.own.cursor == GROUP * TASKS) is None
    finally:
        reader.close()
        await bus.close()
    assert stream.own.retired == TASKS
    assert max(held) <= FORGET_AT
