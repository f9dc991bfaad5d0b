"""Mean age and utilisation of simulated runs; `python -m tests.staleness.measure` prints the table of docs/staleness.md."""

import statistics
import sys
from dataclasses import dataclass, replace

from tests.support.simulation import Simulation, World

PACED = World(batch=16, staleness=8, group=2, steps=100, slots=40, length=1.2, publish_lag=0.3, messages="whole", eager=0.0, seed=1)
"""Producers a little faster than the trainer."""


@dataclass(frozen=True)
class Measured:
    """One run. Ages are of each trained group's oldest token, in versions."""

    mean_age: float
    max_age: int
    stale: int
    """Groups dropped."""
    utilisation: float
    """Share of the time that the trainer was training."""


def measured(world: World, **changes: object) -> Measured:
    """Run a world with some of its fields changed."""
    result = Simulation(replace(world, **changes)).run()  # type: ignore[arg-type]
    ages = [age for entry in result.ledger for age in entry.ages]
    drops = sum(drop.reason == "stale" for entry in result.ledger for drop in entry.drops)
    return Measured(statistics.fmean(ages), max(ages), drops, len(result.ledger) / result.time)


def main() -> None:
    """Print the table."""
    out = sys.stdout.write
    out("| lengths | policy | S | full credits: mean age, dropped, busy | hold_ahead: mean age, dropped, busy |\n|---|---|---|---|---|\n")
    for tail in ("fixed", "uniform", "pareto", "rare"):
        for stale in ("drop", "wait"):
            for staleness in (2, 4, 8):
                cells = []
                for hold in (False, True):
                    one = measured(PACED, tail=tail, stale=stale, staleness=staleness, hold=hold)
                    cells.append(f"{one.mean_age:.2f}, {one.stale}, {one.utilisation:.2f}")
                out(f"| {tail} | {stale} | {staleness} | {cells[0]} | {cells[1]} |\n")


if __name__ == "__main__":
    main()
