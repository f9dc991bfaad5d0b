"""A feeder with several sources: what each task takes is on record before the task is; and a user's curriculum of their weights."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest

from streamrl.bus.protocol import Bus
from streamrl.bus.reading import read_key
from streamrl.config.load import convert
from streamrl.config.tree import Config
from streamrl.data.characters import write_tokenizer
from streamrl.data.mixed import MixedRows
from streamrl.data.streamed import open_task_rows
from streamrl.data.tokenizer import load_tokenizer
from streamrl.errors import ConfigError
from streamrl.producers.curriculum import Curriculum, call, checked, statistics
from streamrl.producers.feeder import Feeder, plan_tasks
from streamrl.producers.mixture import settled
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.control import Grant, MixtureRecord
from streamrl.schemas.ledger import LedgerEntry, SourceTally
from streamrl.schemas.subjects import KEY_GRANTED, KEY_MIXTURE, TASKS, Subjects
from streamrl.schemas.tasks import RolloutTask
from streamrl.schemas.versions import Version
from tests.support.errors import raises
from tests.support.producing import in_memory

SIZES = {"sums": 5, "words": 300}


@pytest.fixture
def config(tmp_path: Path, run_id: str) -> Config:
    for name, size in SIZES.items():
        key = "question" if name == "words" else "prompt"
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({key: f"{n}", "label": name}) + "\n" for n in range(size)))
    sources = [
        {"name": "sums", "train": f"{tmp_path}/sums.jsonl", "weight": [[0, 3], [2, 1]]},
        {"name": "words", "train": f"{tmp_path}/words.jsonl", "prompt_key": "question"},
    ]
    return convert({"run": {"name": run_id}, "tasks": {"batch_tasks": 4}, "data": {"sources": sources}}, where="test")


@pytest.fixture
def rows(config: Config, tmp_path: Path) -> MixedRows:
    write_tokenizer(tmp_path)
    found = open_task_rows(config, load_tokenizer(tmp_path), tmp_path / "kept")
    assert isinstance(found, MixedRows)
    return found


async def issued(bus: Bus, last: int) -> list[RolloutTask]:
    async with asyncio.timeout(60):
        while (await bus.state(TASKS)).last < last:
            await asyncio.sleep(0.01)
    return [decode((await bus.fetch(TASKS, sequence)).body, RolloutTask) for sequence in range(1, last + 1)]


async def test_restarts_and_a_second_feeder_leave_no_row_out(bus, config, rows):
    async def feed(granted: Grant, feeders: int) -> None:
        await bus.kv.put(KEY_GRANTED, encode(granted))
        running = [asyncio.create_task(Feeder(bus, Subjects(config.run.name), config, rows).run()) for _ in range(feeders)]
        await issued(bus, granted.granted)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    await feed(Grant(40, 0, 0), 1)
    await feed(Grant(400, 1, 40), 2)
    await feed(Grant(404, 2, 360), 2)
    await feed(Grant(1404, 7, 404), 1)
    record = await read_key(bus.kv, KEY_MIXTURE, MixtureRecord)
    assert record is not None
    assert [(one.first, one.version, one.weights) for one in record.segments] == [(0, 0, (3.0, 1.0)), (404, 2, (1.0, 1.0))]
    tasks = await issued(bus, 1404)
    counts = Counter(task.metadata["data_source"] for task in tasks[404:])
    assert counts == {"sums": 500, "words": 500}
    for name, size in SIZES.items():
        own = [task for task in tasks if task.metadata["data_source"] == name]
        assert {task.label for task in own} == {name}
        for epoch in range(own[-1].data_epoch):
            assert sorted(task.row for task in own if task.data_epoch == epoch) == list(range(size)), f"pass {epoch} over {name}"
    # Whoever has the record plans the same tasks, but for the versions that depend on the grant.
    again = plan_tasks(Grant(1404, 7, 404), 0, 1404, MixedRows(rows.names, rows.sets, record.segments), config)
    assert [(task.metadata, task.row, task.data_epoch) for task in again] == [(task.metadata, task.row, task.data_epoch) for task in tasks]


async def test_the_warm_up_has_the_mixture_of_version_0_and_the_schedule_begins_after_it(bus, config, rows):
    during = await settled(bus, rows, config, Grant(1000, 3, 0, None))
    assert during.segments == () and await read_key(bus.kv, KEY_MIXTURE, MixtureRecord) is None
    tasks = plan_tasks(Grant(1000, 3, 0, None), 0, 1000, during, config)
    assert Counter(task.metadata["data_source"] for task in tasks) == {"sums": 750, "words": 250}
    after = await settled(bus, rows, config, Grant(1000, 3, 992, 1000))
    assert [(one.first, one.version, one.weights) for one in after.segments] == [(0, 3, (1.0, 1.0))]
    tasks = plan_tasks(Grant(2000, 4, 1000, 1000), 1000, 2000, after, config)
    assert Counter(task.metadata["data_source"] for task in tasks) == {"sums": 500, "words": 500}
    assert min(task.row for task in tasks if task.data_epoch == 0) == 0


async def test_a_record_of_other_sources_is_refused(bus, config, rows):
    await settled(bus, rows, config, Grant(8, 0, 0))
    with raises(ConfigError, key="data.sources"):
        await settled(bus, MixedRows(("sums", "others"), rows.sets), config, Grant(8, 0, 0))
    await bus.kv.put(KEY_MIXTURE, b"\xc1")
    with pytest.raises(Exception, match="mixture"):
        await settled(bus, rows, config, Grant(8, 0, 0))


CODE = """
import os, sys, time

def by_reward(version, sources):
    print("not an answer")
    return {name: 1 + (one["reward"] or 0) * version for name, one in sources.items()}

def one(version):
    return {}
""" + "".join(
    f"\ndef {name}(version, sources):\n    {line}\n"
    for name, line in {
        "fails": 'raise ValueError("no idea")',
        "hangs": "time.sleep(600)",
        "leaves": "os._exit(3)",
        "quits": 'sys.exit("enough")',
        "talks": 'os.write(2, b"x" * 100000); return {"a": float("nan"), "b": 1}',
        "large": 'return {"x" * (2 << 20): 1}',
    }.items()
)


@pytest.fixture
def asked(tmp_path: Path, run_id: str) -> Config:
    (tmp_path / "mine.py").write_text(CODE)
    sources = [{"name": "a", "train": "a", "weight": 3}, {"name": "b", "train": "b"}]
    data = {"sources": sources, "curriculum": f"{tmp_path}/mine.py:by_reward", "curriculum_every": 2}
    return convert({"run": {"name": run_id}, "data": data}, where="test")


def entry(number: int, **sources: SourceTally) -> LedgerEntry:
    kept = {"run": "r", "trainer": "main", "source": "main", "used": (), "cursor": 1, "granted": 1, "retired": 1}
    return LedgerEntry(version=Version(0, number), sources=sources, **kept)  # type: ignore[arg-type]


def test_statistics_are_weighted_by_groups() -> None:
    entries = [entry(1, a=SourceTally(3, 1.0), b=SourceTally(1)), entry(2, a=SourceTally(1, 0.0), other=SourceTally(9, 1.0))]
    assert statistics(entries, {"a": 3.0, "b": 1.0, "c": 2.0}) == {
        "a": {"weight": 3.0, "groups": 4, "reward": 0.75},
        "b": {"weight": 1.0, "groups": 1, "reward": None},
        "c": {"weight": 2.0, "groups": 0, "reward": None},
    }


SAID = (None, 3, [], {}, {"a": 1}, {"a": 1, "b": 1, "c": 1}, {"a": -1, "b": 1}, {"a": 0, "b": 0}, {"a": None, "b": 1})
WEIGHTS = (float("nan"), float("inf"), "1", True)


@pytest.mark.parametrize("said", [*SAID, *({"a": one, "b": 1} for one in WEIGHTS)], ids=repr)
def test_what_are_no_weights_is_refused(said: object) -> None:
    with raises(ConfigError, key="data.curriculum"):
        checked(said, ["a", "b"])


@pytest.mark.process
@in_memory
async def test_a_verdict_is_on_record_before_it_is_used_and_a_restart_goes_on_with_it(bus: Bus, asked: Config) -> None:
    subjects, rows = Subjects(asked.run.name), MixedRows(("a", "b"), ())
    for number in range(1, 5):
        body = encode(entry(number, a=SourceTally(1, 0.0), b=SourceTally(1, 0.5 if number > 2 else 0.0)))
        await bus.publish(subjects.ledger("main"), body, id=str(number))
    curriculum = Curriculum(bus, subjects, asked)
    first = await settled(bus, rows, asked, Grant(16, 0, 0), curriculum.weights)
    assert [one.weights for one in first.segments] == [(3.0, 1.0)]
    async with asyncio.timeout(60):
        while len((found := await settled(bus, rows, asked, Grant(32, 4, 16), curriculum.weights)).segments) == 1:
            await asyncio.sleep(0.05)
    assert [(one.first, one.version, one.weights) for one in found.segments] == [(0, 0, (3.0, 1.0)), (32, 4, (1.0, 3.0))]
    again = Curriculum(bus, subjects, asked)
    assert (await settled(bus, rows, asked, Grant(40, 5, 24), again.weights)).segments == found.segments
    assert not curriculum.error


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fails", "ValueError: no idea (mine.py line 12)"),
        ("hangs", "no answer within"),
        ("leaves", "ended without"),
        ("quits", "ended without"),
        ("large", "ended without"),
        ("one", "curriculum"),
        ("none", "none"),
    ],
)
async def test_whatever_it_does_is_said_and_ends_nothing(asked: Config, name: str, said: str) -> None:
    mine = convert({"data": {"curriculum": asked.data.curriculum.replace("by_reward", name)}}, where="test")
    with raises(ConfigError, key="data.curriculum") as caught:
        await call(mine, {"version": 1, "sources": {}}, 3.0 if name == "hangs" else 60.0)
    assert said in caught.value.message


@pytest.mark.process
@in_memory
async def test_weights_stay_where_it_fails(bus: Bus, asked: Config) -> None:
    data = {"sources": [{"name": "a", "train": "a"}, {"name": "b", "train": "b"}], "curriculum_every": 1}
    mine = convert({"data": data | {"curriculum": asked.data.curriculum.replace("by_reward", "talks")}}, where="test")
    curriculum, rows = Curriculum(bus, Subjects(asked.run.name), mine), MixedRows(("a", "b"), ())
    await settled(bus, rows, mine, Grant(16, 0, 0), curriculum.weights)
    async with asyncio.timeout(60):
        while not curriculum.error:
            assert len((await settled(bus, rows, mine, Grant(32, 4, 16), curriculum.weights)).segments) == 1
            await asyncio.sleep(0.05)
    assert "at version 4" in curriculum.error and "'a': 'nan'" in curriculum.error
    await curriculum.close()
