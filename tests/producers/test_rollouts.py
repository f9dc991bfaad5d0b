"""The producer worker on both buses, with an engine behind HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from streamrl.core.seeds import rollout_seed
from streamrl.engines.batching.delays import TokenDelay
from streamrl.errors import ConfigError
from streamrl.monitor.view import RunView
from streamrl.producers.rollouts import attach, main
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.control import Grant
from streamrl.schemas.events import MetricReport
from streamrl.schemas.samples import LogprobMode
from streamrl.schemas.subjects import HEADER_SCHEMA, HEADER_TASK, KEY_GRANTED, METRICS, SAMPLES, TASKS
from tests.support.processes import until
from tests.support.producing import Loop, in_memory, on_server, samples_in, tombstones_in, with_producer

FUNCTIONS = """
import asyncio
import os


async def calculator(task, engine):
    chat = engine.chat(task)
    turn = await chat.generate()
    while "?" in turn.text:
        chat.tool("7")
        turn = await chat.generate()
    return chat.episode()


async def hangs_at_odd_tasks(task, engine):
    if task.index % 2:
        await asyncio.sleep(3600)
    return await calculator(task, engine)


async def exits_at_row_4(task, engine):
    chat = engine.chat(task)
    await chat.generate()
    if task.index == 4:
        os._exit(3)
    return chat.episode()
"""


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return path


async def test_a_task_becomes_one_message_of_scored_samples(loop: Loop) -> None:
    async with loop.engine(), loop.serving(main, loop.worker()):
        await loop.issue(2, num_rollouts=4)
        await loop.issue(1, source="warmup", num_rollouts=1)
        records = await loop.records(3)
        await loop.queue_is_empty()
    by_task = {record.headers[HEADER_TASK]: record for record in records}
    assert sorted(by_task) == ["0", "1", "2"]
    assert {record.headers[HEADER_SCHEMA] for record in records} == {"samples/2"}
    samples = samples_in([by_task["1"]])
    assert [(s.rollout, s.group_size, s.reward, s.seed) for s in samples] == [(k, 4, 1.0, rollout_seed(1, k)) for k in range(4)]
    assert {(s.engine, s.producer, s.source) for s in samples} == {("table-0", "producer-0", "main")}
    for s in samples:
        times = (s.issued_s, s.claimed_s, s.started_s, s.began_s, s.finished_s, s.scored_s)
        assert min(times) > 0 and list(times) == sorted(times) and s.deliveries == 0
    tokenizer = loop.tokenizer
    assert tokenizer.decode(samples[0].tokens.tolist()) == "<|user|>3+4<|end|><|assistant|>7<|end|>"
    assert samples[0].loss_mask.tolist() == [0] * 6 + [1, 1]
    assert (samples[0].logprobs[6:] < 0).all() and (samples[0].logprobs[:6] == 0).all()
    [shown] = samples_in([by_task["2"]])
    assert (shown.tokens.tolist(), shown.loss_mask.tolist()) == (samples[0].tokens.tolist(), samples[0].loss_mask.tolist())
    assert (shown.logprob_mode, shown.reward, [(span.length, span.version) for span in shown.spans]) == (
        LogprobMode.NONE,
        None,
        [(8, None)],
    )


@pytest.mark.process
@in_memory
async def test_tasks_whose_code_hangs_are_reported_and_those_that_wait_for_an_engine_are_not(loop: Loop, functions: Path) -> None:
    view = RunView(loop.config.run.name)

    async def follow() -> None:
        async for message in loop.bus.read(METRICS, after=0):
            view.metric(decode(message.body, MetricReport))

    config = with_producer(loop.config, f"{functions}:hangs_at_odd_tasks")
    config = replace(config, producer=replace(config.producer, idle_timeout_s=6.0))
    worker = loop.worker(config=config)
    async with loop.serving(main, worker):
        following = asyncio.create_task(follow())
        await loop.issue(4)
        await until(lambda: view.numbers(elapsed_s=1.0).hung_tasks == 2, within_s=60)
        numbers = view.numbers(elapsed_s=1.0)
        assert 2.0 < numbers.hung_s < 6.5 and numbers.tasks_in_flight == 4
        # What hangs ends over its limit; the others have all the time there is.
        await loop.records(2, timeout_s=60)
        await until(lambda: view.numbers(elapsed_s=1.0).hung_tasks == 0, within_s=60)
        assert view.numbers(elapsed_s=1.0).tasks_in_flight == 2
        following.cancel()


@pytest.mark.process
@in_memory
async def test_a_row_that_kills_its_process_ends_alone(loop: Loop, functions: Path) -> None:
    """With `tasks.max_deliveries` as it is by default."""
    worker = loop.worker(config=with_producer(loop.config, f"{functions}:exits_at_row_4", children=1))
    async with loop.engine(), loop.serving(main, worker) as service:
        await loop.issue(9)
        records = await loop.records(9, timeout_s=90)
        await loop.queue_is_empty()
        assert not service.done()
        assert not [key for key in await loop.bus.kv.keys("attempts/") if (entry := await loop.bus.kv.get(key)) and entry.value]
    [stone] = tombstones_in(records)
    assert (stone.task, stone.rollout, stone.reason) == (4, None, "deliveries")
    assert "died 4 times" in stone.detail and "exit code 3" in stone.detail
    assert sorted({sample.task for sample in samples_in(records)}) == [0, 1, 2, 3, 5, 6, 7, 8]


async def test_an_engine_that_dies_costs_nothing_but_time(loop: Loop) -> None:
    async with loop.serving(main, loop.worker()):
        async with loop.engine(delay=TokenDelay(mean_s=0.5, sigma=0.0)) as slow:
            await loop.issue(3)
            async with asyncio.timeout(60):
                while (await slow.info()).running < 6:
                    await asyncio.sleep(0.02)
        async with loop.engine(name="table-1"):
            samples = samples_in(await loop.records(3))
            await loop.queue_is_empty()
    assert {sample.engine for sample in samples} == {"table-1"}
    assert len(samples) == 6


async def test_tasks_that_have_ended_are_cut_short_on_the_engine_and_leave_the_queue(loop: Loop) -> None:
    async with loop.engine(delay=TokenDelay(mean_s=60.0, sigma=0.0)) as engine, loop.serving(main, loop.worker()), asyncio.timeout(60):
        await loop.issue(3)
        while (await engine.info()).running < 6:
            await asyncio.sleep(0.02)
        await loop.bus.kv.put(KEY_GRANTED, encode(Grant(3, 3, 2, 0, 2)))
        while (await loop.bus.state(TASKS)).messages > 1 or (await engine.info()).running > 2:
            await asyncio.sleep(0.02)
        assert (await loop.bus.fetch(TASKS, 3)).sequence == 3
        assert (await loop.bus.state(SAMPLES)).last == 0


@pytest.mark.process
@on_server
async def test_another_producer_attaches_and_leaves(loop: Loop, functions: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'calculator'"):
        await attach(loop.worker(), f"{functions}:calculater")
    guest = loop.worker(7)
    async with loop.engine():
        async with loop.serving(lambda worker: attach(worker, f"{functions}:calculator"), guest) as service:
            await loop.issue(3)
            first = samples_in(await loop.records(3))
        assert await service == 3
        assert {sample.producer for sample in first} == {"producer-7"}
        async with loop.serving(main, loop.worker()):
            await loop.issue(3)
            both = samples_in(await loop.records(6))
            await loop.queue_is_empty()
    assert sorted({(s.task, s.producer) for s in both}) == [(t, "producer-7" if t < 3 else "producer-0") for t in range(6)]
