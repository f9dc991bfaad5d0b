"""What a producer does with tasks that have ended while it holds them, or before it gets them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from streamrl.engines.batching.delays import TokenDelay
from streamrl.producers.claims import Claim, Claims
from streamrl.producers.publishing import Publisher
from streamrl.producers.rollouts import main
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.control import Grant
from streamrl.schemas.samples import Tombstone
from streamrl.schemas.subjects import KEY_GRANTED, MAIN_SOURCE, PREFIX_ATTEMPTS, PREFIX_CHECKPOINTS, SAMPLES, TASKS
from streamrl.schemas.tasks import Refused, RolloutTask
from tests.support.producing import Loop, in_memory, samples_in, with_producer

HANGS = """
import asyncio

async def hangs(task, engine):
    await engine.context.checkpoint(b"half done")
    await asyncio.sleep(3600)
"""


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


@in_memory
async def test_a_task_that_had_ended_before_it_came_is_not_worked_on(loop: Loop) -> None:
    async with loop.serving(main, loop.worker()), asyncio.timeout(60):
        await end_below(loop, 2)
        await asyncio.sleep(2.0)  # the end is heard of, and its grace is over
        await loop.issue(3)
        async with loop.engine():
            assert {sample.task for sample in samples_in(await loop.records(1))} == {2}
            await loop.queue_is_empty()
    assert (await loop.bus.state(SAMPLES)).last == 1


@in_memory
async def test_a_grant_that_cannot_be_read_stops_no_producer(loop: Loop) -> None:
    await loop.bus.kv.put(KEY_GRANTED, b"no grant")
    async with loop.engine(), loop.serving(main, loop.worker()):
        await loop.issue(1)
        assert len(samples_in(await loop.records(1))) == 2
        await loop.queue_is_empty()


async def keys(loop: Loop) -> list[str]:
    """Of checkpoints and attempts."""
    return [key for prefix in (PREFIX_ATTEMPTS, PREFIX_CHECKPOINTS) for key in await loop.bus.kv.keys(prefix)]


@pytest.mark.process
@in_memory
async def test_what_was_stored_of_a_task_goes_when_it_is_cut_short(loop: Loop, tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    worker = loop.worker(config=with_producer(loop.config, f"{tmp_path / 'hangs.py'}:hangs"))
    async with loop.engine(), loop.serving(main, worker), asyncio.timeout(60):
        await loop.issue(2)
        while len(await keys(loop)) < 4:
            await asyncio.sleep(0.02)
        await end_below(loop, 1)
        while len(found := await keys(loop)) > 2:
            await asyncio.sleep(0.02)
        assert found == ["checkpoints/1/0", "checkpoints/1/1"], "the second task has not ended"
        await end_below(loop, 2)
        await loop.queue_is_empty()
        while await keys(loop):
            await asyncio.sleep(0.02)


@in_memory
async def test_what_others_stored_of_a_task_that_had_ended_goes_when_it_comes(loop: Loop) -> None:
    for key in (f"{PREFIX_CHECKPOINTS}0/0", f"{PREFIX_CHECKPOINTS}0/3", f"{PREFIX_ATTEMPTS}0", f"{PREFIX_CHECKPOINTS}7/0"):
        await loop.bus.kv.put(key, b"2")
    async with loop.serving(main, loop.worker()), asyncio.timeout(60):
        await end_below(loop, 1)
        await asyncio.sleep(2.0)  # the end is heard of, and its grace is over
        await loop.issue(1)
        await loop.queue_is_empty()
        while await keys(loop) != [f"{PREFIX_CHECKPOINTS}7/0"]:
            await asyncio.sleep(0.02)


@in_memory
async def test_work_that_is_given_up_is_cancelled_once(loop: Loop) -> None:
    """Each grant says again what has ended; the work, and the way off the queue, may take longer than from one to the next."""
    begun, cleaned = asyncio.Event(), asyncio.Event()

    async def work(task: RolloutTask, claim: Claim) -> None:
        try:
            begun.set()
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            await asyncio.sleep(0.2)
            cleaned.set()
            raise

    claims = Claims(loop.bus, Publisher(loop.bus, loop.subjects), "main", work, concurrency=1, ack_wait_s=60.0)
    draining = asyncio.Event()
    async with asyncio.timeout(60):
        running = asyncio.create_task(claims.run(draining))
        await loop.issue(1)
        await begun.wait()
        while not cleaned.is_set() and claims.num_open:
            claims.drop_below(1)
            await asyncio.sleep(0.02)
        assert cleaned.is_set()
        await loop.queue_is_empty()
        draining.set()
        await running


async def test_a_task_of_a_row_that_cannot_be_used_ends_with_the_reason_and_asks_no_engine(loop: Loop) -> None:
    bare = RolloutTask(run=loop.config.run.name, index=0, source=MAIN_SOURCE, num_rollouts=2, refused=Refused("row_broken", "line 3"))
    await loop.bus.publish(loop.subjects.tasks(MAIN_SOURCE), encode(bare), id="t0", expect_last=0)
    async with loop.serving(main, loop.worker()), asyncio.timeout(60):
        [stone] = await loop.records(1)
        await loop.queue_is_empty()
    found = decode(stone.body, Tombstone)
    assert (found.task, found.rollout, found.reason, found.detail, found.group_size) == (0, None, "row_broken", "line 3", 2)
