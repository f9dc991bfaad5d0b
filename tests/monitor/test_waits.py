from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from streamrl.monitor.board import Board
from streamrl.monitor.drawing import Ink
from streamrl.monitor.look import Look
from streamrl.monitor.numbers import EngineLine, RunNumbers, Standing, WorkerLine
from streamrl.monitor.screen import plain_line
from streamrl.monitor.view import RunView
from streamrl.monitor.waits import LONG_S, STILL_S, Watch, diagnose, graders_line, hung_line, standing_line
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.control import EnginePresence, Grant, WorkerPresence
from streamrl.schemas.events import FULL_BLOBS, FULL_STREAM, MOVING_EVENT, STANDING_EVENT, Event, MetricReport
from streamrl.schemas.versions import Version
from tests.monitor.conftest import MakeEntry, as_line

ENGINE = EngineLine(engine="engine-0-abc", serving="0.3", running=0, waiting=0, slots=8)
STATES = {"trainer-0": "waits for samples: 0 groups", "engine-0": "running", "feeder-0": "waits for credit", "producer-0": "running"}


def standing_run(
    workers: dict[str, str] | None = None,
    engines: Sequence[EngineLine] = (ENGINE,),
    *,
    in_flight: int = 4,
    issued: int = 24,
    ungraded: int = 0,
) -> RunNumbers:
    """A run in which everybody waits: all 24 granted tasks are issued, 8 have ended, producers hold 4."""
    view = RunView("demo", steps=100)
    view.issued(issued, ungraded=ungraded)
    view.grant(Grant(granted=24, version=3, retired=8))
    view.metric(MetricReport(worker="producer-0", mean={"producer/in_flight_tasks": float(in_flight)}))
    lines = {name: WorkerLine(worker=name, state=state) for name, state in (STATES | (workers or {})).items() if state}
    return replace(view.numbers(elapsed_s=60.0, supervised=lines), engines=tuple(engines))


@pytest.mark.parametrize(
    ("numbers", "what"),
    [
        (standing_run({"producer-0": "waiting"}), "producer-0, which has ended"),
        (standing_run({"engine-0": "loading"}, ()), "engine-0, which is loading"),
        (standing_run({"producer-0": "stalled: stream full"}), "room on a full stream, for which producer-0 wait"),
        (standing_run({"feeder-0": FULL_BLOBS}), "room on a full stream, for which feeder-0 wait"),
        (standing_run({"trainer-0": "trains version 4"}), "trainer-0, which trains version 4"),
        (standing_run({"trainer-0": ""}), "a trainer: none is there"),
        (standing_run({"engine-0": ""}, ()), "an engine: none serves"),
        (standing_run({"engine-0": "waits for its first weights"}, ()), "an engine: none serves a version; engine-0 waits for its first"),
        (standing_run(engines=[replace(ENGINE, pinned=True)]), "an engine: none serves"),
        (standing_run(engines=[replace(ENGINE, waiting=3)]), "a version: 3 requests ask for a newer one than engines serve (0.3)"),
        (standing_run({"producer-0": ""}), "a producer: none is there"),
        (standing_run(issued=16), "the feeder: 16 of 24 granted tasks"),
        (standing_run(in_flight=0), "credit: all 24 granted tasks are issued, producers hold none, and 16 of them"),
        (standing_run(engines=[replace(ENGINE, running=2)]), "engines, which have requests and make no tokens"),
        (standing_run(), "user code: producers hold 4 tasks and ask no engine"),
        (standing_run(ungraded=3), "a rewarder: 3 groups wait for rewards, and none is there"),
        (
            standing_run({"rewarder-0": "scores: 3 groups"}, ungraded=3),
            "rewards: 3 groups wait for them; rewarder-0 scores: 3 groups",
        ),
    ],
)
def test_what_a_standing_run_waits_for_has_a_name_and_a_hint(numbers: RunNumbers, what: str) -> None:
    found = diagnose(numbers)
    assert found.what.startswith(what)
    assert found.hint


def test_what_is_full_says_which_budget_to_raise() -> None:
    assert "bus.samples_bytes" in diagnose(standing_run({"producer-0": FULL_STREAM})).hint
    assert "bus.sample_blobs_bytes" in diagnose(standing_run({"producer-0": FULL_STREAM, "feeder-0": FULL_BLOBS})).hint


def test_the_bus_comes_before_all_that_waits_for_it_and_a_silent_worker_before_what_waits_for_that() -> None:
    assert diagnose(standing_run({"engine-0": "loading"}), away_s=11.0).what.startswith("the bus")
    numbers = standing_run()
    silent = [replace(worker, silent_s=20.0) if worker.worker == "trainer-0" else worker for worker in numbers.workers]
    assert diagnose(replace(numbers, workers=tuple(silent))).what.startswith("trainer-0, which is silent")
    short = [replace(worker, silent_s=5.0) for worker in numbers.workers]
    assert diagnose(replace(numbers, workers=tuple(short))).what.startswith("user code")


@pytest.mark.parametrize(("hung", "said"), [(0, False), (4, False), (5, True)])
def test_hung_user_code_is_said_once_it_holds_more_than_a_quarter_of_the_credits(hung: int, said: bool) -> None:
    """In a run that goes on: 24 granted tasks, of which 8 have ended, are 16 credits."""
    view = RunView("demo", steps=100)
    view.issued(24)
    view.grant(Grant(granted=24, version=3, retired=8))
    held = MetricReport(
        worker="producer-0", mean={"producer/in_flight_tasks": 10.0, "producer/hung_tasks": float(hung)}, max={"producer/hung_s": 21.4}
    )
    view.metric(held)
    numbers = view.numbers(elapsed_s=60.0)
    words = "user code that has asked no engine for up to 21 s holds 5 of 16 credits. hint: a tool or reward that hangs? lower"
    assert hung_line(numbers).startswith(words) if said else not hung_line(numbers)
    assert ("hung=5/16" in plain_line(numbers)) is said
    board = Board(Look(run="demo", state="running", numbers=numbers), 200, Ink.NONE)
    assert any(words in line for line in board.text()) is said
    view.event(Event(kind="finished", worker="trainer-0"))
    assert not hung_line(view.numbers(elapsed_s=60.0))


@pytest.mark.parametrize(("worker", "own"), [("producer-0", {"producer/in_flight_tasks": 10.0}), ("rewarder-0", {})])
def test_graders_that_hang_are_said_with_how_many_were_ended_for_it(worker: str, own: dict[str, float]) -> None:
    view = RunView("demo", steps=100)
    held = MetricReport(
        worker=worker,
        mean={**own, "reward/hung": 3.0},
        max={"reward/hung_s": 8.4},
        sum={"reward/ended_early_total": 5.0},
    )
    view.metric(held)
    view.metric(held)
    numbers = view.numbers(elapsed_s=60.0)
    said = "calls of the reward that hang: 3, for up to 8 s; 10 were ended early, as more hung than reward.max_hung"
    assert graders_line(numbers).startswith(said)
    assert any(said in line for line in Board(Look(run="demo", state="running", numbers=numbers), 200, Ink.NONE).text())
    view.metric(MetricReport(worker=worker, mean={**own, "reward/hung": 0.0}))
    assert not graders_line(view.numbers(elapsed_s=60.0))


def test_the_wait_for_user_code_says_for_how_long_it_hangs() -> None:
    found = diagnose(replace(standing_run(), hung_tasks=3, hung_s=21.4))
    assert found.what.startswith("user code") and "3 have not for up to 21 s" in found.what


def looks(watch: Watch, numbers: RunNumbers, seconds: float, start_s: float) -> Standing | None:
    found = None
    for tick in range(round(seconds / 0.5)):
        now_s = start_s + tick / 2
        found = watch.look(numbers, now_s=now_s, time_s=1000.0 + now_s, away_s=0.0)
    return found


def test_a_wait_is_said_within_30_s_and_over_once_something_moves() -> None:
    watch = Watch()
    assert looks(watch, standing_run(), 24.0, 0.0) is None
    found = looks(watch, standing_run(), 6.0, 24.0)
    assert found is not None
    assert found.since_s == 1000.0
    assert watch.look(standing_run(), now_s=40.0, time_s=1040.0, away_s=0.0) == found
    assert watch.look(standing_run(issued=25), now_s=41.0, time_s=1041.0, away_s=0.0) is None


@pytest.mark.parametrize("every_s", [1.0, 1.1, 1.3, 2.5])
def test_looks_that_come_late_say_a_wait_within_30_s(every_s: float) -> None:
    watch, now_s = Watch(), 0.0
    while watch.look(standing_run(), now_s=now_s, time_s=1000.0 + now_s, away_s=0.0) is None:
        now_s += every_s
        assert now_s < 29
    assert now_s >= STILL_S


def test_what_the_looker_missed_itself_is_no_standing() -> None:
    watch = Watch()
    looks(watch, standing_run(), 10.0, 0.0)
    assert watch.look(standing_run(), now_s=500.0, time_s=1500.0, away_s=0.0) is None


def test_a_load_and_a_step_are_said_late_and_a_finished_run_waits_for_nothing() -> None:
    training, loading = standing_run({"trainer-0": "trains version 4"}), standing_run({"engine-0": "loading"})
    for numbers in (training, loading):
        watch = Watch()
        assert looks(watch, numbers, LONG_S - 10, 0.0) is None
        assert looks(watch, numbers, 20.0, LONG_S - 10) is not None
    assert looks(Watch(), replace(standing_run(), phase="finished"), 100.0, 0.0) is None


def makes_tokens(watch: Watch, seconds: float, start_s: float, **more: int) -> tuple[int, Standing | None]:
    """Look while engines make tokens, and nothing else happens: after how many seconds something is said, and what in the end."""
    said, found = 0, None
    for tick in range(round(seconds)):
        now_s = start_s + tick
        numbers = replace(standing_run(engines=[replace(ENGINE, running=2)]), tokens_made=round(now_s), **more)
        found = watch.look(numbers, now_s=now_s, time_s=1000.0 + now_s, away_s=0.0)
        said += found is None
    return said, found


def test_tokens_without_the_end_of_a_task_are_no_progress() -> None:
    said, found = makes_tokens(Watch(), LONG_S + 100, 0.0)
    assert LONG_S - 2 <= said <= LONG_S + 2
    assert found is not None and found.what.startswith("the end of a task") and found.since_s == 1000.0


def test_what_a_task_may_take_is_learned_from_those_that_have_ended() -> None:
    watch = Watch()
    assert makes_tokens(watch, 400.0, 0.0)[1] is None
    assert makes_tokens(watch, 400.0, 400.0, tasks_ended=9)[1] is None
    said, found = makes_tokens(watch, 1800.0, 800.0, tasks_ended=10)
    assert 1595 <= said <= 1605 and found is not None, "four times the 400 s that the one before has taken"
    numbers = replace(standing_run(engines=[replace(ENGINE, running=2)]), tokens_made=9999, tasks_ended=11)
    assert watch.look(numbers, now_s=2600.0, time_s=3600.0, away_s=0.0) is None, "one has ended"


def test_a_view_knows_the_wait_from_the_supervisors_events_and_shows_it(learned_run: RunView) -> None:
    detail = {"what": "an engine: none serves a version", "hint": "see logs/engine-0.log", "since_s": 1000.0, "normal": False}
    event = decode(encode(Event(kind=STANDING_EVENT, worker="supervisor", detail=detail)), Event)
    learned_run.event(event)
    numbers = learned_run.numbers(elapsed_s=1.0)
    assert numbers.standing == Standing(what="an engine: none serves a version", hint="see logs/engine-0.log", since_s=1000.0)
    assert numbers.standing is not None
    assert "waits for an engine" in standing_line(numbers.standing)
    assert "waits-for='an engine" in plain_line(numbers)
    assert any("waits for an engine" in line for line in Board(Look(run="demo", state="running", numbers=numbers), 80, Ink.NONE).text())
    learned_run.event(Event(kind=MOVING_EVENT, worker="supervisor"))
    assert learned_run.numbers(elapsed_s=1.0).standing is None


def test_what_a_worker_says_of_itself_is_shown_beside_what_the_supervisor_knows(entry: MakeEntry) -> None:
    view = RunView("demo")
    view.ledger(as_line(entry(1)))
    view.engine("engine-0-abc", EnginePresence(engine="engine-0-abc", address="http://h:1", serving=Version(0, 1)))
    for pid in (7, 8):
        view.worker("trainer-0", WorkerPresence(worker="trainer-0", kind="trainer", state="trains version 2", pid=pid, since_s=900.0))
        supervised = {"trainer-0": WorkerLine(worker="trainer-0", state="running", pid=7, restarts=1)}
        (line,) = view.numbers(elapsed_s=1.0, supervised=supervised).workers
        assert line.restarts == 1
        # The presence of a process before the restart says nothing of the one that is there now.
        assert (line.state, line.since_s) == (("trains version 2", 900.0) if pid == 7 else ("running", 0.0))
    (line,) = view.numbers(elapsed_s=1.0, supervised={"trainer-0": WorkerLine(worker="trainer-0", state="waiting", pid=8)}).workers
    assert line.state == "waiting"
