"""Staleness in whole runs: the product's services on one event loop."""

from pathlib import Path

import pytest

from streamrl.config.check import check
from streamrl.config.tree import DebugConfig, TasksConfig
from streamrl.consumers.training import worker
from streamrl.errors import ConfigError
from streamrl.schemas.ledger import LedgerEntry
from tests.staleness.conftest import table_config
from tests.staleness.slow import SlowTrainer
from tests.support.errors import raises
from tests.support.harness import read_ledger, run_to_end
from tests.support.ups import begun

pytestmark = pytest.mark.process

HEAVY = DebugConfig(token_delay_s=0.03, token_delay_sigma=1.5)
"""So long that a step waits for its tasks, and not for a processor that others have."""
STEP_S = 0.15
"""Within a step engines take a version and rollouts end, on a crowded machine too."""


async def trained(tmp_path: Path, *, steps: int, tasks: TasksConfig, debug: DebugConfig) -> list[LedgerEntry]:
    async with begun(tmp_path, table_config(tmp_path, "stale", steps=steps, tasks=tasks, debug=debug)) as (run, config, bus):
        await run_to_end(config, run, bus)
        return await read_ledger(bus, "stale")


@pytest.mark.parametrize("stale", ["drop", "wait"])
async def test_heavy_tails_are_paid_for_in_waste_or_in_waiting(tmp_path: Path, stale: str) -> None:
    tasks = TasksConfig(batch_tasks=4, num_rollouts=2, max_staleness=2, stale=stale)  # type: ignore[arg-type]
    ledger = await trained(tmp_path, steps=20, tasks=tasks, debug=HEAVY)
    ages = [age for entry in ledger for age in entry.staleness]
    wasted = [drop for entry in ledger for drop in entry.drops if drop.reason == "stale"]
    assert len(ledger) == 20 and max(ages) > 0
    if stale == "drop":
        assert max(ages) <= 2 and wasted, "one pace in twenty outlasts two steps that each wait for the median"
    else:
        assert max(ages) <= 4 and not wasted
        assert sum(entry.metrics["perf/wait_s"] for entry in ledger) > sum(entry.metrics["perf/step_s"] for entry in ledger)


@pytest.mark.parametrize(("bound", "expected"), [(2, {2}), (3, {2, 3})])
async def test_delayed_engines_serve_old_versions(tmp_path: Path, bound: int, expected: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    make = worker.make_trainer
    monkeypatch.setattr(worker, "make_trainer", lambda *given, **named: SlowTrainer(make(*given, **named), lambda number: STEP_S))
    tasks = TasksConfig(batch_tasks=3, num_rollouts=2, max_staleness=bound)
    ledger = await trained(tmp_path, steps=10, tasks=tasks, debug=DebugConfig(delay_versions=2))
    ages = [set(entry.staleness) for entry in ledger]
    assert ages[0] == {0} and max(ages[1]) == 1, "the first versions have none before them"
    assert set().union(*ages[bound:]) <= expected and all(2 in found or 3 in found for found in ages[bound:])
    assert not [drop for entry in ledger for drop in entry.drops if drop.reason == "stale"]


def test_a_delay_beyond_the_bound_is_refused(tmp_path: Path) -> None:
    config = table_config(tmp_path, "run", steps=1, tasks=TasksConfig(max_staleness=2), debug=DebugConfig(delay_versions=3))
    with raises(ConfigError, key="debug.delay_versions"):
        check(config)
