from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from streamrl.bus.memory import MemoryBus
from streamrl.config.tree import Config, RunConfig, TrainerConfig
from streamrl.consumers.training.books import ledger_books
from streamrl.consumers.training.calls import Caller
from streamrl.consumers.training.divergence import MOST, Divergence
from streamrl.consumers.training.ledger import Ledger, open_ledger
from streamrl.consumers.training.steps import Stepped
from streamrl.core.fold import Batch
from streamrl.core.state import FoldState
from streamrl.errors import Diverged, WeightsDiverged
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.subjects import Subjects
from streamrl.schemas.versions import Version
from streamrl.trainers.protocol import StepResult
from tests.support.batches import train_batch
from tests.support.errors import raises


def test_many_batches_in_a_row_are_a_divergence_and_single_ones_are_not() -> None:
    divergence = Divergence()
    for number in range(1, 4 * MOST):
        divergence.check(Version(0, number), finite=number % MOST == 0)
    divergence.check(Version(0, 100), finite=True)
    for number in range(101, 100 + MOST):
        divergence.check(Version(0, number), finite=False)
    with raises(WeightsDiverged, version=f"0.{100 + MOST}"):
        divergence.check(Version(0, 100 + MOST), finite=False)


@pytest.mark.parametrize(
    ("digest", "reference", "said"),
    [
        ("other", "before", "has digest known in the ledger, training it again gave other"),
        ("known", "after", "has digest before of the reference in the ledger, training it again gave after"),
        ("known", "", "has digest before of the reference in the ledger, training it again gave none"),
    ],
)
async def test_a_step_with_other_digits_says_whose(digest: str, reference: str, said: str) -> None:
    past = LedgerEntry(
        run="demo", trainer="main", version=Version(0, 3), source="main", used=(), cursor=0, granted=0, retired=0, digest="known"
    )
    made: Any = {"before": FoldState(), "state": FoldState(version=Version(0, 3)), "batch": Batch("main", ()), "arrays": None}
    result = StepResult(digest=digest, metrics={}, reference=reference)
    stepped = Stepped(**made, result=result, reward=None, metrics={}, past=replace(past, reference="before"))
    ledger = await open_ledger(MemoryBus("demo"), Subjects("demo"), "main")
    config = Config(run=RunConfig(numerics="bitwise"))
    books = ledger_books(ledger, Caller(asyncio.get_running_loop()), config, "", diverged="compare")
    with raises(Diverged, version="0.3") as caught:
        books.enter(stepped)
    assert said in caught.value.message


async def test_another_mesh_begins_an_epoch_within_the_ledger_and_right_behind_it() -> None:
    """Whatever the digits, also where others are an error; a restart on that mesh knows its versions, one on another does not."""

    def run(ledger: Ledger, ranks: int, state: FoldState, numbers: range) -> list[str]:
        config = Config(run=RunConfig(numerics="bitwise"), trainer=TrainerConfig(ranks=ranks))
        books = ledger_books(ledger, call, config, "", diverged="compare")
        versions: list[str] = []
        for number in numbers:
            state = FoldState(version=Version(state.version.epoch, number))
            result = StepResult(digest=f"{number} on {ranks}", metrics={})
            past, none = ledger.at(number), Batch("main", ())
            stepped = Stepped(before=state, state=state, batch=none, arrays=arrays, result=result, reward=None, metrics={}, past=past)
            state = FoldState(version=books.enter(stepped))
            versions.append(str(state.version))
        return versions

    call, bus = Caller(asyncio.get_running_loop()), MemoryBus("demo")
    arrays = train_batch([{"prompt": [1], "answer": [2]}], mu=0.0, reward=0.0)

    async def restart(ranks: int, after: Version, to: int) -> list[str]:
        ledger = await open_ledger(bus, Subjects("demo"), "main")
        found = await asyncio.to_thread(run, ledger, ranks, FoldState(version=after), range(after.number + 1, to + 1))
        forks.append([(fork.epoch, fork.first, fork.last_before) for fork in ledger.forks])
        return found

    forks: list[list[tuple[int, int, int]]] = []
    assert await restart(2, Version(0, 0), 4) == ["0.1", "0.2", "0.3", "0.4"]
    assert await restart(1, Version(0, 2), 5) == ["1.3", "1.4", "1.5"]  # from an older checkpoint
    assert await restart(1, Version(0, 2), 6) == ["1.3", "1.4", "1.5", "1.6"]
    assert await restart(2, Version(1, 6), 7) == ["2.7"]  # from the end
    assert forks == [[], [(1, 3, 4)], [(1, 3, 4)], [(1, 3, 4), (2, 7, 6)]]
