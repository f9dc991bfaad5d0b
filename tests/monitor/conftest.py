import gc
import math
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any

import msgspec
import pytest

from streamrl.monitor.board import Board
from streamrl.monitor.decoded import LedgerLine
from streamrl.monitor.drawing import Ink
from streamrl.monitor.look import Look
from streamrl.monitor.numbers import Cause, Finding, Level, RunNumbers, Standing
from streamrl.monitor.series import Series
from streamrl.monitor.view import RunView
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.control import EnginePresence
from streamrl.schemas.events import Event
from streamrl.schemas.ledger import Drop, LedgerEntry, Used
from streamrl.schemas.samples import Tombstone
from streamrl.schemas.versions import Version

MakeEntry = Callable[..., LedgerEntry]


def as_line(entry: LedgerEntry) -> LedgerLine:
    return decode(encode(entry), LedgerLine)


def view_of(*records: LedgerEntry | Tombstone, **given: Any) -> RunView:
    """A view of a run with this ledger, or with tombstones, whose sequences are their places here."""
    view = RunView("demo", **given)
    for sequence, record in enumerate(records, 1):
        if isinstance(record, LedgerEntry):
            view.ledger(as_line(record))
        else:
            view.tombstone(sequence, record)
    return view


def windowed(**given: Any) -> RunView:
    """A view whose first window of a second has begun."""
    view = RunView("demo", series=Series(window_s=1.0), **given)
    view.take_rows(0.0)
    return view


def drawn(numbers: RunNumbers, width: int) -> list[str]:
    """Lines of the board of a run that is up."""
    return Board(Look(run="demo", state="running", numbers=numbers), width, Ink.NONE).text()


def kept(thing: object) -> int:
    seen: set[int] = set()
    waiting = [thing]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, type | ModuleType | FunctionType):
            continue
        seen.add(id(one))
        waiting += gc.get_referents(one)
    return len(seen)


@pytest.fixture
def entry() -> MakeEntry:
    def make(
        number: int,
        *,
        epoch: int = 0,
        source: str = "main",
        warm: bool | None = None,
        reward: float | None = 0.5,
        ages: Sequence[int] = (0, 1, 1),
        drops: Sequence[Drop] = (),
        tokens: int = 100,
        cursor: int = 0,
    ) -> LedgerEntry:
        metrics = {"staleness/in_flight": 0.25, "staleness/queued": 0.5}
        if reward is not None:
            metrics["rollout/raw_reward"] = reward
        if source == "warmup":
            metrics["train/answer_probability"] = 0.125
        return LedgerEntry(
            run="demo",
            trainer="main",
            version=Version(epoch, number),
            source=source,
            used=(Used(task=number, rollouts=(0, 1), sequences=(2 * number, 2 * number)),),
            drops=tuple(drops),
            cursor=cursor or 2 * number,
            granted=8,
            retired=number,
            warm=source != "warmup" if warm is None else warm,
            staleness=tuple(ages),
            num_samples=2,
            num_tokens=tokens,
            metrics=metrics,
            time_s=1000.0 + number,
        )

    return make


@pytest.fixture
def learned_run(entry: MakeEntry) -> RunView:
    """20 warm-up batches (the 19th ends it), then 80 whose reward rises from about 0.2 to 0.9; evaluations at 19, 60 and 100."""
    view = RunView("demo", steps=80, warmup_steps=100)
    for number in range(1, 21):
        view.ledger(as_line(entry(number, source="warmup", reward=None, warm=number >= 19)))
    for number in range(21, 101):
        reward = 0.9 - 0.7 * math.exp(-(number - 21) / 15) + 0.04 * math.sin(number * 2.4)
        drop = Drop(sequence=number, task=number, rollouts=(0, 1, 2, 3), reason="zero_variance")
        ages = (0, 1, 1, 1) if number % 7 else (1, 1, 2, 2)
        view.ledger(as_line(entry(number, reward=reward, ages=ages, drops=(drop,) if number > 60 else ())))
        serving = EnginePresence(
            engine="engine-0-ab",
            address="http://127.0.0.1:1",
            serving=Version(0, number - 1),
            tokens_total=100 * number,
            swaps_total=number - 20,
        )
        view.engine("engine-0-ab", serving)
    for number, accuracy in ((19, 0.21), (60, 0.82), (100, 0.91)):
        problems = [{"prompt": f"{a}+8=", "expected": str(a + 8), "got": str(a + 8) if number > 50 or a == 1 else "7"} for a in range(3)]
        view.event(Event(kind="evaluation", worker="evaluator-0", detail=evaluation(number, accuracy, problems)))
    return view


@pytest.fixture
def troubled(learned_run: RunView) -> RunNumbers:
    """A run that stands, misses an objective and has had a failure; none of it is said in less than 120 characters."""
    cause = Cause(
        "few_producers", "engines have 60% of their slots free, and producers none", "raise producer.concurrency, or producer.workers"
    )
    learned_run.slo = (Finding(objective="p95_age", level=Level.BREACH, value=12.0, bound=4.0, causes=(cause,)),)
    learned_run.standing = Standing(
        what="credit: all 96 granted tasks are issued, producers hold none, and 12 of them have no end",
        hint="do rewards come late, or never (reward.late_versions)?",
    )
    numbers = learned_run.numbers(elapsed_s=65.0)
    newest = "failed: ValueError: expected a number" + ", got none" * 30
    rows = ("row_broken: expected a label under 'answer' at rows.jsonl line 3, got none",)
    return msgspec.structs.replace(numbers, newest_error=newest, unusable_rows=rows, failed_tasks=1)


def evaluation(number: int, accuracy: float, problems: Sequence[dict[str, str]] = ()) -> dict[str, object]:
    return {"version": f"0.{number}", "versions": [f"0.{number}"] * 2, "accuracy": accuracy, "num": 3, "problems": list(problems)}
