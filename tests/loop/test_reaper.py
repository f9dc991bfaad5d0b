"""What the reaper ends, and what it leaves alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from streamrl.bus.memory import MemoryBus
from streamrl.bus.protocol import Bus, Message
from streamrl.consumers.training import worker as trainer_service
from streamrl.consumers.training.ledger import take_fence
from streamrl.consumers.training.reaper import Reaper
from streamrl.core.fold import fold
from streamrl.core.records import Ended, Rewarded, Rollouts, judge
from streamrl.core.state import FoldConfig, initial_state
from streamrl.data.model import ensure_model
from streamrl.errors import Fenced
from streamrl.producers.late import LateRewards
from streamrl.runtime.worker import Worker
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.samples import Tombstone
from streamrl.schemas.subjects import SAMPLES, TASKS, Subjects, kind_of
from streamrl.schemas.tasks import RolloutTask
from tests.support.bad_messages import patched, template
from tests.support.harness import make_run, read_ledger, services
from tests.support.world.world import table_config

CONFIG = FoldConfig(batch_tasks=2, max_staleness=1, group_size=2)


class Queue:
    """A run's queue and its fold, without anybody who works."""

    def __init__(self, bus: Bus, run: str) -> None:
        self.bus = bus
        self.run = run
        self.subjects = Subjects(run)
        self.state = initial_state(CONFIG)

    async def issue(self, count: int) -> None:
        for index in range(count):
            task = RolloutTask(run=self.run, index=index, source="main", num_rollouts=2)
            await self.bus.publish(self.subjects.tasks("main"), encode(task))

    async def take(self, *tasks: int) -> None:
        """Acknowledge tasks."""
        for lease in await self.bus.claim("main", max=100, wait_s=5.0):
            await (lease.done() if lease.sequence - 1 in tasks else lease.retry())

    async def end(self, task: int, rollout: int | None = None) -> None:
        stone = Tombstone(task=task, reason="failed", rollout=rollout, group_size=2, source="main")
        await self.bus.publish(self.subjects.tombstones("main"), encode(stone))

    async def stones(self) -> list[tuple[int, str, str | None]]:
        """(task, reason, source) of the tombstones that the reaper stored."""
        found = []
        for sequence in range(1, (await self.bus.state(SAMPLES)).last + 1):
            message = await self.bus.fetch(SAMPLES, sequence)
            if kind_of(message.subject) != "tombstones":
                continue
            stone = decode(message.body, Tombstone)
            found += [(stone.task, stone.reason, stone.source)] if stone.reason == "lost" else []
        return found

    async def fold(self) -> None:
        """Take in what is there, as the training thread does."""
        for sequence in range(self.state.cursor + 1, (await self.bus.state(SAMPLES)).last + 1):
            message = await self.bus.fetch(SAMPLES, sequence)
            record, _ = judge(message.subject, sequence, message.body, message.headers.get("Streamrl-Task"))
            assert isinstance(record, Ended | Rollouts | Rewarded)
            self.state, _ = fold(self.state, record, CONFIG)

    async def reaper(self) -> Reaper:
        return Reaper(self.bus, self.subjects, "main", await take_fence(self.bus, "main"), lambda: self.state, CONFIG)


@pytest.fixture
def queue(bus: Bus, run_id: str) -> Queue:
    return Queue(bus, run_id)


async def test_nothing_is_ended_that_is_held_or_has_ended_or_was_never_issued(queue: Queue) -> None:
    reaper = await queue.reaper()
    assert await reaper.look() == (), "the queue is empty"
    await queue.issue(3)
    assert await reaper.look() == ()
    assert len(await queue.bus.claim("main", max=1, wait_s=5.0)) == 1
    await queue.end(1)
    await queue.take(1)
    await queue.fold()
    assert await reaper.look() == () and await queue.stones() == []


async def test_a_task_that_nobody_holds_ends_as_lost_once(queue: Queue) -> None:
    await queue.issue(4)
    await queue.end(2, 0)
    await queue.take(1, 2)
    await queue.fold()
    reaper = await queue.reaper()
    assert await reaper.look() == (1, 2)
    assert await queue.stones() == [(1, "lost", "main"), (2, "lost", "main")]
    assert (await queue.bus.publish(queue.subjects.tombstones("main"), b"", id="lost-2")).duplicate, "one that is stored is known by its id"
    await queue.fold()
    assert (queue.state.retired, queue.state.granted) == (2, 6)
    assert await reaper.look() == ()


async def test_a_rollout_whose_request_for_a_reward_is_gone_ends_as_lost_and_one_that_is_answered_does_not(queue: Queue) -> None:
    """Requests 1 (queued), 2 (answered), 3 (acknowledged without an answer) and 9, which nobody has stored."""
    await queue.issue(4)
    await queue.take(0, 1, 2, 3)
    for number in range(1, 4):
        assert (await queue.bus.publish(queue.subjects.grading("main"), b"request %d" % number)).sequence == number
    for task, number in enumerate((1, 2, 3, 9)):
        samples = patched(template((0, 1), reward=None, group_size=2, grading=number), task, 0)
        await queue.bus.publish(queue.subjects.samples("main"), samples)
    await queue.fold()
    reaper = await queue.reaper()
    rewards = LateRewards(queue.bus, queue.subjects)
    first, *others = await queue.bus.claim("main", max=3, wait_s=5.0, stream="grading")
    for lease in others:
        await lease.done()
    await rewards.publish(1, 0, 1.0)  # behind what has been folded: the look waits for it
    folding = asyncio.create_task(queue.fold())
    assert await reaper.look() == ()
    await folding
    assert await queue.stones() == [(3, "lost", "main")] * 2, "what is behind a request that somebody holds may be held too"
    await queue.fold()
    await first.done()
    assert await reaper.look() == ()
    assert sorted(task for task, _, _ in await queue.stones()) == [0, 0, 1, 2, 2, 3, 3], "one of task 1 has its reward"
    await queue.fold()
    assert await reaper.look() == () and len(await queue.stones()) == 7
    assert queue.state.pending == {} and queue.state.retired == 4


async def test_at_the_run_s_end_what_nobody_folds_any_more_counts(queue: Queue) -> None:
    await queue.issue(4)
    await queue.take(0, 1, 2)
    await queue.end(0)
    await queue.fold()
    await queue.end(1)
    await queue.end(2, 1)
    reaper, state = await queue.reaper(), queue.state
    await reaper.last_look()
    assert await queue.stones() == [(2, "lost", "main")], "1 has ended behind the cursor, half of 2 has, 3 is in the queue"
    assert queue.state is state
    await queue.reaper()
    with pytest.raises(Fenced):
        await queue.take(3)
        await reaper.last_look()


async def test_what_is_stored_of_a_lost_task_goes_with_it(queue: Queue) -> None:
    await queue.issue(2)
    for key in ("checkpoints/0/0", "checkpoints/0/1", "attempts/0", "checkpoints/1/0", "attempts/1"):
        await queue.bus.kv.put(key, b"1")
    await queue.take(0)
    assert await (await queue.reaper()).look() == (0,)
    async with asyncio.timeout(20):
        while await queue.bus.kv.keys("checkpoints/0/") or await queue.bus.kv.get("attempts/0") is not None:
            await asyncio.sleep(0.05)
    assert await queue.bus.kv.keys("checkpoints/") == ["checkpoints/1/0"] and await queue.bus.kv.get("attempts/1") is not None


async def test_records_that_are_not_folded_yet_are_waited_for(queue: Queue) -> None:
    await queue.issue(2)
    await queue.end(0)
    await queue.take(0, 1)
    looking = asyncio.create_task((await queue.reaper()).look())
    await asyncio.sleep(0.5)
    assert not looking.done()
    await queue.fold()
    assert await looking == (1,) and await queue.stones() == [(1, "lost", "main")]


async def test_a_trainer_that_is_in_a_step_has_no_samples_fetched_meanwhile(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.consumers.training.reaper.LOOK_EVERY_S", 3600.0)
    await queue.issue(2)
    await queue.end(0)
    await queue.take(0, 1)
    asked: list[str] = []
    fetch = queue.bus.fetch

    async def counted(stream: str, sequence: int) -> Message:
        asked.append(stream)
        return await fetch(stream, sequence)

    monkeypatch.setattr(queue.bus, "fetch", counted)
    looking = asyncio.create_task((await queue.reaper()).look())
    await asyncio.sleep(0.5)
    assert not looking.done() and SAMPLES not in asked
    await queue.fold()
    assert await looking == (1,)


async def test_an_end_that_is_gone_is_not_waited_for(run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.consumers.training.reaper.LOOK_EVERY_S", 0.2)
    bus = MemoryBus(run_id)
    queue = Queue(bus, run_id)
    await queue.issue(2)
    await queue.end(0)
    await queue.take(0, 1)
    bus.lose(SAMPLES, 1, known_end=True)
    async with asyncio.timeout(20):
        assert await (await queue.reaper()).look() == (0, 1)
    await bus.close()


async def test_a_reaper_with_an_older_fence_ends_nothing(queue: Queue) -> None:
    await queue.issue(1)
    await queue.take(0)
    old = await queue.reaper()
    new = await queue.reaper()
    with pytest.raises(Fenced):
        await old.look()
    assert await queue.stones() == []
    assert await new.look() == (0,)


async def test_demonstrations_end_under_their_source(bus: Bus, run_id: str) -> None:
    queue = Queue(bus, run_id)
    queue.state = initial_state(replace(CONFIG, warmup_steps=3))
    await queue.issue(1)
    await queue.take(0)
    assert await (await queue.reaper()).look() == (0,)
    assert await queue.stones() == [(0, "lost", "warmup")]


@pytest.mark.process
async def test_a_lockstep_run_that_lost_the_end_of_its_samples_goes_on(tmp_path: Path) -> None:
    run, config = make_run(tmp_path, table_config(tmp_path, run={"steps": 6}, tasks={"max_staleness": 0}))
    ensure_model(config, run.model_dir)
    bus = MemoryBus(config.run.name, config.bus)
    async with services(config, run, bus, ["feeder", "engine"]), asyncio.timeout(90):
        async with services(config, run, bus, ["trainer"]):  # it begins the run, and then it is down
            while await bus.last(Subjects(config.run.name).weights("policy")) is None:
                await asyncio.sleep(0.02)
        async with services(config, run, bus, ["producer"]):
            while (await bus.state(TASKS)).messages or (await bus.state(TASKS)).last < config.tasks.batch_tasks:
                await asyncio.sleep(0.02)
            last = (await bus.state(SAMPLES)).last
            bus.lose(SAMPLES, last - 1, last)
            await trainer_service.main(Worker(config=config, run_dir=run, bus=bus, kind="trainer", index=0))
    ledger = await read_ledger(bus, config.run.name)
    await bus.close()
    assert len(ledger) == 6
    assert [drop.reason for entry in ledger for drop in entry.drops].count("lost") == 2
