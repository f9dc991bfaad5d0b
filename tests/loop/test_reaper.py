"""Runs that end tasks: the end of the samples is lost, rollouts hang for ever. The reaper: tests/consumers/training/test_reaper.py."""

import asyncio
from pathlib import Path

import pytest

from streamrl.bus.memory import MemoryBus
from streamrl.consumers.training import worker as trainer_service
from streamrl.core.fold_config import fold_config
from streamrl.data.model import ensure_model
from streamrl.history.backtest_model import read_history
from streamrl.history.branch import read_branch_ledger
from streamrl.history.branch_run import train_branch
from streamrl.history.replay import Range, verify
from streamrl.history.replay_log import read_past
from streamrl.history.source import open_source
from streamrl.runtime.worker import Worker
from streamrl.schemas.subjects import SAMPLES, TASKS, Subjects
from tests.support.harness import make_run, read_ledger, services
from tests.support.recorded_run import FIXED, make_recorded
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
