"""What is said of a run that misses its objectives, and how far engines' log-probs are from the trainer's."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from streamrl.config.slo import SloConfig
from streamrl.errors import SchemaError
from streamrl.monitor.distances import FIRST, Distance, Distances
from streamrl.monitor.numbers import Cause, EngineLine, Finding, Level, RunNumbers, Standing
from streamrl.monitor.slo import Judge, Signs, causes, detail_of, findings_of, line_of, worst_of
from streamrl.monitor.view import RunView
from streamrl.schemas.control import Untrained
from streamrl.schemas.events import SLO_EVENT, Event
from streamrl.telemetry.names import BY_ENGINE, MOST_ENGINES, declared, metric, of_engine

PREFIX = "rollouts/dropped_total/"


def numbers(**more: Any) -> RunNumbers:
    return replace(RunView("demo").numbers(elapsed_s=1.0), **more)


def engine(index: int, *, rate: float = 100.0, running: int = 4, waiting: int = 0, slots: int = 8, behind: int = 0) -> EngineLine:
    return EngineLine(
        engine=f"engine-{index}-ab", serving="0.1", running=running, waiting=waiting, slots=slots, behind=behind, tokens_per_s=rate
    )


def signs(
    *,
    shares: Mapping[str, float] | None = None,
    drops: Mapping[str, int] | None = None,
    trained: int = 8,
    stones: Mapping[str, int] | None = None,
    batch: Mapping[str, float] | None = None,
    **more: Any,
) -> Signs:
    """A window of a run with two engines: shares as `producer/reward`, rollouts dropped by reason, groups of four trained."""
    named = {name.replace("/", "/share/", 1) if "starvation" not in name else name: value for name, value in (shares or {}).items()}
    decided = {"trained": trained, **{PREFIX + reason: count for reason, count in (drops or {}).items()}}
    engines = more.pop("engines", (engine(0), engine(1)))
    return Signs(
        numbers=numbers(engines=engines, tasks_in_flight=16, drops=more.pop("numbers_drops", {}), **more),
        batch=batch or {},
        window={"": named},
        decided=decided,
        stones=stones or {},
        num_rollouts=4,
        batch_tasks=8,
    )


def starved(share: float = 0.9, **more: float) -> dict[str, float]:
    """The trainer waits; slots are all at engines, unless said otherwise."""
    return {"trainer/wait_samples": share, "producer/generate": 0.95, "starvation/engines_saturated": 0.0, **more}


def in_tools(generating: float, tools: float) -> dict[str, float]:
    return {"producer/generate": generating, "producer/tools": tools}


SATURATED = {"starvation/engines_saturated": 0.9}
VAIN: dict[str, Any] = {"shares": starved(), "trained": 0, "barren_tasks": 60}
"""Many tasks end and nothing is trained."""
GIVEN_UP: dict[str, Any] = VAIN | {"given_up_tasks": 50}
TROUBLES: list[tuple[str, str, Signs]] = [
    *(("slow_engine", "starvation", signs(shares=starved(part, **SATURATED))) for part in (0.6, 0.95)),
    *(("few_producers", "starvation", signs(shares=starved(part))) for part in (0.6, 0.95)),
    *(
        ("slow_reward", "starvation", signs(shares=starved(0.8, **{"producer/generate": 0.9 - part, "producer/reward": part})))
        for part in (0.5, 0.85)
    ),
    *(
        ("slow_trainer", "stream_lag_s", signs(shares={"trainer/wait_samples": part, "producer/wait_credit": 0.8}, stream_s=50.0))
        for part in (0.3, 0.0)
    ),
    ("full_stream", "stream_lag_s", signs(shares={"trainer/wait_samples": 0.0, "producer/wait_room": 0.3})),
    ("full_stream", "stream_lag_s", signs(shares={"trainer/wait_samples": 0.9, "producer/wait_room": 1.0}, stalled=("producer-0",))),
    ("hung_tool", "starvation", signs(shares=starved(0.6, **in_tools(0.5, 0.45)), hung_tasks=6, hung_s=12.0)),
    ("hung_tool", "starvation", signs(shares=starved(0.9, **in_tools(0.0, 0.9)), drops={"timeout": 90}, hung_tasks=16)),
    ("zero_variance", "drop_rate", signs(shares=starved(), drops={"zero_variance": 80})),
    ("zero_variance", "drop_rate", signs(**VAIN, untrained=Untrained(ended={"zero_variance": 240}))),
    ("given_up", "drop_rate", signs(shares=starved(), drops={"filtered": 80})),
    ("given_up", "drop_rate", signs(**GIVEN_UP, stones={"filtered": 120, "lost": 80})),
    ("lost_tasks", "drop_rate", signs(shares=starved(), drops={"lost": 80})),
    ("lost_tasks", "drop_rate", signs(**GIVEN_UP, stones={"filtered": 80, "lost": 120})),
    ("left_out", "drop_rate", signs(shares=starved(), drops={"other": 80})),  # words of producers
    ("left_out", "drop_rate", signs(**GIVEN_UP, stones={"filtered": 60, "easy": 50, "long": 50})),
    ("sick_engine", "starvation", signs(shares=starved(**SATURATED), engines=(engine(0), engine(1, rate=30.0), engine(2)))),
    ("sick_engine", "starvation", signs(shares=starved(), engines=(engine(0), engine(1, rate=0.0, behind=9)))),
]


def test_the_cause_of_each_trouble_is_named_first() -> None:
    assert [causes(objective, staged)[0].name for _, objective, staged in TROUBLES] == [cause for cause, _, _ in TROUBLES]


def test_every_cause_stands_in_the_table_of_the_docs() -> None:
    root = Path(__file__).parents[2]
    calls = [
        node
        for path in (root / "streamrl" / "monitor").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Cause"
    ]
    names = {node.args[0].value for node in calls if node.args and isinstance(node.args[0], ast.Constant)}
    _, _, table = (root / "docs" / "slo.md").read_text().partition("| cause |")
    listed = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1] if row.startswith("| `") else "")}
    assert listed == names and {cause for cause, _, _ in TROUBLES} <= names


@pytest.mark.parametrize("objective", ["starvation", "drop_rate", "p95_age"])
@pytest.mark.parametrize("drops", [{}, {"timeout": 90}])
def test_rewards_that_run_into_their_limit_are_slow_and_no_tool_hangs(objective: str, drops: dict[str, int]) -> None:
    staged = signs(shares=starved(0.9, **{"producer/generate": 0.1, "producer/reward": 0.85}), drops=drops, hung_tasks=6, hung_s=12.0)
    named = [one.name for one in causes(objective, staged)]
    assert "hung_tool" not in named and ("slow_reward" in named or (objective, drops) == ("drop_rate", {}))


def test_rewards_at_their_limit_are_no_tool_and_zero_variance_that_starves_is_named() -> None:
    assert causes("starvation", signs(shares=starved(**SATURATED), drops={"zero_variance": 80}))[0].name == "zero_variance"
    late = signs(shares=starved(), engines=(engine(0), engine(1, behind=9), engine(2, behind=9)))
    assert "sick_engine" not in {cause.name for cause in causes("starvation", late)}
    (cause, *_) = causes("drop_rate", signs(drops={"other": 80}, numbers_drops={"zero_variance": 9, "too easy": 80, "too long": 7}))
    assert cause.what.endswith(": too easy 80, too long 7")


@pytest.mark.parametrize(
    ("staged", "both"),
    [
        (signs(shares=starved(**SATURATED), drops={"zero_variance": 80}), {"zero_variance", "slow_engine"}),
        (signs(shares=starved(), engines=(engine(0), engine(1, rate=5.0)), hung_tasks=9), {"hung_tool", "sick_engine"}),
        (
            signs(shares=starved(**{"producer/generate": 0.2, "producer/reward": 0.7}), drops={"zero_variance": 80}),
            {"zero_variance", "slow_reward"},
        ),
    ],
)
def test_of_two_troubles_both_are_named(staged: Signs, both: set[str]) -> None:
    assert {one.name for one in causes("starvation", staged)[:2]} == both


def test_without_shares_the_newest_batch_and_the_engines_of_now_say_it() -> None:
    waits = {"perf/wait_s": 9.0, "perf/step_s": 1.0}
    full = (engine(0, running=8, waiting=20), engine(1, running=8, waiting=3))
    assert causes("starvation", signs(batch=waits, engines=full))[0].name == "slow_engine"
    assert causes("starvation", signs(batch=waits))[0].name == "few_producers"
    assert causes("no_progress_s", signs(standing=Standing(what="credit", hint="see there")))[0].what.endswith("waits for credit")
    assert [one.name for one in causes("versions_behind", signs())] == ["unknown"]


def test_what_is_off_not_known_or_healthy_is_not_judged() -> None:
    assert Judge(SloConfig(hold_s=0.0)).look(signs(shares=starved(1.0)), now_s=0.0, time_s=0.0) == ()
    judge = Judge(SloConfig(p95_age=1.0, drop_rate=0.5, versions_behind=1.0, starvation=0.5, hold_s=0.0))
    nothing = Signs(numbers=numbers())
    assert judge.look(nothing, now_s=0.0, time_s=0.0) == ()
    assert [one.objective for one in judge.look(signs(drops={"stale": 99}), now_s=1.0, time_s=0.0)] == ["drop_rate"]
    assert [one.objective for one in judge.look(nothing, now_s=2.0, time_s=0.0)] == ["drop_rate"], "a window without a batch says nothing"
    bounds = SloConfig(p95_age=4.0, versions_behind=4.0, starvation=0.6, hold_s=0.0)
    healthy = signs(
        shares=starved(0.3, **{"trainer/compute": 0.65}), drops={"zero_variance": 8}, batch={"staleness/p95": 2.0}, stream_s=2.0
    )
    for config in (SloConfig(hold_s=0.0), bounds):
        assert Judge(config).look(healthy, now_s=0.0, time_s=0.0) == ()


def test_the_worst_comes_first_and_a_line_says_what_to_do() -> None:
    judge = Judge(SloConfig(starvation=0.95, drop_rate=0.5, hold_s=0.0))
    found = judge.look(signs(shares=starved(0.8), drops={"stale": 99}), now_s=0.0, time_s=0.0)
    assert [(one.objective, one.level) for one in found] == [("drop_rate", Level.BREACH), ("starvation", Level.WARN)]
    assert "hint: raise tasks.max_staleness" in line_of(found[0])
    assert worst_of(*(one.level for one in found)) == Level.BREACH and worst_of() == Level.OK


def test_an_event_carries_it_and_a_view_keeps_the_worst() -> None:
    one = Finding(objective="drop_rate", level=Level.BREACH, value=0.9, bound=0.5, causes=(Cause("x", "y", "z"),))
    event = msgspec.json.decode(msgspec.json.encode(Event(kind=SLO_EVENT, worker="supervisor", detail=detail_of((one,)))), type=Event)
    assert findings_of(event) == (one,)
    view = RunView("demo")
    view.event(event)
    assert view.numbers(elapsed_s=1.0).slo == (one,)
    view.event(Event(kind=SLO_EVENT, worker="supervisor", detail=detail_of((replace(one, level=Level.WARN),))))
    view.event(Event(kind=SLO_EVENT, worker="supervisor", detail=detail_of(())))
    assert view.numbers(elapsed_s=1.0).slo == () and view.slo_worst == {"drop_rate": Level.BREACH}
    with pytest.raises(SchemaError, match="cannot be read"):
        view.event(Event(kind=SLO_EVENT, worker="supervisor", detail={"level": "purple"}))


(NAME,) = BY_ENGINE


def told(batches: Sequence[dict[str, float]]) -> dict[str, Distance]:
    """The distances that batches with these come to."""
    distances = Distances()
    for batch in batches:
        distances.take({"train/loss": 1.0, NAME: 9.0, **{of_engine(NAME, engine): value for engine, value in batch.items()}})
    return distances.of_engines()


def found(batches: Sequence[dict[str, float]], *, float32: bool, **bounds: Any) -> dict[str, Level]:
    """Findings at once, by objective."""
    signs = Signs(numbers=numbers(), distances=told(batches), float32=float32)
    return {one.objective: one.level for one in Judge(SloConfig(**bounds)).look(signs, now_s=0.0, time_s=0.0)}


def test_a_restarted_engine_is_the_same_worker() -> None:
    assert of_engine(NAME, "engine-0-1f2e3d") == of_engine(NAME, "engine-0-aa") == f"{NAME}/engine-0"
    assert of_engine(NAME, "http://10.0.0.1:8000/x") == f"{NAME}/http:__10.0.0.1:8000_x"
    assert metric(of_engine(NAME, "engine-0-1f2e3d")).unit == "nats"
    for engine in ("", "ä" * 99, "a b"):
        assert declared(of_engine(NAME, engine)) is not None
    assert declared(f"{NAME}/") is None and declared("train/loss/engine-0") is None


def test_what_is_usual_is_known_after_the_first_batches_and_what_holds_is_no_single_one() -> None:
    rising = [{"engine-0-a": float(n)} for n in range(1, FIRST + 1)]
    assert told(rising[:-1]) == {"engine-0": Distance(FIRST - 2.0, None)}
    assert told([*rising, {"engine-0-b": 90.0}, {}, {"engine-0-b": 90.0}]) == {"engine-0": Distance(90.0, (FIRST + 1) / 2)}
    assert told([*rising, {"engine-0-b": 90.0}])["engine-0"].now == FIRST
    assert len(told([{f"{n}-x": 1.0} for n in range(2 * MOST_ENGINES)])) == MOST_ENGINES


FINE = [{"engine-0-a": 0.01, "engine-1-b": 0.012}] * FIRST


@pytest.mark.parametrize(
    ("batches", "float32", "levels"),
    [
        pytest.param([{"engine-0-a": 5e-8}], True, {}, id="float32, rounding"),
        pytest.param([{"engine-0-a": 2.8e-3}], True, {"logprob_float32": Level.BREACH}, id="float32, a router's bias left out"),
        pytest.param([{"engine-0-a": 8e-5}], True, {"logprob_float32": Level.WARN}, id="float32, near the bound"),
        pytest.param([{"engine-0-a": 1e-6, "engine-1-b": 4.6}], True, {"logprob_float32": Level.BREACH}, id="float32, one of two"),
        pytest.param([{"engine-0-a": 4.6}, *[{"engine-0-a": 1e-6}] * 2], True, {}, id="float32, once"),
        pytest.param([{"engine-0-a": 2.8e-3}], False, {}, id="bfloat16, rounding"),
        pytest.param([{"engine-0-a": 0.2}], False, {"logprob_bfloat16": Level.BREACH}, id="bfloat16, from the first batch on"),
        pytest.param(FINE, False, {}, id="bfloat16, usual"),
        pytest.param([*FINE, *[{"engine-1-c": 0.05}] * 2], False, {"logprob_growth": Level.BREACH}, id="bfloat16, one has grown"),
        pytest.param([*FINE, {"engine-1-c": 0.05}], False, {}, id="bfloat16, in one batch"),
        pytest.param([{}], True, {}, id="not known"),
    ],
)
def test_an_engine_whose_log_probs_are_not_the_trainers_is_found_at_once(
    batches: Sequence[dict[str, float]], float32: bool, levels: dict[str, Level]
) -> None:
    assert found(batches, float32=float32) == levels
    assert found(batches, float32=float32, logprob_float32=0.0, logprob_bfloat16=0.0, logprob_growth=0.0) == {}


def test_it_is_named_and_so_are_the_others() -> None:
    signs = Signs(numbers=numbers(), distances=told([{"engine-0-a": 1e-6, "engine-1-b": 4.6}]))
    (one,) = Judge(SloConfig()).look(signs, now_s=0.0, time_s=0.0)
    assert [cause.name for cause in one.causes] == ["foreign_logprobs"]
    assert all(text in line_of(one) for text in ("slo.logprob_float32 is 4.6", "log-probs of engine-1", "other engines 1e-06"))
