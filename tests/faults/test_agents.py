"""Gateway and agents of a real run are killed, stopped and cut off: what an agent was told is what is trained, once."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.world.disturbed import disturbed
from tests.support.world.faults import AGENT, GATEWAY, Fault
from tests.support.world.shapes import AGENTS
from tests.support.world.verdict import judge

pytestmark = pytest.mark.nats

FAULTS = [
    Fault(GATEWAY, "kill -9", "turn", "before"),
    Fault(AGENT, "SIGSTOP"),
    Fault(GATEWAY, "SIGSTOP", "turn", "within"),
    Fault(AGENT, "cut"),
    Fault(GATEWAY, "cut", "gateway's samples", "after"),
    Fault(AGENT, "kill -9"),
]
"""A gateway that is stopped outlives its claims, which are its own for one second: its sessions go on at its successor."""


async def test_every_fault(tmp_path: Path) -> None:
    rng = random.Random(6)
    async with disturbed(tmp_path, AGENTS, steps=70, stop_s=1.5, away_s=0.5) as run:
        struck = [await run.strike(fault, rng) for fault in FAULTS]
        await run.finish()
        assert run.crew is not None
        told = run.crew.told()
        verdict = await judge(run.run, agents=told)
    assert [one.fault for one in struck if one.recovery_s < 0] == []
    assert [one.fault for one in struck if not one.hit] == []
    assert verdict.problems == []
    assert len(told.ended) > 50
