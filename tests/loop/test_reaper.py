"""Runs that end tasks: samples are lost, rollouts hang, rows cannot be used. The reaper: tests/consumers/training/test_reaper.py."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from streamrl.bus.memory import MemoryBus
from streamrl.consumers.training import worker as trainer_service
from streamrl.core.fold_config import fold_config
from streamrl.data.model import ensure_model
from streamrl.errors import ConfigError
from streamrl.history.backtest import read_history
from streamrl.history.branch import train_branch
from streamrl.history.branch_file import read_branch_ledger
from streamrl.history.replay import Range, verify
from streamrl.history.replay_log import read_past
from streamrl.history.source import open_source
from streamrl.runtime.worker import Worker
from streamrl.schemas.subjects import SAMPLES, TASKS, Subjects
from tests.support.digits import TABLE, write_digits
from tests.support.errors import raises
from tests.support.harness import make_run, read_ledger, services
from tests.support.recorded_run import FIXED, make_recorded
from tests.support.ups import Ups
from tests.support.world.world import table_config


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


PRODUCER = """
import asyncio

async def hangs(task, engine):
    if task.index % 9 == 4:
        await asyncio.sleep(3600)
    chat = engine.chat(task)
    await chat.generate()
    return chat.episode()
"""
STEPS = 14
EXPIRE = 3


@pytest.mark.process
@pytest.mark.parametrize("stale", ["drop", pytest.param("mask", marks=pytest.mark.slow)])
async def test_hung_rollouts_expire_and_replay_branch_and_back_test_agree(tmp_path: Path, stale: str) -> None:
    (tmp_path / "hangs.py").write_text(PRODUCER)
    config = table_config(
        tmp_path,
        run={"name": "hung", "steps": STEPS},
        tasks={"stale": stale, "expire_versions": EXPIRE},
        producer={"function": f"{tmp_path / 'hangs.py'}:hangs", "concurrency": 12, "children": 1},
        **FIXED,
    )
    recorded = await make_recorded(tmp_path, config)
    assert len(recorded.ledger) == STEPS
    ends = {drop.task: (entry.version.number, drop.reason) for entry in recorded.ledger for drop in entry.drops if drop.retires}
    hung = [task for task in range(recorded.ledger[-1].granted) if task % 9 == 4]
    expired = [task for task, (_, reason) in ends.items() if reason == "expired"]
    assert len(expired) >= 3 and set(expired) <= set(hung)
    assert ends[4] == (EXPIRE + 1, "expired"), "granted at version 0, so its drop is in the entry after version 3"
    async with open_source(str(recorded.path)) as source:
        report = await verify(source.config, source.log, source.model_dir)
        assert report.ok and report.versions == STEPS, report.lines
        past = await read_past(source.log, Subjects("hung"), "main")
        history = await read_history(source.log, past, fold_config(source.config))
        assert recorded.ledger[-1].granted in [granted for granted, _ in history.granted_s]
        branch, _ = await train_branch(source, overrides=["loss.clip_low=0.1"], name=None, base=tmp_path / "b", span=Range())
    entries = read_branch_ledger(branch.path)
    assert [(e.used, e.drops, e.granted) for e in entries] == [(e.used, e.drops, e.granted) for e in recorded.ledger]


SOURCES = """
[[data.sources]]
name = "low"
train = "train.jsonl@[:40]"
weight = [[0, 1], [3, 4]]
[[data.sources]]
name = "high"
train = "train.jsonl@[40:]"
"""


@pytest_asyncio.fixture
async def ups(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Ups]:
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO)
    write_digits(tmp_path, TABLE)
    rows = (tmp_path / "train.jsonl").read_text().splitlines(keepends=True)
    bad = ["{\n", "\n", json.dumps({"prompt": "1" * 300, "label": "2"}) + "\n", '{"prompt": "11"}\n']
    (tmp_path / "train.jsonl").write_text("".join(rows[:40] + bad + rows[40:]))
    made = Ups(tmp_path, "warmup.max_steps=2", "tasks.drop_zero_variance=false")
    yield made
    await made.bus.close()


@pytest.mark.process
async def test_tasks_of_rows_that_cannot_be_used_end_with_the_reason(ups: Ups, caplog: pytest.LogCaptureFixture) -> None:
    [note] = await ups.up(14)
    assert note.startswith("data.train: 3 of the first 93 ")
    assert "event=row_broken" in caplog.text and "line 41, got: " in caplog.text and "under 'label'" in caplog.text
    assert "event=row_too_long" in caplog.text and "line 43, got 300" in caplog.text
    await ups.up(16)
    report = await ups.replayed()
    assert report.ok and report.equal == len(await ups.ledger()) > 16, report.lines
    reasons = [drop.reason for entry in await ups.ledger() for drop in entry.drops]
    assert reasons.count("row_broken") >= 2 and "row_too_long" in reasons
    with (ups.place / "train.jsonl").open("a") as file:
        file.write('{"prompt": "11", "label": "4"}\n')
    with raises(ConfigError, key="data.train") as caught:
        await ups.up(18)
    assert "old rows" in caught.value.hint


@pytest.mark.process
async def test_a_run_with_several_sources_is_resumed_and_replayed(ups: Ups, caplog: pytest.LogCaptureFixture) -> None:
    (ups.place / "run.toml").write_text(TABLE.replace('train = "train.jsonl"\n', "") + SOURCES)
    await ups.up(6)
    [note] = await ups.up(9)
    assert note.startswith("source high: 3 of the first 53 ")
    assert "event=mixture" in caplog.text and "weights=(4.0, 1.0)" in caplog.text
    report = await ups.replayed()
    assert report.ok and report.equal == len(await ups.ledger()) > 9, report.lines
    for entry in await ups.ledger():
        assert entry.sources and sum(tally.groups for tally in entry.sources.values()) == len(entry.used)
        assert set(entry.sources) <= {"low", "high"}
    (ups.place / "run.toml").write_text((ups.place / "run.toml").read_text().replace("[3, 4]", "[3, 5]"))
    with raises(ConfigError, key="data.sources"):
        await ups.up(12)
