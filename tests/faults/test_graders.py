"""Grader processes of a real run are killed and stopped again and again: no rollout is lost, none counts twice."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.faults.test_matrix import strike_all
from tests.support.world.disturbed import disturbed
from tests.support.world.faults import GRADER, Fault
from tests.support.world.shapes import STREAM
from tests.support.world.verdict import judge

pytestmark = pytest.mark.nats

FAULTS = [
    Fault(GRADER, "kill -9"),
    Fault(GRADER, "SIGSTOP"),
    Fault(GRADER, "kill -9"),
    Fault("producer", "kill -9"),
    Fault(GRADER, "kill -9"),
]
STOP_S = 8.0
"""Longer than a process may leave its event loop unanswered: it is given up, and killed."""


async def test_graders_are_killed_and_stopped(tmp_path: Path) -> None:
    async with disturbed(tmp_path, STREAM, steps=60, stop_s=STOP_S, away_s=0.0) as run:
        await strike_all(run, FAULTS, random.Random(9))
        log = run.run.log_path("producer-0").read_text()
        verdict = await judge(run.run)
    assert verdict.problems == []
    # A strike may come between two processes; but most meet one.
    assert log.count("event=child_lost") + log.count("event=child_killed") >= 2
