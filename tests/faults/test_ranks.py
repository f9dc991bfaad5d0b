"""Ranks of a trainer whose model is cut are killed, and the whole tree with them: the run ends by itself with its books in order."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.world.damage import CHECKPOINTS
from tests.support.world.disturbed import disturbed
from tests.support.world.faults import CHECKPOINT, RANK_1, WHOLE, Fault
from tests.support.world.shapes import RANKS
from tests.support.world.verdict import judge

pytestmark = [pytest.mark.nats, pytest.mark.slow, pytest.mark.timeout(900)]
KILLS = [Fault(part, "kill -9", aim) for part in ("trainer", RANK_1, WHOLE) for aim in ("", CHECKPOINT)]
REST = [
    Fault(RANK_1, "SIGSTOP"),
    Fault(RANK_1, "kill -9", "commit", "within"),
    *(Fault(WHOLE, "damage", damage=damage) for damage in CHECKPOINTS),
]


@pytest.mark.parametrize(("faults", "seed"), [(KILLS, 1), (REST, 2)], ids=["kills", "the rest"])
async def test_a_run_of_two_ranks_stands_what_one_of_one_does(tmp_path: Path, faults: list[Fault], seed: int) -> None:
    """Judged by the audit, and by a replay on two ranks that must give equal digests under an equal fingerprint."""
    rng = random.Random(seed)
    order = rng.sample(faults, len(faults))
    async with disturbed(tmp_path, RANKS, steps=90, stop_s=1.5, away_s=0.5) as run:
        run.open(8)
        await run.trained(22, within_s=200)
        struck = [await run.strike(fault, rng) for fault in order]
        await run.finish()
        verdict = await judge(run.run, RANKS, run.made)
    assert [each.fault for each in struck if each.recovery_s < 0 or not each.hit or (each.fault.damage and not each.note)] == []
    assert verdict.problems == []
    # An entry that was on its way may be what followed a rank's death; then the next strike may come before there is a new fence.
    assert verdict.counts["fences"] >= 1 + sum(fault.part == WHOLE for fault in faults)
    assert "trainer-1 ended with signal SIGKILL" in run.run.events_path.read_text()
