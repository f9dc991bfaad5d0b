"""The feeder: what a plan of tasks holds, and what is issued of it, by several and after restarts."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import nats
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.bus.protocol import Bus
from streamrl.bus.reading import read_key
from streamrl.config.loss import LossConfig
from streamrl.config.tree import Config, DataConfig, EngineConfig, RunConfig, TasksConfig, TrainerConfig
from streamrl.data.characters import write_tokenizer
from streamrl.data.model import ensure_model
from streamrl.data.problems import Problem, Problems, Unusable
from streamrl.data.streamed import open_task_rows
from streamrl.data.tokenizer import load_tokenizer
from streamrl.errors import ConfigError, DataError, SchemaError
from streamrl.producers.feeder import Feeder, check_dataset, main, min_version, plan_tasks, settle_data
from streamrl.runtime.rundir import RunDir
from streamrl.runtime.worker import Worker
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.control import DataRecord, Grant, RunRecord
from streamrl.schemas.events import FULL_STREAM
from streamrl.schemas.subjects import KEY_DATA, KEY_GRANTED, KEY_RUN, TASKS, Subjects
from streamrl.schemas.tasks import Refused, RolloutTask
from streamrl.schemas.versions import Version
from tests.support.processes import until

PROBLEMS = Problems(
    problems=tuple(Problem(row=i, line=i + 1, prompt_ids=(i, i + 1), prompt=f"p{i}", label=f"l{i}", metadata={"i": i}) for i in range(7)),
    digest="digest",
)
CONFIG = Config(run=RunConfig(name="r", seed=3), tasks=TasksConfig(batch_tasks=4, num_rollouts=2, max_staleness=1))


def test_a_task_carries_its_row_and_a_plan_ends_with_the_grant_or_where_asked():
    for task in plan_tasks(Grant(8, 0, 0), 0, 100, PROBLEMS, CONFIG):
        problem = PROBLEMS[task.row]
        assert (task.prompt_ids, task.prompt, task.label) == (problem.prompt_ids, problem.prompt, problem.label)
        assert (task.metadata, task.sampling, task.run, task.policy) == (problem.metadata, CONFIG.sampling, "r", "policy")
    assert [task.index for task in plan_tasks(Grant(8, 0, 0), 3, 6, PROBLEMS, CONFIG)] == [3, 4, 5]
    assert [task.index for task in plan_tasks(Grant(8, 0, 0), 6, 100, PROBLEMS, CONFIG)] == [6, 7]
    assert plan_tasks(Grant(8, 0, 0), 8, 100, PROBLEMS, CONFIG) == []
    config = msgspec.structs.replace(CONFIG, data=DataConfig(shuffle=False))
    assert [task.row for task in plan_tasks(Grant(9, 0, 0), 0, 9, PROBLEMS, config)] == [0, 1, 2, 3, 4, 5, 6, 0, 1]


def test_a_row_that_cannot_be_used_is_a_task_with_the_reason():
    class Rows(Problems, frozen=True):
        def take(self, rows):
            return [Unusable(row=row, reason="row_broken", detail="line 3") if row == 2 else self.problems[row] for row in rows]

    config = msgspec.structs.replace(CONFIG, data=DataConfig(shuffle=False))
    rows = Rows(problems=PROBLEMS.problems, digest="d")
    tasks, plain = (plan_tasks(Grant(7, 0, 0), 0, 7, given, config) for given in (rows, PROBLEMS))
    assert tasks[:2] + tasks[3:] == plain[:2] + plain[3:]
    bare = {"prompt_ids": (), "prompt": None, "label": None, "metadata": {}, "refused": Refused("row_broken", "line 3")}
    assert tasks[2] == msgspec.structs.replace(plain[2], **bare)
    assert decode(encode(tasks[2]), RolloutTask) == tasks[2] and b"refused" not in encode(tasks[1])


def test_seeds_differ_by_task_and_by_run_seed():
    def seeds(config):
        return [task.seed for task in plan_tasks(Grant(20, 0, 0), 0, 20, PROBLEMS, config)]

    other = msgspec.structs.replace(CONFIG, run=RunConfig(name="r", seed=4))
    assert len({*seeds(CONFIG), *seeds(other)}) == 40


def test_the_warm_up_comes_first_and_the_rows_begin_again_after_it():
    during = plan_tasks(Grant(8, 0, 0, None), 0, 8, PROBLEMS, CONFIG)
    assert {(task.source, task.num_rollouts, task.min_version) for task in during} == {("warmup", 1, 0)}
    after = plan_tasks(Grant(16, 1, 4, 8), 0, 16, PROBLEMS, CONFIG)
    assert after[:8] == during
    assert {(task.source, task.num_rollouts) for task in after[8:]} == {("main", 2)}
    straight = plan_tasks(Grant(8, 0, 0, 0), 0, 8, PROBLEMS, CONFIG)
    assert [(task.row, task.data_epoch) for task in after[8:]] == [(task.row, task.data_epoch) for task in straight]


def test_min_version_by_hand():
    """B = 4, version 5, 20 tasks retired: the open ones are trained in batches of four, by versions 5, 6 and 7."""
    for staleness, expected in ((0, [5, 5, 5, 5]), (1, [4, 4, 4, 4, 5, 5, 5, 5]), (2, [3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5])):
        config = msgspec.structs.replace(CONFIG, tasks=TasksConfig(batch_tasks=4, max_staleness=staleness))
        grant = Grant(20 + 4 * (staleness + 1), 5, 20)
        assert [task.min_version for task in plan_tasks(grant, 20, 99, PROBLEMS, config)] == expected, staleness
        later = plan_tasks(msgspec.structs.replace(grant, epoch=2), 20, 99, PROBLEMS, config)
        assert [task.least for task in later] == [Version(2, number) for number in expected]


@given(
    version=st.integers(0, 50), batch=st.integers(1, 9), staleness=st.integers(0, 8), refills=st.integers(0, 30), offset=st.integers(0, 100)
)
def test_min_version_keeps_the_bound_and_never_waits_for_the_future(version, batch, staleness, refills, offset):
    config = msgspec.structs.replace(CONFIG, tasks=TasksConfig(batch_tasks=batch, max_staleness=staleness))
    retired = version * batch + refills
    grant = Grant(retired + (staleness + 1) * batch, version, retired)
    index = min(retired + offset, grant.granted - 1)
    lowest = min_version(grant, index, config)
    trained_from = version + (index - retired) // batch
    assert 0 <= lowest <= version
    assert trained_from - lowest <= staleness
    assert lowest in (0, trained_from - staleness)


def test_an_estimator_that_asks_for_it_gets_one_greedy_rollout_more():
    config = msgspec.structs.replace(CONFIG, loss=LossConfig(advantage="remax"))
    tasks, plain = (plan_tasks(Grant(8, 0, 0, 3), 0, 8, PROBLEMS, one) for one in (config, CONFIG))
    assert tasks[:3] == plain[:3] and tasks[2].baseline is None, "demonstrations have none"
    for task, one in zip(tasks[3:], plain[3:], strict=True):
        assert (task.num_rollouts, task.baseline) == (3, 2)
        assert msgspec.structs.replace(task, num_rollouts=2, greedy_baseline=msgspec.UNSET) == one
        assert [task.for_rollout(k).sampling.temperature for k in range(3)] == [1.0, 1.0, 0.0]
        assert decode(encode(task), RolloutTask) == task and b"greedy_baseline" not in encode(one)


MakeBus = Callable[..., Awaitable[Bus]]


@pytest.fixture
def config(run_id: str) -> Config:
    return Config(run=RunConfig(name=run_id), tasks=TasksConfig(batch_tasks=4, num_rollouts=2))


@contextlib.asynccontextmanager
async def feeding(config: Config, *buses: Bus) -> AsyncIterator[list[Feeder]]:
    feeders = [Feeder(bus, Subjects(config.run.name), config, PROBLEMS) for bus in buses]
    tasks = [asyncio.create_task(feeder.run()) for feeder in feeders]
    try:
        yield feeders
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results), results


async def grant(bus: Bus, *values: Any) -> Grant:
    grant = Grant(*values)
    await bus.kv.put(KEY_GRANTED, encode(grant))
    return grant


async def issued(bus: Bus, last: int) -> list[RolloutTask]:
    """All tasks, once there are `last` of them."""
    async with asyncio.timeout(60):
        while (await bus.state(TASKS)).last < last:
            await asyncio.sleep(0.01)
    assert (await bus.state(TASKS)).last == last
    messages = [await bus.fetch(TASKS, sequence) for sequence in range(1, last + 1)]
    tasks = [decode(message.body, RolloutTask) for message in messages]
    assert [message.subject for message in messages] == [Subjects(task.run).tasks(task.source) for task in tasks]
    return tasks


async def test_it_issues_what_is_granted_and_waits_for_more(bus, config):
    async with feeding(config, bus) as [feeder]:
        first = await grant(bus, 8, 0, 0)
        assert await issued(bus, 8) == plan_tasks(first, 0, 8, PROBLEMS, config)
        second = await grant(bus, 600, 1, 4)
        assert (await issued(bus, 600))[8:] == plan_tasks(second, 8, 600, PROBLEMS, config)
        await until(lambda: feeder.num_issued >= 600)  # the receipt comes after the stream has the task
        assert feeder.num_issued == 600


async def test_an_older_grant_changes_nothing(bus, config):
    async with feeding(config, bus):
        await grant(bus, 8, 1, 4)
        await issued(bus, 8)
        await grant(bus, 4, 0, 0)
        last = await grant(bus, 12, 2, 8)
        assert (await issued(bus, 12))[8:] == plan_tasks(last, 8, 12, PROBLEMS, config)


async def test_claimed_tasks_are_not_issued_again(bus, config):
    """A work queue forgets what is done, but its last sequence stays."""
    async with feeding(config, bus):
        await grant(bus, 4, 0, 0)
        await issued(bus, 4)
    for lease in await bus.claim("main", max=4, wait_s=5):
        await lease.done()
    assert (await bus.state(TASKS)).messages == 0
    await grant(bus, 6, 0, 2)
    async with feeding(config, bus) as [feeder]:
        leases = []
        async with asyncio.timeout(60):
            while len(leases) < 2:
                leases += await bus.claim("main", max=4, wait_s=1)
            await until(lambda: feeder.num_issued >= 2)  # the receipt comes after the stream has the task
    assert [(lease.sequence, decode(lease.body, RolloutTask).index) for lease in leases] == [(5, 4), (6, 5)]
    assert feeder.num_issued == 2


async def test_several_feeders_issue_every_task_once(make_bus: MakeBus, config):
    buses = [await make_bus() for _ in range(3)]
    async with feeding(config, *buses) as feeders:
        for granted in (3, 700, 1500):
            last = await grant(buses[0], granted, 0, 0)
            assert await issued(buses[0], granted) == plan_tasks(last, 0, granted, PROBLEMS, config)
        assert sum(feeder.num_issued for feeder in feeders) >= 1500


@pytest.mark.nats
async def test_a_full_stream_stalls_it_and_it_goes_on_by_itself(nats_bus, nats_address, config):
    client = await nats.connect(nats_address.url, user=nats_address.user, password=nats_address.password)
    try:
        stream = client.jetstream()
        name = next(info.config.name for info in await stream.streams_info() if f"{config.run.name}.tasks" in (info.config.subjects or ()))
        assert name is not None
        settings = (await stream.stream_info(name)).config
        await stream.update_stream(settings.evolve(max_msgs=10))
        async with feeding(config, nats_bus) as [feeder]:
            now = await grant(nats_bus, 30, 0, 0)
            await until(lambda: feeder.full == FULL_STREAM)
            assert (await nats_bus.state(TASKS)).last == 10
            await stream.update_stream(settings.evolve(max_msgs=-1))
            assert await issued(nats_bus, 30) == plan_tasks(now, 0, 30, PROBLEMS, config)
            assert feeder.num_full >= 1
            await until(lambda: not feeder.full)
    finally:
        await client.close()


async def test_a_grant_that_cannot_be_read_ends_it(bus, config):
    feeder = Feeder(bus, Subjects(config.run.name), config, PROBLEMS)
    await bus.kv.put(KEY_GRANTED, b"\xc1")
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(feeder.run(), 20)
    assert caught.group_contains(SchemaError, match="key granted")


def record(**changes) -> RunRecord:
    values = {
        "run": "run",
        "config": "",
        "dataset_digest": "digest",
        "num_rows": 7,
        "code_version": "",
        "fingerprint": {},
        "created_s": 0.0,
    }
    return RunRecord(**{**values, **changes})


@pytest.mark.parametrize("changes", [{"dataset_digest": "other"}, {"num_rows": 8}])
async def test_another_dataset_than_the_run_record_names_is_refused(bus, config, changes):
    await check_dataset(bus, PROBLEMS, config)
    await bus.kv.put(KEY_RUN, encode(record()))
    await check_dataset(bus, PROBLEMS, config)
    await bus.kv.put(KEY_RUN, encode(record(**changes)))
    with pytest.raises(ConfigError, match=r"the run .* started with"):
        await check_dataset(bus, PROBLEMS, config)


async def test_the_worker_from_file_to_stream(bus, config, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i}+1=", "label": str(i + 1)}) + "\n" for i in range(5)))
    config = Config(
        run=RunConfig(name=config.run.name, dir=str(tmp_path)),
        data=DataConfig(train=f"{rows}@[1:]", shuffle=False),
        engine=EngineConfig(kind="table"),
        trainer=TrainerConfig(backend="table"),
    )
    run = RunDir(tmp_path / config.run.name)
    run.create()
    ensure_model(config, run.model_dir)
    worker = Worker(config=config, run_dir=run, bus=bus, kind="feeder", index=0)
    service = asyncio.create_task(main(worker))
    await grant(bus, 6, 0, 0)
    tasks = await issued(bus, 6)
    async with asyncio.timeout(60):
        while (kept := await read_key(bus.kv, KEY_DATA, DataRecord)) is None:
            await asyncio.sleep(0.01)
    assert kept.rows == 4
    worker.draining.set()
    await asyncio.wait_for(service, 60)
    assert [(task.prompt, task.label, task.row, task.data_epoch) for task in tasks[:5]] == [
        ("1+1=", "2", 0, 0),
        ("2+1=", "3", 1, 0),
        ("3+1=", "4", 2, 0),
        ("4+1=", "5", 3, 0),
        ("1+1=", "2", 0, 1),
    ]


def rows_of(tmp_path, count: int, **data) -> Config:
    """The configuration of a set of that many rows, each with its own number."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}", "label": str(i)}) + "\n" for i in range(count)))
    return Config(run=RunConfig(dir=str(tmp_path)), data=DataConfig(train=str(path), **data))


async def test_rows_that_are_not_those_of_the_first_start_end_the_run(bus, tmp_path):
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    config = rows_of(tmp_path, 9)
    for _ in range(2):
        await settle_data(bus, open_task_rows(config, tokenizer, tmp_path / "kept"), config)
    config = rows_of(tmp_path, 8)
    with pytest.raises(ConfigError, match=r"expected 9 rows .* got 8 rows"):
        await settle_data(bus, open_task_rows(config, tokenizer, tmp_path / "kept"), config)


async def test_a_set_whose_rows_are_broken_ends_the_feeder(bus, config, tmp_path):
    write_tokenizer(tmp_path)
    data = rows_of(tmp_path, 40, prompt_key="question").data
    config = msgspec.structs.replace(config, data=data)
    feeder = Feeder(bus, Subjects(config.run.name), config, open_task_rows(config, load_tokenizer(tmp_path), tmp_path / "kept"))
    await grant(bus, 64, 0, 0)
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(feeder.run(), 20)
    assert caught.group_contains(DataError, match="got 64 of 64")
    assert feeder.refused == {"row_broken": 64}
