"""Bounds of the objectives and of their causes, each from both sides, and what people are told."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from streamrl.config.metrics import SloConfig
from streamrl.monitor.numbers import Cause, EngineLine, Finding, Level, RunNumbers, Standing, WorkerLine
from streamrl.monitor.slo import OBJECTIVES, Judge, Signs, causes, detail_of, findings_of, line_of, values, worst_of
from streamrl.monitor.view import RunView
from streamrl.schemas.control import Untrained
from streamrl.schemas.events import Event

NOTHING: RunNumbers = RunView("demo").numbers(elapsed_s=1.0)
DROPPED = "rollouts/dropped_total/"


def engine(index: int = 0, **fields: Any) -> EngineLine:
    """One that samples 100 tokens a second and has half of its slots free."""
    given = {"serving": "0.1", "running": 4, "waiting": 0, "slots": 8, "behind": 0, "tokens_per_s": 100.0}
    return EngineLine(engine=f"engine-{index}-ab", **{**given, **fields})


def signs(numbers: dict[str, Any] | None = None, drops: dict[str, int] | None = None, **fields: Any) -> Signs:
    """A run without engines; `shares` by `<kind>/<state>`, `run` for other values of the window."""
    shares = {name.replace("/", "/share/", 1): value for name, value in fields.pop("shares", {}).items()}
    decided = {DROPPED + reason: count for reason, count in (drops or {}).items()} | {"trained": fields.pop("trained", 0)}
    window = {"": shares | fields.pop("run", {})}
    return Signs(numbers=replace(NOTHING, **(numbers or {})), window=window, decided=decided, **fields)


def two(**fields: Any) -> dict[str, Any]:
    """Two engines, the first of them with these fields."""
    return {"engines": (engine(0, **fields), engine(1))}


def test_what_is_not_known_is_nothing() -> None:
    bare = Signs(numbers=NOTHING)
    assert (bare.still_s, bare.num_rollouts, bare.batch_tasks, bare.of_run("x"), bare.share("a", "b")) == (0.0, 1, 1, None, 0.0)
    assert (bare.in_use, bare.saturated, bare.dropped, bare.barren, bare.drop_rate, bare.starved) == (0, 0.0, {}, 0, None, None)
    assert values(bare) == {"stream_lag_s": 0.0, "no_progress_s": 0.0}


SIGNS: list[tuple[dict[str, Any], str, Any]] = [
    ({"shares": {"producer/tools": 0.25}}, "in_use", 0.25),
    ({"shares": {f"producer/{state}": 0.125 for state in ("generate", "tools", "reward", "publish", "wait_engine")}}, "in_use", 0.625),
    ({"shares": {"producer/wait_credit": 0.5, "engine/tools": 0.5}}, "in_use", 0.0),
    ({"run": {"starvation/engines_saturated": 0.0}, "numbers": two(running=8, waiting=1)}, "saturated", 0.0),
    ({"numbers": two(running=8, waiting=1)}, "saturated", 0.5),
    ({"numbers": two(running=9, waiting=1)}, "saturated", 0.5),
    ({"numbers": two(running=8)}, "saturated", 0.0),
    ({"numbers": two(running=7, waiting=3)}, "saturated", 0.0),
    ({"numbers": two(running=8, waiting=1, pinned=True)}, "saturated", 0.0),
    ({"numbers": {"engines": (engine(pinned=True),)}}, "saturated", 0.0),
    ({"drops": {"stale": 3, "late": 0}, "trained": 7}, "dropped", {"stale": 3.0}),
    ({"numbers": {"barren_tasks": 9}, "batch_tasks": 6}, "barren", 3),
    ({"numbers": {"barren_tasks": 6}, "batch_tasks": 9}, "barren", 0),
    ({"drops": {"stale": 3}, "trained": 2, "num_rollouts": 4}, "drop_rate", 3 / 11),
    ({"numbers": {"barren_tasks": 3}, "trained": 2, "num_rollouts": 4}, "drop_rate", 0.4),
    ({"numbers": {"barren_tasks": 2}, "drops": {"late": 4}, "num_rollouts": 4}, "drop_rate", 2 / 3),
    ({"trained": 2}, "drop_rate", 0.0),
    ({"drops": {"stale": 1}}, "drop_rate", 1.0),
    ({"shares": {"trainer/wait_samples": 0.0}, "batch": {"perf/wait_s": 1.0, "perf/step_s": 1.0}}, "starved", 0.0),
    ({"batch": {"perf/wait_s": 1.0, "perf/step_s": 3.0}}, "starved", 0.25),
    ({"batch": {"perf/wait_s": 0.0, "perf/step_s": 0.5}}, "starved", 0.0),
    ({"batch": {"perf/wait_s": 1.0}}, "starved", None),
    ({"batch": {"perf/step_s": 1.0}}, "starved", None),
    ({"batch": {"perf/wait_s": 0.0, "perf/step_s": 0.0}}, "starved", None),
]


def test_signs() -> None:
    for given, name, wanted in SIGNS:
        assert getattr(signs(**given), name) == wanted, (given, name)


def test_values_by_objective() -> None:
    known = signs(
        {"stream_s": 5.0, "engines": (engine(behind=2), engine(1, behind=None), engine(2, behind=1))},
        {"late": 1},
        trained=3,
        still_s=7.0,
        batch={"staleness/p95": 1.5},
        shares={"trainer/wait_samples": 0.5},
    )
    found = {"p95_age": 1.5, "stream_lag_s": 5.0, "versions_behind": 2.0, "starvation": 0.5, "drop_rate": 0.25, "no_progress_s": 7.0}
    assert values(known) == found
    assert (*found, "logprob_float32", "logprob_bfloat16", "logprob_growth") == OBJECTIVES


BARREN: dict[str, Any] = {"barren_tasks": 5}
TRUNCATED = Untrained(ended={"truncated": 3})
STANDS = {"numbers": {"standing": Standing(what="credit", hint="see there")}}
NAMES: list[tuple[str, dict[str, Any], str]] = [
    ("versions_behind", {}, "unknown"),
    ("versions_behind", STANDS, "standing"),
    ("p95_age", STANDS, "standing"),
    ("drop_rate", STANDS, "standing"),
    # A full stream.
    ("stream_lag_s", {"shares": {"producer/wait_room": 0.24}}, "slow_engine"),
    ("stream_lag_s", {"shares": {"producer/wait_room": 0.25}}, "full_stream"),
    ("no_progress_s", {"numbers": {"stalled": ("producer-0",)}}, "full_stream"),
    ("starvation", {"numbers": {"stalled": ("producer-0",)}}, "full_stream"),
    # Hung tools.
    ("drop_rate", {"numbers": {"hung_tasks": 4, "tasks_in_flight": 16}}, "unknown"),
    ("drop_rate", {"numbers": {"hung_tasks": 5, "tasks_in_flight": 16}}, "hung_tool"),
    ("drop_rate", {"numbers": {"hung_tasks": 1}}, "hung_tool"),
    ("drop_rate", {"drops": {"timeout": 1, "filtered": 3}, "trained": 9}, "unknown"),
    ("drop_rate", {"drops": {"timeout": 2, "filtered": 3}, "trained": 9}, "hung_tool"),
    ("p95_age", {"numbers": {"hung_tasks": 1}}, "hung_tool"),
    ("drop_rate", {"numbers": {"hung_tasks": 1}, "shares": {"producer/reward": 0.5}}, "unknown"),
    # What is made in vain.
    ("drop_rate", {"drops": {"stale": 4}, "trained": 5}, "unknown"),
    ("drop_rate", {"drops": {"stale": 4}, "trained": 4}, "stale"),
    ("starvation", {"drops": {"stale": 4}}, "stale"),
    ("drop_rate", {"drops": {"stale": 2, "filtered": 2}}, "unknown"),
    ("drop_rate", {"drops": {"stale": 1, "expired": 2, "filtered": 2}}, "stale"),
    ("drop_rate", {"drops": {"other": 2, "late": 2}}, "unknown"),
    ("drop_rate", {"drops": {"other": 3, "late": 2}}, "left_out"),
    *(
        ("drop_rate", {"drops": {reason: 3, "x": 2}}, cause)
        for cause, reasons in {
            "zero_variance": "zero_variance",
            "stale": "stale expired",
            "hung_tool": "timeout",
            "failing_code": "failed deliveries",
            "dead_letters": "poison",
            "no_baseline": "no_baseline",
            "given_up": "filtered",
            "lost_tasks": "lost",
            "late_rewards": "unrewarded late superseded_reward",
            "filters": "too_short too_long repetitive too_hard too_easy filter",
            "truncated": "truncated",
            "inexact": "inexact",
            "empty": "empty",
            "rows": "row_broken row_too_long",
            "lost_blobs": "blob_missing",
            "lost_version": "lost_version",
            "duplicates": "duplicate",
        }.items()
        for reason in reasons.split()
    ),
    ("drop_rate", {"drops": {"timeout": 3}, "shares": {"producer/reward": 0.5}}, "slow_reward"),
    ("drop_rate", {"drops": {"failed": 3}, "shares": {"producer/reward": 0.5}}, "failing_code"),
    # Without a batch.
    ("drop_rate", {"numbers": BARREN}, "unknown"),
    ("drop_rate", {"numbers": {"barren_tasks": 6, "failed_tasks": 3}, "stones": {"failed": 3}}, "unknown"),
    ("drop_rate", {"numbers": BARREN | {"failed_tasks": 3}, "stones": {"failed": 3}}, "failing_code"),
    ("drop_rate", {"numbers": {"barren_tasks": 6, "given_up_tasks": 3}, "stones": {"lost": 3}}, "unknown"),
    ("drop_rate", {"numbers": BARREN | {"given_up_tasks": 3}, "stones": {"lost": 3}}, "lost_tasks"),
    ("drop_rate", {"numbers": BARREN | {"given_up_tasks": 2, "failed_tasks": 3}, "stones": {"lost": 2, "failed": 3}}, "failing_code"),
    ("drop_rate", {"numbers": BARREN | {"untrained": Untrained(ended={"stale": 3, "zero_variance": 2})}}, "stale"),
    ("drop_rate", {"numbers": BARREN | {"untrained": Untrained(ended={"stale": 3, "zero_variance": 3})}}, "unknown"),
    ("drop_rate", {"numbers": BARREN | {"untrained": Untrained(ended={"poison": 3}, dead=3)}}, "dead_letters"),
    ("drop_rate", {"numbers": BARREN | {"failed_tasks": 5, "untrained": TRUNCATED}, "stones": {"failed": 5}}, "truncated"),
    ("drop_rate", {"numbers": BARREN, "drops": {"late": 1}}, "late_rewards"),
    # An engine that is sick.
    ("versions_behind", {"numbers": {"engines": (engine(tokens_per_s=0.0),)}}, "unknown"),
    ("versions_behind", {"numbers": two(tokens_per_s=40.0)}, "unknown"),
    ("versions_behind", {"numbers": two(tokens_per_s=39.0)}, "sick_engine"),
    ("versions_behind", {"numbers": two(tokens_per_s=39.0, running=0)}, "unknown"),
    ("versions_behind", {"numbers": two(tokens_per_s=39.0, running=1)}, "sick_engine"),
    ("versions_behind", {"numbers": two(tokens_per_s=39.0, running=0, waiting=1)}, "sick_engine"),
    ("versions_behind", {"numbers": two(tokens_per_s=39.0, pinned=True)}, "unknown"),
    ("versions_behind", {"numbers": {"engines": (engine(tokens_per_s=-1.0), engine(1, tokens_per_s=0.0))}}, "unknown"),
    ("versions_behind", {"numbers": {"engines": (engine(tokens_per_s=0.1), engine(1, tokens_per_s=0.9))}}, "sick_engine"),
    ("versions_behind", {"numbers": two(behind=2)}, "unknown"),
    ("versions_behind", {"numbers": two(behind=3)}, "sick_engine"),
    ("versions_behind", {"numbers": {"engines": (engine(behind=4), engine(1, behind=1))}}, "unknown"),
    ("versions_behind", {"numbers": {"engines": (engine(behind=5), engine(1, behind=1))}}, "sick_engine"),
    ("versions_behind", {"numbers": {"engines": (engine(behind=3), engine(1, behind=None))}}, "sick_engine slow_weights"),
    ("versions_behind", {"numbers": {"engines": (engine(behind=None), engine(1, behind=None))}}, "unknown"),
    # All engines.
    ("versions_behind", {"numbers": {"engines": (engine(behind=1), engine(1, behind=3))}}, "unknown"),
    ("versions_behind", {"numbers": {"engines": (engine(behind=2), engine(1, behind=3))}}, "slow_weights"),
    ("p95_age", {"numbers": {"engines": (engine(behind=2),)}}, "slow_weights"),
    # Rewards and tools.
    ("starvation", {"shares": {"producer/reward": 0.3, "producer/generate": 0.3}, "numbers": two()}, "few_producers"),
    ("starvation", {"shares": {"producer/reward": 0.4, "producer/generate": 0.3}, "numbers": two()}, "slow_reward"),
    ("starvation", {"shares": {"producer/tools": 0.3, "producer/generate": 0.3}, "numbers": two()}, "few_producers"),
    ("p95_age", {"shares": {"producer/tools": 0.4, "producer/generate": 0.3}, "numbers": two()}, "slow_tool"),
    ("p95_age", {"shares": {"producer/reward": 0.4, "producer/generate": 0.3}, "numbers": two()}, "slow_reward"),
    ("starvation", {"numbers": two()}, "few_producers"),
    # Whoever has no room for more.
    ("starvation", {"run": {"starvation/engines_saturated": 0.25}, "numbers": two()}, "few_producers"),
    ("starvation", {"run": {"starvation/engines_saturated": 0.26}, "numbers": two()}, "slow_engine"),
    ("starvation", {"shares": {"producer/wait_credit": 0.5}, "numbers": two()}, "few_producers"),
    ("starvation", {"shares": {"producer/wait_credit": 0.51}, "numbers": two()}, "slow_engine"),
    ("starvation", {"numbers": {"engines": (engine(pinned=True),)}}, "slow_engine"),
    # The trainer.
    ("p95_age", {"shares": {"trainer/wait_samples": 0.5}}, "slow_trainer"),
    ("stream_lag_s", {"shares": {"trainer/wait_samples": 0.5}}, "slow_trainer"),
    ("no_progress_s", {"shares": {"trainer/wait_samples": 0.51}}, "slow_engine"),
    ("starvation", {"shares": {"trainer/wait_samples": 0.1}}, "slow_engine"),
]


def test_causes_from_both_sides_of_their_bounds() -> None:
    for objective, given, names in NAMES:
        assert [cause.name for cause in causes(objective, signs(**given))] == names.split(), (objective, given)


EVERYTHING: dict[str, Any] = {
    "numbers": {"stalled": ("producer-0",), "hung_tasks": 1, **two(behind=9, tokens_per_s=1.0)},
    "drops": {"stale": 3},
    "shares": {"trainer/wait_samples": 0.2, "producer/tools": 0.2},
}
ORDERS = {
    "p95_age": "sick_engine hung_tool slow_trainer slow_tool",
    "stream_lag_s": "full_stream slow_trainer hung_tool stale sick_engine slow_tool",
    "versions_behind": "sick_engine",
    "starvation": "full_stream hung_tool stale sick_engine slow_tool",
    "drop_rate": "stale hung_tool",
    "no_progress_s": "full_stream slow_trainer hung_tool stale sick_engine slow_tool",
}


def test_the_likeliest_cause_comes_first() -> None:
    found = {objective: " ".join(cause.name for cause in causes(objective, signs(**EVERYTHING))) for objective in ORDERS}
    assert found == ORDERS
    stands = signs(**{**EVERYTHING, "numbers": EVERYTHING["numbers"] | STANDS["numbers"]})
    for objective in ORDERS:
        first = "stale hung_tool " if objective == "drop_rate" else ""
        assert [cause.name for cause in causes(objective, stands)] == f"{first}standing".split(), "what it waits for is the one cause"


def level(value: float, judge: Judge, now_s: float = 0.0) -> str:
    found = judge.look(signs(still_s=value), now_s=now_s, time_s=1000.0 + now_s)
    return str(found[0].level) if found else "ok"


@pytest.mark.parametrize(
    ("before", "value", "warn", "wanted"),
    [
        (0.0, 74.0, 0.75, "ok"),
        (0.0, 75.0, 0.75, "warn"),
        (0.0, 99.0, 0.75, "warn"),
        (0.0, 100.0, 0.75, "breach"),
        (0.0, 99.0, 0.0, "ok"),
        (100.0, 90.0, 0.75, "breach"),
        (100.0, 89.0, 0.75, "warn"),
        (100.0, 67.5, 0.75, "warn"),
        (100.0, 67.0, 0.75, "ok"),
        (75.0, 67.5, 0.75, "warn"),
        (75.0, 67.0, 0.75, "ok"),
        (75.0, 90.0, 0.75, "warn"),
        (100.0, 89.0, 0.0, "ok"),
    ],
)
def test_levels_from_both_sides_of_their_bounds(before: float, value: float, warn: float, wanted: str) -> None:
    judge = Judge(SloConfig(no_progress_s=100.0, stream_lag_s=0.0, warn=warn, hold_s=0.0))
    level(before, judge)
    assert level(value, judge, 1.0) == wanted


@pytest.mark.parametrize(
    "seen",
    [
        [
            (110.0, {10.0: "ok", 39.9: "ok", 40.0: "breach"}),
            (75.0, {50.0: "breach", 79.0: "breach"}),
            (10.0, {79.5: "breach", 80.0: "ok"}),  # both are below it
            (85.0, {90.0: "ok", 110.0: "ok"}),
            (110.0, {115.0: "ok", 120.0: "breach"}),  # both are above it
        ],
        [(85.0, {0.0: "ok", 30.0: "warn"}), (110.0, {40.0: "warn", 60.0: "warn"}), (10.0, {65.0: "warn", 94.0: "warn", 95.0: "ok"})],
    ],
)
def test_a_level_holds_from_when_it_was_first_seen(seen: list[tuple[float, dict[float, str]]]) -> None:
    judge = Judge(SloConfig(no_progress_s=100.0, stream_lag_s=0.0, hold_s=30.0))
    for value, levels in seen:
        assert {at_s: level(value, judge, at_s) for at_s in levels} == levels, value


def test_a_finding_has_what_it_was_held_against() -> None:
    judge = Judge(SloConfig(starvation=0.8, no_progress_s=10.0, stream_lag_s=0.0, drop_rate=0.0, hold_s=5.0))
    fields: dict[str, Any] = {**EVERYTHING, "shares": {"trainer/wait_samples": 0.7}, "still_s": 20.0}
    given = signs(**fields)
    assert judge.look(given, now_s=1.0, time_s=1001.0) == ()
    first, second = judge.look(given, now_s=6.0, time_s=1006.0)
    named = causes("no_progress_s", given)[:2]
    assert first == Finding(objective="no_progress_s", level=Level.BREACH, value=20.0, bound=10.0, causes=named, since_s=1006.0)
    assert (second.objective, second.level, second.value, second.bound) == ("starvation", Level.WARN, 0.7, 0.8)
    assert [one.since_s for one in judge.look(given, now_s=9.0, time_s=1009.0)] == [1006.0, 1006.0]
    assert len(named) == 2


def test_a_breach_that_passes_says_what_it_was_and_a_model_that_loads_breaks_no_other_bound() -> None:
    judge = Judge(SloConfig(no_progress_s=1800.0, stream_lag_s=60.0, drop_rate=0.9, hold_s=30.0))
    seen = []
    for now_s, late, barren in ((0.0, 0, 20), (10.0, 94, 0), (40.0, 94, 0), (50.0, 60, 0), (80.0, 60, 0)):
        numbers = {"barren_tasks": barren, "stream_s": 0.0}
        given = signs(numbers=numbers, drops={"late": late}, trained=0 if barren else 100 - late, batch_tasks=10)
        seen.append([(one.level, one.value, one.reached) for one in judge.look(given, now_s=now_s, time_s=now_s)])
    assert seen == [[], [], [("breach", 0.94, None)], [("breach", 0.6, 0.94)], []]
    loads = {"stream_s": 1e6, "workers": (WorkerLine(worker="trainer-0", state="loading"),)}
    assert judge.look(signs(numbers=loads), now_s=200.0, time_s=200.0) == judge.look(signs(numbers=loads), now_s=300.0, time_s=300.0) == ()


def test_what_people_are_told_is_what_it_is_and_what_to_do() -> None:
    one = Finding(objective="drop_rate", level=Level.WARN, value=0.81234, bound=0.5, causes=(Cause("a", "b", "c"), Cause("d", "e", "f")))
    what = "part of the rollouts decided on in the newest window that was dropped"
    ends = "the warn level ends once it has stayed so low for slo.hold_s"
    lines = [
        f"warn: slo.drop_rate is 0.812, bound 0.5 ({what}): b. hint: c; e. hint: f",
        f"warn: slo.drop_rate was 0.9 and is 0.3 now, bound 0.5 ({what}; {ends}): ",
    ]
    assert [line_of(one), line_of(replace(one, reached=0.9, value=0.3, causes=()))] == lines
    assert worst_of() == Level.OK and worst_of(Level.WARN, Level.BREACH, Level.OK) == Level.BREACH
    told = detail_of([one])
    assert told["level"] == "warn" and findings_of(Event(kind="slo", worker="w", detail=told)) == (one,)
    assert findings_of(Event(kind="slo", worker="w", detail={"level": "ok"})) == ()
    found = [f"{cause.name}: {cause.what} | {cause.hint}" for objective, given in TOLD for cause in causes(objective, signs(**given))]
    assert found == Path(__file__).with_name("slo_causes.txt").read_text().splitlines()


TOLD: list[tuple[str, dict[str, Any]]] = [
    ("versions_behind", {}),
    ("drop_rate", STANDS),
    ("drop_rate", {"numbers": {"hung_tasks": 5, "tasks_in_flight": 16, "hung_s": 12.0}}),
    ("drop_rate", {"drops": {"timeout": 2, "filtered": 3}, "trained": 9}),
    ("starvation", {"drops": {"timeout": 3}}),
    *(
        ("drop_rate", {"drops": {reason: 3}})
        for reason in ["zero_variance", "stale", "failed", "no_baseline", "late", "filter", "truncated"]
    ),
    ("versions_behind", {"numbers": two(tokens_per_s=39.0)}),
    ("versions_behind", {"numbers": two(behind=3)}),
    ("versions_behind", {"numbers": {"engines": (engine(behind=2), engine(1, behind=3))}}),
    ("starvation", {"shares": {"producer/reward": 0.4, "producer/generate": 0.3, "trainer/wait_samples": 0.9}, "numbers": two()}),
    ("starvation", {"shares": {"producer/tools": 0.4, "producer/generate": 0.3, "engine/idle": 0.2}, "numbers": two()}),
    ("starvation", {"run": {"starvation/engines_saturated": 0.26}, "numbers": two(), "shares": {"trainer/wait_samples": 0.9}}),
    ("starvation", {"run": {"starvation/engines_saturated": 0.25}, "numbers": two(), "shares": {"producer/wait_credit": 0.51}}),
    ("starvation", {"numbers": two(), "shares": {"trainer/wait_samples": 0.9}}),
    ("starvation", {"numbers": two(), "shares": {"engine/idle": 0.2}}),
    ("starvation", {}),
    ("stream_lag_s", {"shares": {"producer/wait_room": 0.25}}),
    ("p95_age", {"shares": {"trainer/wait_samples": 0.5}, "numbers": two()}),
]
