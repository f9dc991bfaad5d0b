"""Each trouble of a run, as workers tell it in numbers, is named, and nothing else is."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

import streamrl.monitor.waits
from streamrl.config.metrics import SloConfig
from streamrl.errors import SchemaError
from streamrl.monitor.distances import FIRST, Distance, Distances
from streamrl.monitor.numbers import Cause, EngineLine, Finding, Level, RunNumbers, Standing, WorkerLine
from streamrl.monitor.slo import Judge, Signs, causes, detail_of, findings_of, line_of, values, worst_of
from streamrl.monitor.untrained import CAUSES, barren_line, cause_of, since_newest_batch
from streamrl.monitor.view import RunView
from streamrl.monitor.waits import diagnose
from streamrl.runtime.worker import AGENTS_WAIT, ENGINES_FAIL, ENGINES_LEFT_OUT, WEIGHTS_FAIL
from streamrl.schemas.control import Grant, Untrained, WorkerPresence
from streamrl.schemas.events import FULL_BLOBS, FULL_SERVER, FULL_STREAM, SLO_EVENT, Event, MetricReport
from streamrl.schemas.samples import Tombstone
from streamrl.telemetry.names import BY_ENGINE, DROP_REASONS, MOST_ENGINES, declared, metric, of_engine

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


def calls_of(name: str, *paths: Path) -> list[ast.Call]:
    """Every call of a function by its bare name in these modules."""
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text()))]
    return [one for one in nodes if isinstance(one, ast.Call) and isinstance(one.func, ast.Name) and one.func.id == name]


def test_every_cause_stands_in_the_table_of_the_docs() -> None:
    root = Path(__file__).parents[2]
    calls = calls_of("Cause", *(root / "streamrl" / "monitor").glob("*.py"))
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


ENGINE = EngineLine(engine="engine-0-abc", serving="0.3", running=0, waiting=0, slots=8)
STATES = {"trainer-0": "waits for samples: 0 groups", "engine-0": "running", "feeder-0": "waits for credit", "producer-0": "running"}
ROLLOUTS, BATCH = 4, 8
GATEWAY = {"producer-0": "", "gateway-0": f"{AGENTS_WAIT}: none has a session open"}


def run_of(
    states: dict[str, str] | None = None,
    *,
    trainer: Untrained | None = None,
    engines: tuple[EngineLine, ...] = (ENGINE,),
    in_flight: int = 0,
    issued: int = 24,
    retired: int = 8,
    ungraded: int = 0,
    stones: dict[str, int] | None = None,
    workers: dict[str, dict[str, Any]] | None = None,
) -> tuple[RunNumbers, RunView]:
    """A run without a batch of which 24 tasks are granted beyond those that have ended, as its workers tell of themselves."""
    view = RunView("demo", steps=100)
    for name, state in (STATES | (states or {})).items():
        if state:
            detail = msgspec.to_builtins(trainer or Untrained()) if name == "trainer-0" else {}
            view.worker(name, WorkerPresence(worker=name, kind=name[:-2], state=state, pid=1, host="here", detail=detail))
    view.issued(issued, ungraded=ungraded)
    view.grant(Grant(granted=24 if retired <= 8 else retired + 16, version=0, retired=retired))
    view.metric(MetricReport(worker="producer-0", mean={"producer/in_flight_tasks": float(in_flight)}))
    sequence = 0
    for reason, tasks in (stones or {}).items():
        for _ in range(tasks):
            sequence += 1
            view.tombstone(sequence, Tombstone(task=sequence, reason=reason, group_size=ROLLOUTS, source="main"))
    numbers = replace(view.numbers(elapsed_s=60.0), engines=engines)
    lines = {worker.worker: worker for worker in numbers.workers}
    for name, fields in (workers or {}).items():
        lines[name] = replace(lines.get(name, WorkerLine(worker=name, state="running")), **fields)
    return replace(numbers, workers=tuple(lines.values())), view


def named(numbers: RunNumbers, view: RunView) -> set[str]:
    """Names of all causes, whichever objective is missed of those that are judged."""
    signs = Signs(numbers=numbers, stones=view.failures.all_reasons, num_rollouts=ROLLOUTS, batch_tasks=BATCH, still_s=9999.0)
    return {cause.name for objective in values(signs) for cause in causes(objective, signs)}


DIED = "exit code 1; error: cannot write 1661 bytes of policy 0.0 to /dev/shm/streamrl: No space left on device"
LOSS = "exit code 1; TypeError: my_loss() takes 1 positional argument but 2 were given"
FAILS = f"{ENGINES_FAIL}: engine-0-abc, 12 requests in a row, the newest: status 500: out of memory"
FIRST_WEIGHTS = "waits for its first weights"
FULL = {"producer-0": FULL_STREAM, "feeder-0": FULL_SERVER}
NO_SPACE = "No space left on device"
NO_WEIGHTS = f"{FIRST_WEIGHTS}: 0.0 could not be taken: {NO_SPACE}"
WRONG_KEY = GATEWAY | {"gateway-0": f"{GATEWAY['gateway-0']}; the newest call was refused: 401 expected a key"}
SESSIONS = GATEWAY | {"gateway-0": f"{AGENTS_WAIT}: 3 sessions are open, no call was answered for 40 s"}
FULL_FOR, NONE_SERVES = "room on a full stream, for which", "an engine: none serves"
CREDIT, NEWER = "credit: all 24 granted tasks are issued, producers hold none, and", "a version: 3 requests ask for a newer one"
BUSY, ASKED = (replace(ENGINE, running=4),), (replace(ENGINE, waiting=3),)
GRADES = {"rewarder-0": "scores: 3 groups"}
REFUSED = "waits for a version newer than 0.3, which 3 requests ask for: 0.4 could not be taken: digest"
REFUSES = {"states": {"engine-0": REFUSED}, "engines": ASKED, "in_flight": 3}


def died(states: dict[str, str] | None = None, **fields: str) -> dict[str, Any]:
    """A trainer that has ended once, and no engine that serves what it has not published."""
    return {"states": states, "workers": {"trainer-0": {"said": DIED, **fields}}, "engines": ()}


def bare(state: str, **more: object) -> dict[str, Any]:
    """No engine serves; that is what the one that is there says."""
    return {"states": {"engine-0": state}, "engines": (), **more}


STANDING: dict[str, tuple[dict[str, Any], str, str]] = {
    "the bus": ({"away": 11.0}, "bus", "the bus"),
    "a trainer that its publisher has ended": (died(state="waiting"), "ended", f"... {NO_SPACE}"),
    "a trainer that loads again": (died({"trainer-0": "loading"}), "ended", f"... {NO_SPACE}"),
    "a trainer that has loaded again, and will end as before": (died(), "ended", f"... {NO_SPACE}"),
    "a loss of the user's": ({"workers": {"trainer-0": {"state": "ended", "said": LOSS}}}, "ended", "... my_loss() takes 1 positional"),
    "a producer that has ended": ({"states": {"producer-0": "waiting"}, "in_flight": 4}, "ended", "producer-0, which has ended"),
    "a silent worker": ({"workers": {"feeder-0": {"silent_s": 11.0}}}, "silent", "... feeder-0"),
    "a model that loads": ({"states": {"engine-0": "loading"}, "engines": ()}, "loading", "engine-0, which is loading"),
    "a full stream": ({"states": {"producer-0": FULL_STREAM}, "in_flight": 4}, "full_stream", f"{FULL_FOR} producer-0 wait"),
    "full blobs": ({"states": {"feeder-0": FULL_BLOBS}, "in_flight": 4}, "full_stream", f"{FULL_FOR} feeder-0 wait"),
    "a full disk of the bus": ({"states": FULL, "in_flight": 4}, "full_server", "... feeder-0, producer-0"),
    "no trainer": ({"states": {"trainer-0": ""}}, "no_trainer", "a trainer: none is there"),
    "a long step": ({"states": {"trainer-0": "trains version 1"}}, "step", "trainer-0, which trains version 1"),
    "no engine": ({"states": {"engine-0": ""}, "engines": ()}, "no_engine", NONE_SERVES),
    "an engine with a pinned version": ({"engines": (replace(ENGINE, pinned=True),), "in_flight": 4}, "no_engine", NONE_SERVES),
    "an engine that cannot take its first weights": (bare(NO_WEIGHTS, in_flight=4), "no_engine", f"... {NO_SPACE}"),
    "an engine that waits": (bare(FIRST_WEIGHTS, in_flight=4), "no_engine", f"{NONE_SERVES} a version; engine-0 waits for its first"),
    "a publisher that takes long": (bare(FIRST_WEIGHTS, trainer=Untrained(publishing="0.0")), "publishing", "... version 0.0"),
    "an engine's 500s, with tasks in hand": ({"states": {"producer-0": FAILS}, "in_flight": 4}, "failing_engine", "... status 500: out of"),
    "an engine's 500s, with tasks given back": ({"states": {"producer-0": FAILS}}, "failing_engine", "... status 500: out of memory"),
    "a version that is newer": ({"engines": ASKED, "in_flight": 4}, "version", f"{NEWER} than engines serve (0.3)"),
    "a version that engines refuse": (REFUSES, "version", "... 0.4 could not be taken: digest"),
    "no rewarder": ({"ungraded": 3}, "no_rewarder", "a rewarder: 3 groups wait for rewards, and none is there"),
    "a grader that hangs": ({"states": GRADES, "ungraded": 3}, "grading", "rewards: 3 groups wait for them; rewarder-0 scores: 3 groups"),
    "a gateway without agents": ({"states": GATEWAY}, "agents", "... none has a session open"),
    "a gateway whose agents have stopped": ({"states": SESSIONS, "in_flight": 2}, "agents", "... 3 sessions are open"),
    "agents with a wrong key": ({"states": WRONG_KEY}, "agents", "... 401 expected a key"),
    "no producer": ({"states": {"producer-0": ""}}, "no_producer", "a producer: none is there"),
    "a feeder that issues nothing": ({"issued": 16}, "feeder", "the feeder: 16 of 24 granted tasks"),
    "dead letters without a task": ({"trainer": Untrained(dead=9, newest_dead="another digest")}, "dead_letters", "... another digest"),
    "rewards that do not come": ({"trainer": Untrained(unrewarded=5)}, "late_rewards", "... 5 groups"),
    "records that are lost": ({}, "credit", f"{CREDIT} 16 of them have no end"),
    "an engine that makes no tokens": (
        {"engines": BUSY, "in_flight": 4},
        "stuck_engine",
        "engines, which have requests and make no tokens",
    ),
    "a tool that hangs": ({"in_flight": 4}, "user_code", "user code: producers hold 4 tasks and ask no engine"),
}
"""Each row has what a run has, the cause, and what is said: its beginning, and behind `... ` what else is in it."""


@pytest.mark.parametrize("trouble", STANDING)
def test_of_a_standing_run_its_one_cause_is_named_with_what_a_worker_says_of_it(trouble: str) -> None:
    given, cause, said = STANDING[trouble]
    begins, _, words = said.partition("... ")
    away_s = given.get("away", 0.0)
    numbers, view = run_of(**{key: value for key, value in given.items() if key != "away"})
    found = diagnose(numbers, away_s=away_s)
    assert (found.cause, found.what.startswith(begins), words in found.what, bool(found.hint)) == (cause, True, True, True)
    assert named(replace(numbers, standing=found), view) == {"standing"}, "nothing else is said beside it"


def test_each_cause_of_a_standing_run_is_told_here() -> None:
    calls = calls_of("Standing", Path(streamrl.monitor.waits.__file__))
    names = {word.value.value for call in calls for word in call.keywords if word.arg == "cause" and isinstance(word.value, ast.Constant)}
    assert names - {"unknown"} == {cause for _, cause, _ in STANDING.values()}


UNTRAINED = [(reason, cause.name) for reasons, cause in CAUSES for reason in reasons]


@pytest.mark.parametrize(("reason", "cause"), [*UNTRAINED, ("other", "left_out")])
def test_why_nothing_is_trained_before_the_first_batch_the_trainer_says_and_nothing_else_is_named(reason: str, cause: str) -> None:
    """Also where tombstones would say something else: what counts is what the fold has decided."""
    dead = 60 if reason == "poison" else 0
    trainer = Untrained(ended={"zero_variance": 40, reason: 200}, dead=dead, newest_dead="not the vocabulary" * bool(dead))
    numbers, view = run_of(trainer=trainer, retired=60, issued=76, in_flight=16)
    assert named(numbers, view) == {cause}
    line = barren_line(numbers, view.failures.all_reasons)
    assert f"{reason} 200" in line and ("equal" in line) is (cause == "zero_variance")
    assert ("not the vocabulary" in line) is bool(dead)


def test_each_reason_has_a_cause_and_one_only() -> None:
    assert sorted(reason for reason, _ in UNTRAINED) == sorted(DROP_REASONS)
    assert all(cause_of({reason: 1}, {}) is not None for reason in DROP_REASONS)
    assert cause_of({}, {}) is None and cause_of({"stale": 1, "failed": 1}, {}) is None


@pytest.mark.parametrize(
    ("stones", "cause"),
    [({}, None), ({"failed": 20}, None), ({"failed": 40}, "failing_code"), ({"filtered": 40}, "given_up"), ({"lost": 60}, "lost_tasks")],
)
def test_while_the_trainer_says_nothing_only_tombstones_of_most_tasks_count(stones: dict[str, int], cause: str | None) -> None:
    numbers, view = run_of({"trainer-0": ""}, stones=stones, retired=60, issued=76, in_flight=16)
    reasons = since_newest_batch(numbers, view.failures.all_reasons)
    found = cause_of(reasons, numbers.drops) if reasons else None
    assert (None if found is None else found.name) == cause
    assert named(numbers, view) == {cause or "unknown"}
    assert "equal" not in barren_line(numbers, view.failures.all_reasons)


def test_a_reward_that_fails_most_rollouts_is_blamed_where_what_is_left_of_groups_is_flat() -> None:
    numbers, view = run_of(trainer=Untrained(ended={"failed": 210, "zero_variance": 30}), retired=60, issued=76)
    assert named(numbers, view) == {"failing_code"}


@pytest.mark.parametrize(
    ("states", "cause"),
    [
        ({"producer-0": FAILS}, "failing_engine"),
        ({"producer-0": f"{ENGINES_LEFT_OUT}: engine-0-abc, 9 requests in a row, the newest: status 500"}, "sick_engine"),
        ({"engine-0": f"{WEIGHTS_FAIL} than 0.3: 0.4 could not be taken: x"}, "weights_fail"),
    ],
)
def test_what_a_worker_says_of_engines_is_named_in_a_run_that_goes_on(states: dict[str, str], cause: str) -> None:
    late = replace(ENGINE, behind=9, running=1)
    numbers, _ = run_of(states, engines=(late, replace(late, engine="engine-1-abc")), in_flight=16)
    signs = Signs(numbers=numbers, num_rollouts=ROLLOUTS, batch_tasks=BATCH)
    assert cause in {one.name for one in causes("p95_age" if cause == "weights_fail" else "starvation", signs)[:1]}


def test_a_detail_that_is_none_of_a_trainer_says_nothing() -> None:
    view = RunView("demo")
    for detail in ({"ended": {"stale": "many"}}, {"dead": "x"}, {"tasks": [1]}):
        view.worker("trainer-0", WorkerPresence(worker="trainer-0", kind="trainer", detail=detail))
        assert view.numbers(elapsed_s=1.0).untrained == Untrained()
    view.worker("trainer-0", WorkerPresence(worker="trainer-0", kind="trainer", detail={"dead": 3}))
    view.worker("trainer-0", None)
    assert view.numbers(elapsed_s=1.0).untrained == Untrained(), "it has left"
