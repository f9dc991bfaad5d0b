"""A run comes to its end under a key that its newest trainer writes last, and by limits that count over all its trainers."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from streamrl.bus.memory import MemoryBus
from streamrl.config.tree import Config, RunConfig
from streamrl.consumers.training.ledger import take_fence
from streamrl.consumers.training.loop import trained_s
from streamrl.errors import Fenced
from streamrl.runtime.run_end import read_end, read_fence, write_end
from streamrl.schemas.control import RunEnd
from streamrl.schemas.versions import Version
from tests.support.errors import raises
from tests.support.harness import read_ledger
from tests.support.tiny import ledger_entry
from tests.support.world.place import place


async def test_a_trainer_that_drains_leaves_no_end_and_one_that_reaches_a_limit_does(tmp_path: Path) -> None:
    """Whoever begins after it takes the end away; it comes back when there is nothing left to train."""
    async with place(tmp_path, run={"steps": 6}) as w:
        await w.train(until=3)
        assert await read_end(w.bus, "main") is None
        await w.train()
        expected = RunEnd(version=Version(0, 6), steps=6, limit="steps", fence=2)
        assert await read_end(w.bus, "main") == expected
        await take_fence(w.bus, "main")
        assert await read_end(w.bus, "main") is None
        await w.train()
        assert await read_end(w.bus, "main") == replace(expected, fence=4)


async def test_seconds_of_training_count_over_all_trainers_of_a_run(tmp_path: Path) -> None:
    async with place(tmp_path, run={"steps": 40}) as w:
        await w.train(until=5)
        made = len(await read_ledger(w.bus, w.config.run.name))
        w.config = replace(w.config, run=replace(w.config.run, max_seconds=1e-6))
        await w.train()
        end = await read_end(w.bus, "main")
        assert end is not None and (end.limit, end.steps) == ("max_seconds", made), "not one more"
        assert any("run.max_seconds" in text for text in await w.said())


@pytest.mark.parametrize(("kind", "seconds"), [("rl", 2 * 1.75), ("sft", 4 * 1.75)])
def test_seconds_of_training_are_those_after_the_first_batch_that_counts(kind: str, seconds: float) -> None:
    times = {"perf/wait_s": 1.5, "perf/step_s": 0.25}
    entries = [replace(ledger_entry("r", number), source="warmup" if number < 3 else "main", metrics=times) for number in (5, 4, 3, 2, 1)]
    assert trained_s(Config(run=RunConfig(kind=kind)), entries) == seconds  # type: ignore[arg-type]
    assert trained_s(Config(), [ledger_entry("r", 1), ledger_entry("r", 2)]) == 0.0, "earlier builds measured none"


async def test_a_trainer_that_has_been_replaced_cannot_end_the_run() -> None:
    bus = MemoryBus("r")
    end = RunEnd(version=Version(0, 6), steps=6, limit="steps", fence=await take_fence(bus, "main"))
    assert await read_fence(bus, "main") == 1
    await take_fence(bus, "main")
    with raises(Fenced, fence=1):
        await write_end(bus, "main", end)
    assert await read_end(bus, "main") is None
    await bus.close()
