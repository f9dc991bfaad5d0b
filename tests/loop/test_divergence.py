import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from streamrl.bus.memory import MemoryBus
from streamrl.config.tree import Config, RunConfig, TrainerConfig
from streamrl.consumers.training.books import ledger_books
from streamrl.consumers.training.calls import Caller
from streamrl.consumers.training.divergence import Divergence
from streamrl.consumers.training.ledger import Ledger, open_ledger
from streamrl.consumers.training.steps import Stepped
from streamrl.core.fold import Batch
from streamrl.core.state import FoldState
from streamrl.errors import ConfigError, Diverged, StreamRLError, WeightsDiverged
from streamrl.schemas.subjects import Subjects
from streamrl.schemas.versions import Version
from streamrl.trainers.protocol import StepResult
from tests.support.batches import train_batch
from tests.support.errors import raises
from tests.support.tiny import ledger_entry

SOME = StepResult(digest="", metrics={})
INFINITE, CLIPPED = replace(SOME, finite=False), replace(SOME, gradient="zero")
NONE = replace(SOME, gradient="none", fault="mine.py:policy")


@pytest.mark.parametrize(
    ("results", "ends"),
    [
        pytest.param([INFINITE] * 9, (8, WeightsDiverged), id="in a row"),
        pytest.param([*[SOME] * 20, *[INFINITE] * 9], (28, WeightsDiverged), id="what was learnt before saves nothing"),
        pytest.param([*[INFINITE] * 7, SOME] * 2, (10, WeightsDiverged), id="seven of eight"),
        pytest.param([NONE] * 9, (8, ConfigError), id="a user's loss of zero"),
        pytest.param([replace(INFINITE, fault="mine.py:policy")] * 9, (8, ConfigError), id="a user's NaN"),
        pytest.param([INFINITE, NONE] * 5, (8, ConfigError), id="both"),
        pytest.param([INFINITE] * 7, None, id="few"),
        pytest.param([INFINITE, SOME] * 40, None, id="every second"),
        pytest.param([CLIPPED] * 40, None, id="clipping is no fault"),
    ],
)
def test_too_many_batches_without_gradient_end_the_run(results: list[StepResult], ends: tuple[int, type[StreamRLError]] | None) -> None:
    def ended(most: int) -> tuple[int, type[StreamRLError]] | None:
        said: list[str] = []
        divergence = Divergence(most, said.append)
        for number, result in enumerate(results, 1):
            try:
                divergence.check(Version(0, number), result)
            except StreamRLError as error:
                assert error.values["version"] == str(Version(0, number))
                return number, type(error)
            # At the first and at each doubling.
            assert bool(said) == any(one is not SOME for one in results[:number])
        assert len(said) < 8
        return None

    assert ended(8) == ends
    assert ended(0) is None


@pytest.mark.parametrize(
    ("digest", "reference", "said"),
    [
        ("other", "before", "has digest known in the ledger, training it again gave other"),
        ("known", "after", "has digest before of the reference in the ledger, training it again gave after"),
        ("known", "", "has digest before of the reference in the ledger, training it again gave none"),
    ],
)
async def test_a_step_with_other_digits_says_whose(digest: str, reference: str, said: str) -> None:
    past = replace(ledger_entry("demo", 3), digest="known")
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
