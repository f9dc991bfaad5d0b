"""A whole run whose rewards come by themselves, on a real server: out of order, corrected after training, over a kill."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from streamrl.bus import BusAddress
from streamrl.bus.protocol import Bus
from streamrl.config.tree import Config
from streamrl.consumers.training import worker as trainer_service
from streamrl.consumers.training.reader import open_message
from streamrl.core.records import Rewarded, Rollouts
from streamrl.history.dead_letters import Fates
from streamrl.history.replay import verify
from streamrl.launch.prepare import prepare
from streamrl.producers.late import LateRewards
from streamrl.runtime.run_record import write_or_check
from streamrl.runtime.rundir import RunDir
from streamrl.runtime.worker import Worker
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.subjects import SAMPLES, Subjects
from streamrl.trainers.factory import make_trainer
from tests.support.audit.audit import audit
from tests.support.harness import make_run, read_ledger, services
from tests.support.world.world import table_config

pytestmark = pytest.mark.nats


async def train(config: Config, run: RunDir, bus: Bus, *, until: asyncio.Event | None = None) -> None:
    """The trainer to the run's end, or drained once `until` is set."""
    worker = Worker(config=config, run_dir=run, bus=bus, kind="trainer", index=0)
    worker.draining = until or worker.draining
    async with asyncio.timeout(90):
        await trainer_service.main(worker)


async def trained_rewards(bus: Bus, entries: list[LedgerEntry]) -> dict[tuple[int, int], int]:
    """For every trained rollout, the revision that must have counted: the highest folded before its batch; checked to be there."""
    revisions: dict[tuple[int, int], list[tuple[int, int]]] = {}
    async for message in bus.read(SAMPLES, after=0):
        record = open_message(message).record
        if isinstance(record, Rewarded):
            revisions.setdefault((record.task, record.rollout), []).append((message.sequence, record.revision))
        if isinstance(record, Rollouts):
            assert all(view.reward is None for view in record.rollouts)
        if message.sequence >= entries[-1].cursor:
            break
    found = {}
    for entry in entries:
        for group in entry.used:
            for rollout in group.rollouts:
                found[group.task, rollout] = max(r for s, r in revisions[group.task, rollout] if s <= entry.cursor)
    return found


async def test_rewards_come_hours_later_and_the_trainer_dies_meanwhile(
    tmp_path: Path, nats_bus: Bus, nats_address: BusAddress, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything that the first grant allows is sampled before the first reward comes; the trainer dies twice; a replay agrees."""
    given: dict[str, dict[str, object]] = {
        "run": {"name": run_id, "steps": 8},
        "tasks": {"batch_tasks": 2, "num_rollouts": 2, "max_staleness": 3},
        "reward": {"kind": "late"},
        "trainer": {"checkpoint_every": 3},
    }
    run, config = make_run(tmp_path, table_config(tmp_path, **given))
    await write_or_check(nats_bus, await prepare(config, run))
    subjects = Subjects(run_id)

    class Dying:
        """The table trainer; its process ends at the second step."""

        def __init__(self, inner: Any) -> None:
            self.inner, self.steps = inner, 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def step(self, batch: Any) -> Any:
            self.steps += 1
            if self.steps == 2:
                raise RuntimeError("killed")
            return self.inner.step(batch)

    async def judge() -> None:
        rewards = LateRewards(nats_bus, subjects)
        async for _, sample in rewards.unrewarded():
            # Out of order: the correction comes before what it corrects.
            await rewards.publish(sample.task, sample.rollout, float(sample.rollout), revision=2)
            await rewards.publish(sample.task, sample.rollout, 7.0, revision=1)

    async with services(config, run, nats_bus, ["engine", "producer", "feeder"]):
        enough = asyncio.Event()
        idle = asyncio.create_task(train(config, run, nats_bus, until=enough))
        async with asyncio.timeout(60):
            while (await nats_bus.state(SAMPLES)).last < (3 + 1) * 2:
                await asyncio.sleep(0.05)
        assert (await nats_bus.state("ledger")).last == 0 and not idle.done()
        enough.set()
        await idle
        judging = asyncio.create_task(judge())
        with monkeypatch.context() as patch:
            patch.setattr(trainer_service, "make_trainer", lambda *given, **named: Dying(make_trainer(*given, **named)))
            for _ in range(2):
                with pytest.raises(RuntimeError, match="killed"):
                    await train(config, run, nats_bus)
        await train(config, run, nats_bus)
        judging.cancel()
        entries = await read_ledger(nats_bus, run_id)
        task = entries[0].used[0].task
        late = await LateRewards(nats_bus, subjects).publish(task, 0, 3.0, revision=9)
    assert len(entries) == 8 and set((await trained_rewards(nats_bus, entries)).values()) == {2}
    superseded = [drop for entry in entries for drop in entry.drops if drop.reason == "superseded_reward"]
    assert superseded, "revision 1 came after revision 2"
    fate = await Fates(nats_bus, subjects, "main").of_message(late.sequence, task=task)
    assert fate.state == "dropped" and "trained into version" in fate.detail
    report = await audit(nats_address.url, nats_address.user, nats_address.password, run_id, complete=True)
    assert report.problems == []
    replay = await verify(config, nats_bus, run.model_dir)
    assert replay.ok and replay.versions == 8, replay.lines
