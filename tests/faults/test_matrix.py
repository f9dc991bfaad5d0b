"""Every part of a real run is killed, stopped and cut off; each run ends by itself with its books in order."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tests.support.world.disturbed import Disturbed, Struck, disturbed
from tests.support.world.faults import CHECKPOINT, Fault, matrix
from tests.support.world.shapes import LOCKSTEP, NAME, STREAM
from tests.support.world.verdict import judge

pytestmark = pytest.mark.nats

STOP_S, AWAY_S = 1.5, 0.5
"""A stopped producer outlives its claims: they are its own for one second."""
AIMED = [
    Fault("trainer", "kill -9", CHECKPOINT),
    Fault("trainer", "kill -9", "commit", "before"),
    Fault("trainer", "cut", "commit", "within"),
    Fault("trainer", "kill -9", "commit", "after"),
    Fault("nats-server", "kill -9", "commit", "within"),
    Fault("trainer", "kill -9", "weights bytes", "within"),
    Fault("trainer", "cut", "manifest", "after"),
    Fault("producer", "kill -9", "samples", "after"),
    Fault("attached producer", "SIGSTOP", "attached samples", "within"),
    Fault("feeder", "cut", "task", "after"),
    Fault("engine", "kill -9", "presence", "before"),
    Fault("producer", "HTTP cut", "request", "within"),
    Fault("attached producer", "HTTP cut", "attached request", "after"),
    Fault("engine", "HTTP cut", "request", "before"),
]


async def strike_all(run: Disturbed, faults: list[Fault], rng: random.Random) -> list[Struck]:
    struck = [await run.strike(fault, rng) for fault in faults]
    await run.finish()
    assert [each.fault for each in struck if each.recovery_s < 0] == []
    return struck


async def test_every_fault_at_a_random_moment(tmp_path: Path) -> None:
    rng = random.Random(4)
    async with disturbed(tmp_path, STREAM, steps=200, stop_s=STOP_S, away_s=AWAY_S) as run:
        await strike_all(run, matrix(rng), rng)
        verdict = await judge(run.run)
    assert verdict.problems == []
    assert verdict.counts["fences"] >= 2


async def test_faults_inside_writes_leave_a_lockstep_run_as_it_would_have_been(tmp_path: Path) -> None:
    rng = random.Random(5)

    async def calm() -> dict[str, str]:
        async with disturbed(tmp_path / "calm", LOCKSTEP, steps=140, stop_s=0.0, away_s=0.0, attach=False) as run:
            await run.finish()
            return (await judge(run.run)).digests

    async def struck() -> dict[str, str]:
        async with disturbed(tmp_path / "struck", LOCKSTEP, steps=140, stop_s=STOP_S, away_s=AWAY_S) as run:
            outcome = await strike_all(run, AIMED, rng)
            verdict = await judge(run.run)
        assert [each.fault for each in outcome if not each.hit] == []
        assert verdict.problems == []
        return verdict.digests

    undisturbed, disturbed_digests = await asyncio.gather(calm(), struck())
    assert len(set(undisturbed.values())) == 140
    assert disturbed_digests == undisturbed


async def test_a_trainer_that_wakes_beside_its_successor_is_refused_at_the_ledger(tmp_path: Path) -> None:
    async with disturbed(tmp_path, LOCKSTEP, steps=30, stop_s=0.0, away_s=0.0, attach=False) as run:
        run.open(5)
        await run.trained(4)
        old = await run.catch_trainer_committing()
        successor = await run.start("worker", "trainer", "--run", NAME, "--index", "1")
        before = run.versions
        await run.trained(before + 2)
        run.wake(old)
        log = run.run.events_path
        await run.until(lambda: "worker=trainer-0 exit code 3" in log.read_text(), "the end of the trainer that woke")
        await run.finish()
        assert await asyncio.wait_for(successor.wait(), 30) == 0
        verdict = await judge(run.run)
    assert "error: trainer 'main' with fence 1 was refused at version" in run.run.log_path("trainer-0").read_text()
    assert verdict.problems == []
    assert verdict.counts["fences"] == 2
