"""Bounded age, no waste, no waiting trainer: choose two. On the simulated clock; lengths are in steps of the trainer."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.simulation import Result, Simulation, World

QUICK = 0.1


@dataclass(frozen=True)
class Stragglers(World):
    """The last `stragglers` tasks of the first grant take `slow` steps, all others are quick."""

    stragglers: int = 1
    slow: float = 1.0


class WithStragglers(Simulation):
    world: Stragglers

    def length(self, task: int) -> float:
        granted = (self.world.staleness + 1) * self.world.batch
        return self.world.slow if granted - self.world.stragglers <= task < granted else QUICK


def straggling(stale: str, batch: int, staleness: int, stragglers: int, slow: float) -> Result:
    how: Any = {"publish_lag": 0.0, "messages": "whole", "eager": 0.0, "stragglers": stragglers, "slow": slow}
    steps, slots = math.ceil(slow) + staleness + 3, (staleness + 1) * batch
    return WithStragglers(Stragglers(batch=batch, staleness=staleness, stale=stale, steps=steps, slots=slots, **how)).run()


def stale_drops(result: Result) -> int:
    drops = [drop for entry in result.ledger for drop in entry.drops] + list(result.state.drops)
    assert {drop.reason for drop in drops} <= {"stale"}
    return len(drops)


def waited(result: Result) -> float:
    """Steps that the trainer could have made but waited; the first batch's quick rollouts are no waiting."""
    return result.time - QUICK - len(result.ledger)


SHAPES = {"batch": st.integers(1, 4), "staleness": st.integers(1, 5), "share": st.floats(0.01, 1), "slow": st.floats(0.3, 9)}


@given(**SHAPES)
@example(batch=2, staleness=3, share=1.0, slow=3.0)
@example(batch=2, staleness=3, share=1.0, slow=3.2)
@example(batch=1, staleness=1, share=1.0, slow=1.125)
@example(batch=1, staleness=1, share=1.0, slow=1.25)
@settings(max_examples=80, deadline=None)
def test_drop_wastes_a_batch_of_stragglers_exactly_when_they_outlast_s_steps(batch: int, staleness: int, share: float, slow: float) -> None:
    stragglers = math.ceil(share * batch)
    result = straggling("drop", batch, staleness, stragglers, slow)
    # The trainer begins step n at QUICK + n; at n = S a token of version 0 is trained on for the last time.
    # With S = 1 the stragglers hold half of the credits, and the other half is lockstep with quick rollouts: step 1 begins later by one.
    last_s = staleness + QUICK * (2 if staleness == 1 else 1)
    assert stale_drops(result) == (stragglers if slow > last_s else 0)
    assert max(max(entry.ages) for entry in result.ledger) <= staleness
    lockstep = QUICK * math.ceil(slow) if staleness == 1 else 0.0
    assert waited(result) <= lockstep + 0.2, "the trainer waits for no straggler"


@given(**SHAPES)
@settings(max_examples=60, deadline=None)
def test_wait_wastes_nothing_and_waits_as_long_as_stragglers_outlast_s_steps(batch: int, staleness: int, share: float, slow: float) -> None:
    result = straggling("wait", batch, staleness, math.ceil(share * batch), slow)
    assert stale_drops(result) == 0
    assert max(max(entry.ages) for entry in result.ledger) <= staleness
    lockstep = QUICK * min(staleness, math.ceil(slow)) if staleness == 1 else 0.0
    assert waited(result) == pytest.approx(max(0.0, slow - staleness - QUICK), abs=lockstep + 0.2)


def test_more_than_a_batch_of_stragglers_at_once_leaves_s_steps_too_few() -> None:
    """S steps are the bound for up to B tasks that end together; of more, only those that later batches still have room for are kept."""
    staleness, batch = 4, 2
    wasted = {slow: stale_drops(straggling("drop", batch, staleness, staleness * batch, slow)) for slow in (0.5, 1.5, 2.5, 3.5)}
    # All S * B end before step ceil(slow) begins, which leaves S + 1 - ceil(slow) batches within the bound.
    assert wasted == {slow: batch * max(0, staleness - (staleness + 1 - math.ceil(slow))) for slow in wasted}


@pytest.mark.parametrize("tail", ["pareto", "rare"])
@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_under_heavy_tails_every_policy_gives_up_one_of_the_three(tail: str, staleness: int) -> None:
    def run(stale: str) -> Result:
        how: Any = {"batch": 8, "steps": 60, "slots": 200, "length": 1.2, "messages": "whole", "eager": 0.0, "seed": 3}
        return Simulation(World(staleness=staleness, stale=stale, tail=tail, **how)).run()

    dropped, masked, waiting = run("drop"), run("mask"), run("wait")
    busy = {name: len(result.ledger) / result.time for name, result in {"drop": dropped, "mask": masked, "wait": waiting}.items()}
    # drop: age and trainer, at the price of groups thrown away.
    assert max(max(entry.ages) for entry in dropped.ledger) <= staleness and stale_drops(dropped) > 0
    # mask: groups with old tokens are kept for their young ones.
    assert max(max(entry.ages) for entry in masked.ledger) > staleness and stale_drops(masked) <= stale_drops(dropped)
    assert max(max(entry.newest) for entry in masked.ledger) <= staleness
    # wait: nothing is thrown away, the trainer stands still.
    assert stale_drops(waiting) == 0 and busy["wait"] < 0.9 * min(busy["drop"], busy["mask"])
