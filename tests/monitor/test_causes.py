"""Everything that can be the matter with a run: what is named, and that nothing else is. Numbers only, as workers tell them."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

import streamrl.monitor.waits
from streamrl.monitor.numbers import EngineLine, RunNumbers, WorkerLine
from streamrl.monitor.slo import Signs, causes, values
from streamrl.monitor.untrained import CAUSES, barren_line, cause_of, since_newest_batch
from streamrl.monitor.view import RunView
from streamrl.monitor.waits import diagnose
from streamrl.runtime.worker import AGENTS_WAIT, ENGINES_FAIL, ENGINES_LEFT_OUT, WEIGHTS_FAIL
from streamrl.schemas.control import Grant, Untrained, WorkerPresence
from streamrl.schemas.events import FULL_BLOBS, FULL_SERVER, FULL_STREAM, MetricReport
from streamrl.schemas.samples import Tombstone
from streamrl.telemetry.names import DROP_REASONS

ENGINE = EngineLine(engine="engine-0-abc", serving="0.3", running=0, waiting=0, slots=8)
STATES = {"trainer-0": "waits for samples: 0 groups", "engine-0": "running", "feeder-0": "waits for credit", "producer-0": "running"}
ROLLOUTS, BATCH = 4, 8
GATEWAY = {"producer-0": "", "gateway-0": f"{AGENTS_WAIT}: none has a session open"}


def told(
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
FIRST = "waits for its first weights"
FULL = {"producer-0": FULL_STREAM, "feeder-0": FULL_SERVER}
NO_SPACE = "No space left on device"
NO_WEIGHTS = f"{FIRST}: 0.0 could not be taken: {NO_SPACE}"
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
    "an engine that waits": (bare(FIRST, in_flight=4), "no_engine", f"{NONE_SERVES} a version; engine-0 waits for its first"),
    "a publisher that takes long": (bare(FIRST, trainer=Untrained(publishing="0.0")), "publishing", "... version 0.0"),
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
"""What a run has, the cause, and what is said: what it begins with, and behind `... ` what else is in it."""


@pytest.mark.parametrize("trouble", STANDING)
def test_of_a_standing_run_its_one_cause_is_named_with_what_a_worker_says_of_it(trouble: str) -> None:
    given, cause, said = STANDING[trouble]
    begins, _, words = said.partition("... ")
    away_s = given.get("away", 0.0)
    numbers, view = told(**{key: value for key, value in given.items() if key != "away"})
    found = diagnose(numbers, away_s=away_s)
    assert (found.cause, found.what.startswith(begins), words in found.what, bool(found.hint)) == (cause, True, True, True)
    assert named(replace(numbers, standing=found), view) == {"standing"}, "nothing else is said beside it"


def test_each_cause_of_a_standing_run_is_told_here() -> None:
    tree = ast.parse(Path(streamrl.monitor.waits.__file__).read_text())
    calls = [one for one in ast.walk(tree) if isinstance(one, ast.Call) and isinstance(one.func, ast.Name) and one.func.id == "Standing"]
    names = {word.value.value for call in calls for word in call.keywords if word.arg == "cause" and isinstance(word.value, ast.Constant)}
    assert names - {"unknown"} == {cause for _, cause, _ in STANDING.values()}


UNTRAINED = [(reason, cause.name) for reasons, cause in CAUSES for reason in reasons]


@pytest.mark.parametrize(("reason", "cause"), [*UNTRAINED, ("other", "left_out")])
def test_why_nothing_is_trained_before_the_first_batch_the_trainer_says_and_nothing_else_is_named(reason: str, cause: str) -> None:
    """Also where tombstones would say something else: what counts is what the fold has decided."""
    dead = 60 if reason == "poison" else 0
    trainer = Untrained(ended={"zero_variance": 40, reason: 200}, dead=dead, newest_dead="not the vocabulary" * bool(dead))
    numbers, view = told(trainer=trainer, retired=60, issued=76, in_flight=16)
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
    numbers, view = told({"trainer-0": ""}, stones=stones, retired=60, issued=76, in_flight=16)
    reasons = since_newest_batch(numbers, view.failures.all_reasons)
    found = cause_of(reasons, numbers.drops) if reasons else None
    assert (None if found is None else found.name) == cause
    assert named(numbers, view) == {cause or "unknown"}
    assert "equal" not in barren_line(numbers, view.failures.all_reasons)


def test_a_reward_that_fails_most_rollouts_is_blamed_where_what_is_left_of_groups_is_flat() -> None:
    numbers, view = told(trainer=Untrained(ended={"failed": 210, "zero_variance": 30}), retired=60, issued=76)
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
    numbers, _ = told(states, engines=(late, replace(late, engine="engine-1-abc")), in_flight=16)
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
