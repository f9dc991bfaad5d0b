"""What a producer does with tasks that have ended while it holds them, or before it gets them."""

from __future__ import annotations

import asyncio

from streamrl.engines.batching.delays import TokenDelay
from streamrl.producers.rollouts import main
from streamrl.schemas.codec import encode
from streamrl.schemas.control import Grant
from streamrl.schemas.subjects import KEY_GRANTED, SAMPLES, TASKS
from tests.producers.conftest import Loop, samples_in


async def end_below(loop: Loop, first_open: int) -> None:
    await loop.bus.kv.put(KEY_GRANTED, encode(Grant(loop.num_tasks, 3, first_open, 0, first_open)))


async def test_tasks_that_have_ended_are_cut_short_on_the_engine_and_leave_the_queue(loop: Loop) -> None:
    async with loop.engine(delay=TokenDelay(mean_s=60.0, sigma=0.0)) as engine, loop.serving(main, loop.worker()), asyncio.timeout(60):
        await loop.issue(3)
        while (await engine.info()).running < 6:
            await asyncio.sleep(0.02)
        await end_below(loop, 2)
        while (await loop.bus.state(TASKS)).messages > 1 or (await engine.info()).running > 2:
            await asyncio.sleep(0.02)
        assert (await loop.bus.fetch(TASKS, 3)).sequence == 3
        assert (await loop.bus.state(SAMPLES)).last == 0
        await asyncio.sleep(0.5)
        assert (await engine.info()).running == 2, "the third task has not ended"


async def test_a_task_that_had_ended_before_it_came_is_not_worked_on(loop: Loop) -> None:
    async with loop.serving(main, loop.worker()), asyncio.timeout(60):
        await end_below(loop, 2)
        await asyncio.sleep(2.0)  # the end is heard of, and its grace is over
        await loop.issue(3)
        async with loop.engine():
            assert {sample.task for sample in samples_in(await loop.records(1))} == {2}
            await loop.queue_is_empty()
    assert (await loop.bus.state(SAMPLES)).last == 1


async def test_a_grant_that_cannot_be_read_stops_no_producer(loop: Loop) -> None:
    await loop.bus.kv.put(KEY_GRANTED, b"no grant")
    async with loop.engine(), loop.serving(main, loop.worker()):
        await loop.issue(1)
        assert len(samples_in(await loop.records(1))) == 2
        await loop.queue_is_empty()
