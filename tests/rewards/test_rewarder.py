"""Runs whose rewards come from rewarders, on a real server: shared, failed, killed, come and gone, in lockstep too."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.bus import BusAddress
from streamrl.bus.protocol import Bus
from streamrl.config.tree import Config
from streamrl.consumers.training.reader import open_message
from streamrl.core.records import Ended, Rewarded, Rollouts
from streamrl.history.replay import verify
from streamrl.launch.prepare import prepare
from streamrl.runtime.run_record import write_or_check
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.subjects import SAMPLES
from tests.support.audit.audit import audit
from tests.support.harness import make_run, read_ledger, run_to_end, services
from tests.support.world.world import table_config

pytestmark = pytest.mark.nats


def graded_config(tmp_path: Path, run_id: str, **sections: dict[str, object]) -> Config:
    given: dict[str, dict[str, object]] = {"run": {"name": run_id, "steps": 6}, "reward": {"workers": 1}}
    for name, values in sections.items():
        given[name] = given.get(name, {}) | values
    return table_config(tmp_path, **given)


async def started(tmp_path: Path, config: Config, bus: Bus) -> tuple[RunDir, Config]:
    run, config = make_run(tmp_path, config)
    await write_or_check(bus, await prepare(config, run))
    return run, config


@pytest.mark.parametrize("staleness", [pytest.param(0, marks=pytest.mark.slow), 2])
async def test_producers_store_samples_without_rewards_and_rewarders_give_them(
    tmp_path: Path, nats_bus: Bus, nats_address: BusAddress, run_id: str, staleness: int
) -> None:
    """User code in children; one task in nine is failed by its grader, which is a tombstone with the reason, and a replay agrees."""
    run, config = await started(tmp_path, graded_config(tmp_path, run_id, tasks={"max_staleness": staleness}), nats_bus)
    async with services(config, run, nats_bus, ["rewarder"]):
        await run_to_end(config, run, nats_bus, timeout_s=300.0)
    entries = await read_ledger(nats_bus, run_id)
    assert len(entries) == 6
    gradings: dict[tuple[int, int], int] = {}
    rewards: dict[tuple[int, int], Rewarded] = {}
    failed: list[Ended] = []
    async for message in nats_bus.read(SAMPLES, after=0):
        match open_message(message).record:
            case Rollouts() as record:
                assert all(view.reward is None and view.grading for view in record.rollouts)
                gradings |= {(record.task, view.rollout): view.grading for view in record.rollouts}
            case Rewarded() as record:
                rewards[record.task, record.rollout] = record
            case Ended() as record:
                failed.append(record)
            case _:
                pass
        if message.sequence >= entries[-1].cursor:
            break
    trained = {(group.task, rollout) for entry in entries for group in entry.used for rollout in group.rollouts}
    assert trained and all(rewards[place].grading == gradings[place] for place in trained)
    assert failed and {one.task % 9 for one in failed} == {4}
    assert all(one.grading and one.reason == "failed" and "no reward for" in one.detail for one in failed)
    report = await audit(nats_address.url, nats_address.user, nats_address.password, run_id, complete=True)
    assert report.problems == []
    replay = await verify(config, nats_bus, run.model_dir)
    assert replay.ok and replay.versions == 6, replay.lines
