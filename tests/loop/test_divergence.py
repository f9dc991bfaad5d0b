from __future__ import annotations

import asyncio
from typing import cast

import pytest
from msgspec.structs import replace

from streamrl.bus.memory import MemoryBus
from streamrl.config.tree import Config, RunConfig
from streamrl.consumers.training.books import ledger_books
from streamrl.consumers.training.calls import Caller
from streamrl.consumers.training.divergence import MOST, Divergence
from streamrl.consumers.training.ledger import open_ledger
from streamrl.consumers.training.steps import Stepped
from streamrl.core.batches import TrainBatch
from streamrl.core.fold import Batch
from streamrl.core.state import FoldState
from streamrl.errors import Diverged, WeightsDiverged
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.subjects import Subjects
from streamrl.schemas.versions import Version
from streamrl.trainers.protocol import StepResult
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
    stepped = Stepped(
        before=FoldState(),
        state=FoldState(version=Version(0, 3)),
        batch=Batch("main", ()),
        arrays=cast("TrainBatch", None),  # not looked at
        result=StepResult(digest=digest, metrics={}, reference=reference),
        reward=None,
        metrics={},
        past=replace(past, reference="before"),
    )
    ledger = await open_ledger(MemoryBus("demo"), Subjects("demo"), "main")
    config = Config(run=RunConfig(numerics="bitwise"))
    books = ledger_books(ledger, Caller(asyncio.get_running_loop()), config, "", diverged="compare")
    with raises(Diverged, version="0.3") as caught:
        books.enter(stepped)
    assert said in caught.value.message
