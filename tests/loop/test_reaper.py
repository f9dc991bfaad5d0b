"""A run that lost the end of its samples; what the reaper ends, and when, is in tests/consumers/training/test_reaper.py."""

import asyncio
from pathlib import Path

import pytest

from streamrl.bus.memory import MemoryBus
from streamrl.consumers.training import worker as trainer_service
from streamrl.data.model import ensure_model
from streamrl.runtime.worker import Worker
from streamrl.schemas.subjects import SAMPLES, TASKS, Subjects
from tests.support.harness import make_run, read_ledger, services
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
