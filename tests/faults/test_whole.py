"""Whole runs, as `streamrl up` starts them, go through the table of faults; they end by themselves with their books in order."""

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from tests.support.world.disturbed import disturbed
from tests.support.world.faults import EACH_KIND, EVERY_PAIR, GRADERS, MATRIX, OF_AGENTS, OF_RANKS, TORN, WHOLE, Fault
from tests.support.world.misdeeds import ENDS, Misdeed, told, wrong_ends
from tests.support.world.shapes import AGENTS, DAMAGED, DEFAULTS, LOCKSTEP, MISDEEDS, RANKS, STREAM, Shape
from tests.support.world.verdict import judge, undisturbed


class Run(NamedTuple):
    """One long run: what is trained, what is struck, and how dear it is. What must hold is decided by its shape."""

    shape: Shape
    steps: int
    faults: Sequence[Fault]
    tier: str = "soak"
    attach: bool = False
    """True: a producer that belongs to nobody's supervisor is attached to it."""


BEHAVED = msgspec.structs.replace(DEFAULTS, misdeed_every=10**6)
RUNS = {
    "one of each kind": Run(LOCKSTEP, 50, EACH_KIND, "nats"),
    "every part and kind": Run(LOCKSTEP, 200, EVERY_PAIR, "slow", attach=True),
    "everybody falls and the ends of streams are torn off": Run(DAMAGED, 60, [*TORN, *GRADERS], "slow"),
    "an attached producer lives on where they are torn off": Run(DAMAGED, 80, [*TORN, Fault("producer", "kill -9"), *GRADERS], attach=True),
    "random moments": Run(STREAM, 200, [*MATRIX, *GRADERS], attach=True),
    "agents": Run(AGENTS, 70, OF_AGENTS),
    "user code misbehaves": Run(MISDEEDS, 100, []),
    "every limit as it comes": Run(BEHAVED, 60, [Fault(part, "kill -9") for part in ("trainer", "producer", WHOLE)]),
    "two ranks": Run(RANKS, 160, OF_RANKS, attach=True),
}


@pytest.mark.parametrize("given", [pytest.param(run, id=name, marks=getattr(pytest.mark, run.tier)) for name, run in RUNS.items()])
@pytest.mark.nats
@pytest.mark.timeout(900)
async def test_a_run_stands_it(tmp_path: Path, given: Run) -> None:
    """Each is started several times; on a crowded machine a start takes ten times as long as on one that is not."""
    shape, faults, rng = given.shape, given.faults, random.Random(6)
    async with disturbed(tmp_path / "struck", shape, steps=given.steps, attach=given.attach) as run:
        if faults:
            run.open(8)
            await run.trained(22 if shape.ranks > 1 else 6, within_s=200)  # there are checkpoints to damage
        struck = await run.disturb(faults, rng)
        await run.finish()
        verdict = await judge(run.run, shape, run.made, run.crew.told() if run.crew else None)
    assert [each for each in struck if not each.as_told] == []
    assert verdict.problems == []
    if shape.deterministic:
        calm = await undisturbed(tmp_path / "calm", shape, given.steps)
        assert len(set(calm.values())) == given.steps
        assert verdict.digests == calm
    if shape.losses:
        assert 1 <= verdict.counts["gaps"] <= len(TORN)
        log = run.run.log_path("producer-0").read_text()
        assert log.count("event=child_lost") + log.count("event=child_killed") >= 1, "a strike may come between two graders"
    if shape.misdeed_every and not faults:
        assert {one.what for one in told(tmp_path / "struck")} == set(ENDS)
    if run.crew:
        assert len(run.crew.told().ended) > 50
    if shape.ranks > 1:
        assert re.search(r"trainer-1 .*SIGKILL", run.run.events_path.read_text())
    # An entry that was on its way may be what followed a death; then the next strike may come before there is a new fence.
    assert verdict.counts["fences"] >= 1 + sum(fault.part == WHOLE for fault in faults)


def test_a_record_that_says_something_else_is_found() -> None:
    did = [Misdeed(3, 1, "raises", 0.0), Misdeed(4, 0, "os._exit", 0.0), Misdeed(5, 2, "prints 1 MB", 0.0)]
    right: dict[tuple[int, int | None], frozenset[str]] = {
        (3, 0): frozenset({"sample"}),
        (3, 1): frozenset({"failed"}),
        (4, None): frozenset({"deliveries"}),
        (5, 2): frozenset({"sample"}),
    }
    assert wrong_ends(did, right) == []
    for place, ends in ((3, 1), "timeout"), ((3, 1), "sample"), ((6, 1), "failed"):
        assert len(wrong_ends(did, {**right, place: frozenset({ends})})) == 1
