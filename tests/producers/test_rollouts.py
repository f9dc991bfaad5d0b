"""The producer worker on both buses, with an engine behind HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from streamrl.bus.protocol import Lease
from streamrl.core.seeds import rollout_seed
from streamrl.engines.batching.delays import TokenDelay
from streamrl.errors import StreamFull
from streamrl.monitor.view import RunView
from streamrl.producers.publishing import Publisher
from streamrl.producers.rollouts import main
from streamrl.schemas.codec import decode
from streamrl.schemas.events import MetricReport
from streamrl.schemas.samples import LogprobMode
from streamrl.schemas.subjects import HEADER_SCHEMA, HEADER_TASK, METRICS, SAMPLES, TASKS
from streamrl.schemas.tasks import RolloutTask
from tests.support.policies import SURE, script
from tests.support.processes import until
from tests.support.producing import ACK_WAIT_S, Loop, in_memory, on_server, samples_in, tombstones_in, with_producer


async def test_a_task_becomes_one_message_of_scored_samples(loop: Loop) -> None:
    async with loop.engine(), loop.serving(main, loop.worker()):
        await loop.issue(3, num_rollouts=4)
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


async def test_warmup_tasks_need_no_engine(loop: Loop) -> None:
    async with loop.serving(main, loop.worker()):
        await loop.issue(2, source="warmup", num_rollouts=1)
        samples = samples_in(await loop.records(2))
        await loop.queue_is_empty()
    assert loop.tokenizer.decode(samples[0].tokens.tolist()) == "<|user|>3+4<|end|><|assistant|>7<|end|>"
    assert samples[0].loss_mask.tolist() == [0] * 6 + [1, 1]
    assert (samples[0].logprob_mode, samples[0].reward) == (LogprobMode.NONE, None)
    assert [(span.length, span.version) for span in samples[0].spans] == [(8, None)]


@pytest.mark.process
@in_memory
async def test_a_custom_producer_runs_over_several_turns(loop: Loop, functions: Path) -> None:
    # Asked for 3+4 it calls the tool half of the time; the tool's answer comes back until it gives its own.
    logits = script(loop.tokenizer, {(0, "<|assistant|>"): "7"})
    row = logits[0, loop.tokenizer.encode("<|assistant|>")[0]]
    row[loop.tokenizer.encode("?")[0]] = SURE
    worker = loop.worker(config=with_producer(loop.config, f"{functions}:calculator"))
    async with loop.engine(logits), loop.serving(main, worker):
        await loop.issue(8, num_rollouts=4)
        samples = samples_in(await loop.records(8))
    turns = [loop.tokenizer.decode(sample.tokens.tolist()).split("<|assistant|>")[1:] for sample in samples]
    assert len(samples) == 32
    assert all(turn[-1] == "7<|end|>" and all(early == "?<|end|><|tool|>7<|end|>" for early in turn[:-1]) for turn in turns)
    assert {1, 2} <= {len(turn) for turn in turns}
    for sample, turn in zip(samples, turns, strict=True):
        masked = loop.tokenizer.decode(sample.tokens[sample.loss_mask == 1].tolist())
        assert masked == "?<|end|>" * (len(turn) - 1) + "7<|end|>"


@pytest.mark.process
@on_server
async def test_user_code_that_blocks_keeps_its_lease(loop: Loop, functions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_producer(loop.config, f"{functions}:blocks", options={"block_s": 3 * ACK_WAIT_S})
    worker = loop.worker(config=config)
    claimed: list[int] = []
    claim = worker.bus.claim

    async def seen(source: str, **options: Any) -> Sequence[Lease]:
        leases = await claim(source, **options)
        claimed.extend(lease.deliveries for lease in leases)
        return leases

    monkeypatch.setattr(worker.bus, "claim", seen)
    async with loop.engine(), loop.serving(main, worker):
        await loop.issue(1, num_rollouts=1)
        await until(lambda: "functions.py:" in worker.state and "in blocks" in worker.state)
        records = await loop.records(1)
        await loop.queue_is_empty()
        assert (await loop.bus.state(SAMPLES)).last == 1
    # A lease that lapsed would have been delivered a second time.
    assert claimed == [1]
    assert [sample.rollout for sample in samples_in(records)] == [0]


@pytest.mark.process
@in_memory
async def test_tasks_whose_code_hangs_are_reported_and_those_that_wait_for_an_engine_are_not(
    loop: Loop, functions: Path, tmp_path: Path
) -> None:
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
async def test_what_fails_ends_alone_and_a_task_without_any_sample_whole(loop: Loop, functions: Path) -> None:
    worker = loop.worker(config=with_producer(loop.config, f"{functions}:fails"))
    async with loop.engine(), loop.serving(main, worker):
        await loop.issue(3, num_rollouts=4)
        records = await loop.records(7)
        await loop.queue_is_empty()
    of = {task: [record for record in records if record.headers[HEADER_TASK] == str(task)] for task in range(3)}
    odd = tombstones_in(of[0])
    assert [(t.rollout, t.reason, t.group_size) for t in odd] == [(1, "failed", 4), (3, "failed", 4)]
    assert "a broken tool" in odd[0].detail
    # Tombstones first: a redelivered task may find its sample message stored already.
    assert [sample.rollout for sample in samples_in(of[0][2:])] == [0, 2]
    [stone] = tombstones_in(of[1])
    assert (stone.task, stone.rollout, stone.reason, stone.group_size) == (1, None, "failed", 4)
    assert (stone.producer, stone.deliveries) == ("producer-0", 1)
    assert isinstance(stone.claimed_s, float) and isinstance(stone.issued_s, float) and 0 < stone.issued_s <= stone.claimed_s
    assert [(t.rollout, t.reason, "numpy.float32" in t.detail) for t in tombstones_in(of[2])] == [(2, "failed", True), (3, "failed", True)]
    assert [(sample.rollout, sample.metadata) for sample in samples_in(of[2])] == [(0, {"score": 0.5}), (1, {"score": 0.5})]


async def test_a_task_that_was_given_back_says_how_often_it_was_claimed(loop: Loop) -> None:
    worker = loop.worker()
    async with loop.serving(main, worker):
        await loop.issue(1)
        # No engine is there yet: the presence names what is in hand.
        await until(lambda: worker.detail() == {"tasks": [0]})
    async with loop.engine(), loop.serving(main, again := loop.worker()):
        samples = samples_in(await loop.records(1))
        await loop.queue_is_empty()
        await until(lambda: again.detail() == {"tasks": []})
    assert {sample.deliveries for sample in samples} == {2}


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


@pytest.mark.process
@in_memory
async def test_a_plain_function_may_block(loop: Loop, functions: Path) -> None:
    worker = loop.worker(config=with_producer(loop.config, f"{functions}:plain"))
    async with loop.engine(), loop.serving(main, worker):
        await loop.issue(4, num_rollouts=4)
        samples = samples_in(await loop.records(4))
        await loop.queue_is_empty()
    assert {(sample.task, sample.rollout, sample.reward) for sample in samples} == {(t, k, 1.0) for t in range(4) for k in range(4)}


async def test_deliveries_alone_end_no_task(loop: Loop) -> None:
    """Drains, cut connections and dead neighbours raise JetStream's count; none of that is the task's fault."""
    await loop.issue(1)
    for _ in range(3 * loop.config.tasks.max_deliveries):
        [lease] = await loop.bus.claim("main", max=1, wait_s=5.0)
        await lease.retry()
    async with loop.engine(), loop.serving(main, loop.worker()):
        samples = samples_in(await loop.records(1))
        await loop.queue_is_empty()
    assert [(sample.task, sample.rollout) for sample in samples] == [(0, 0), (0, 1)]


async def test_a_task_that_cannot_be_read_ends_as_poison(loop: Loop) -> None:
    await loop.bus.publish(loop.subjects.tasks("main"), b"not a task")
    async with loop.engine(), loop.serving(main, loop.worker()):
        [stone] = tombstones_in(await loop.records(1))
        await loop.queue_is_empty()
    assert (stone.task, stone.reason) == (0, "poison")


@pytest.mark.process
@on_server
async def test_a_drain_gives_open_tasks_back_at_once(loop: Loop, functions: Path, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    begun.mkdir()
    worker = loop.worker(config=with_producer(loop.config, f"{functions}:hangs", options={"begun": str(begun)}))
    async with loop.engine():
        async with loop.serving(main, worker):
            await loop.issue(5)
            await until(lambda: len(list(begun.iterdir())) == 10)
        leases = await loop.bus.claim("main", max=10, wait_s=5.0)
        assert sorted(lease.sequence for lease in leases) == [1, 2, 3, 4, 5]
        assert {lease.deliveries for lease in leases} == {2}
        for lease in leases:
            await lease.retry()
        async with loop.serving(main, loop.worker(1)):
            assert sorted({sample.task for sample in samples_in(await loop.records(5))}) == [0, 1, 2, 3, 4]
            await loop.queue_is_empty()


async def test_a_dead_producers_tasks_are_taken_over_and_stored_once(loop: Loop) -> None:
    await loop.issue(4)
    # Claimed and never kept alive, as by a process that was killed.
    assert len(await loop.bus.claim("main", max=4, wait_s=5.0)) == 4
    async with loop.engine(), loop.serving(main, loop.worker()):
        samples = samples_in(await loop.records(4))
        await loop.queue_is_empty()
    assert sorted((s.task, s.rollout) for s in samples) == [(task, rollout) for task in range(4) for rollout in range(2)]


async def test_a_second_delivery_stores_nothing_new(loop: Loop) -> None:
    """A producer that died between its last record and `done`: the task comes again, its record does not."""
    await loop.issue(1)
    async with loop.engine(), loop.serving(main, loop.worker()):
        await loop.records(1)
        await loop.queue_is_empty()
        rows = samples_in(await loop.records(1))
        task = RolloutTask(run=loop.config.run.name, index=0, source="main", num_rollouts=2)
        await Publisher(loop.bus, loop.subjects).task(task, rows, [])
    assert (await loop.bus.state(SAMPLES)).last == 1


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


async def test_a_full_stream_stalls_and_goes_on(loop: Loop) -> None:
    for size in (50_000, 500):
        with pytest.raises(StreamFull):
            while True:
                await loop.bus.publish(loop.subjects.marks, b"x" * size)
    worker = loop.worker()
    async with loop.engine(), loop.serving(main, worker):
        await loop.issue(2)
        # Longer than the ack wait: the leases must be kept alive while the samples wait for room.
        await asyncio.sleep(2 * ACK_WAIT_S)
        await until(lambda: worker.state == "stalled: stream full")
        last = (await loop.bus.state(SAMPLES)).last
        assert (await loop.bus.state(TASKS)).messages == 2
        await loop.bus.trim(SAMPLES, through=last)
        await loop.queue_is_empty()
        found = []
        async with asyncio.timeout(60):
            async for message in loop.bus.read(SAMPLES, after=last):
                found.append(message)
                if len(found) == 2:
                    break
    assert sorted({sample.task for sample in samples_in(found)}) == [0, 1]
