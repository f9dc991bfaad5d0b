"""The whole tree of a run is killed at once, its disk is damaged, its user code misbehaves: it goes on, and says what was lost."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import msgspec
import pytest

from tests.support.world.damage import CHECKPOINTS, STREAMS
from tests.support.world.disturbed import Disturbed, Struck, disturbed
from tests.support.world.faults import WHOLE, Fault
from tests.support.world.misdeeds import ENDS, Misdeed, told, wrong_ends
from tests.support.world.shapes import DAMAGED, DEFAULTS, LOCKSTEP, MISDEEDS
from tests.support.world.verdict import judge

pytestmark = [pytest.mark.nats, pytest.mark.timeout(400)]
"""Each starts a run several times; on a crowded machine a start takes ten times as long as on one that is not."""

UNHARMED = [
    Fault(WHOLE, "kill -9", "latest", "before"),
    *(Fault(WHOLE, "damage", damage=damage) for damage in CHECKPOINTS),
]


async def strike(run: Disturbed, fault: Fault, rng: random.Random) -> Struck:
    """Once more where there was nothing to damage, as in a queue whose last tasks had just been done."""
    struck = await run.strike(fault, rng)
    for _ in range(2):
        if fault.damage and not struck.note:
            struck = await run.strike(fault, rng)
    return struck


async def strike_all(run: Disturbed, faults: list[Fault], rng: random.Random) -> list[Struck]:
    run.open(8)
    await run.trained(6)
    struck = [await strike(run, fault, rng) for fault in faults]
    await run.finish()
    assert [each.fault for each in struck if each.recovery_s < 0] == []
    assert [each.fault for each in struck if each.fault.damage and not each.note] == []
    return struck


async def test_a_run_that_fell_as_a_whole_comes_out_as_it_would_have(tmp_path: Path) -> None:
    async def calm() -> dict[str, str]:
        async with disturbed(tmp_path / "calm", LOCKSTEP, steps=60, stop_s=0.0, away_s=0.0, attach=False) as run:
            await run.finish()
            return (await judge(run.run)).digests

    async def fallen() -> dict[str, str]:
        async with disturbed(tmp_path / "fallen", LOCKSTEP, steps=60, stop_s=0.0, away_s=0.0) as run:
            await strike_all(run, UNHARMED, random.Random(6))
            verdict = await judge(run.run, LOCKSTEP, run.made)
        assert verdict.problems == [] and verdict.counts["fences"] == 1 + len(UNHARMED)
        return verdict.digests

    undisturbed, disturbed_digests = await asyncio.gather(calm(), fallen())
    assert len(set(undisturbed.values())) == 60
    assert disturbed_digests == undisturbed


@pytest.mark.parametrize("attach", [True, False], ids=["attached producers live on", "everybody falls"])
async def test_ends_of_streams_that_are_torn_off_are_named_and_the_rest_is_as_it_was(tmp_path: Path, attach: bool) -> None:
    """A producer that was attached fills the place of what was lost before anybody of the new start has looked."""
    async with disturbed(tmp_path, DAMAGED, steps=60, stop_s=0.0, away_s=0.0, attach=attach) as run:
        await strike_all(run, [Fault(WHOLE, "damage", damage=damage) for damage in STREAMS], random.Random(7))
        verdict = await judge(run.run, DAMAGED, run.made)
    assert verdict.problems == []
    assert 1 <= verdict.counts["gaps"] <= len(STREAMS)


async def test_user_code_that_misbehaves_costs_what_it_did_and_nothing_else(tmp_path: Path) -> None:
    async with disturbed(tmp_path, MISDEEDS, steps=100, stop_s=0.0, away_s=0.0, attach=False) as run:
        await run.finish()
        verdict = await judge(run.run, MISDEEDS, run.made)
    assert verdict.problems == []
    assert {one.what for one in told(tmp_path)} == set(ENDS)


def test_a_record_that_says_something_else_is_found() -> None:
    did = [Misdeed(3, 1, "raises", 0.0), Misdeed(4, 0, "os._exit", 0.0), Misdeed(5, 2, "prints 1 MB", 0.0)]
    right: dict[tuple[int, int | None], frozenset[str]] = {
        (3, 0): frozenset({"sample"}),
        (3, 1): frozenset({"failed"}),
        (4, None): frozenset({"deliveries"}),
        (5, 2): frozenset({"sample"}),
    }
    assert wrong_ends(did, right) == []
    assert len(wrong_ends(did, {**right, (3, 1): frozenset({"timeout"})})) == 1
    assert len(wrong_ends(did, {**right, (3, 1): frozenset({"sample"})})) == 1
    assert len(wrong_ends(did, {**right, (6, 1): frozenset({"failed"})})) == 1


async def test_with_every_limit_as_it_comes_parts_and_the_whole_run_are_back(tmp_path: Path) -> None:
    behaved = msgspec.structs.replace(DEFAULTS, misdeed_every=10**6)
    async with disturbed(tmp_path, behaved, steps=60, stop_s=0.0, away_s=0.0, attach=False) as run:
        await strike_all(run, [Fault(part, "kill -9") for part in ("trainer", "producer", WHOLE)], random.Random(8))
        verdict = await judge(run.run, behaved, run.made)
    assert verdict.problems == []
