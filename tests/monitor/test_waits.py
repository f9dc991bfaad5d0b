"""What a run waits for, and what has failed in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from msgspec.structs import replace

from streamrl.core.failed_share import FailedShare, window_of
from streamrl.monitor.failed_share import Shares, failed_rollouts_line
from streamrl.monitor.failures import FIRST_PAUSE_S, LATELY, MOST_STONES, Barren, Failures, Pace, alone_to_blame
from streamrl.monitor.numbers import EngineLine, RunNumbers, Standing, WorkerLine
from streamrl.monitor.screen import failed_line, is_normal, plain_line
from streamrl.monitor.summary import summarize
from streamrl.monitor.trained import MOST_REASONS
from streamrl.monitor.untrained import barren_line
from streamrl.monitor.view import RunView
from streamrl.monitor.waits import LONG_S, STILL_S, Watch, diagnose, graders_line, hung_line, standing_line
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.control import EnginePresence, Grant, WorkerPresence
from streamrl.schemas.events import FULL_BLOBS, FULL_STREAM, MOVING_EVENT, STANDING_EVENT, Event, MetricReport
from streamrl.schemas.ledger import REASON_LENGTH, Drop
from streamrl.schemas.samples import Tombstone
from streamrl.schemas.versions import Version
from streamrl.telemetry.names import OTHER_REASON
from tests.monitor.conftest import MakeEntry, as_line, drawn, view_of

ENGINE = EngineLine(engine="engine-0-abc", serving="0.3", running=0, waiting=0, slots=8)
STATES = {"trainer-0": "waits for samples: 0 groups", "engine-0": "running", "feeder-0": "waits for credit", "producer-0": "running"}


def standing_run(workers: dict[str, str] | None = None, engines: Sequence[EngineLine] = (ENGINE,), *, issued: int = 24) -> RunNumbers:
    """A run in which everybody waits: all 24 granted tasks are issued, 8 have ended, producers hold 4."""
    view = RunView("demo", steps=100)
    view.issued(issued)
    view.grant(Grant(granted=24, version=3, retired=8))
    view.metric(MetricReport(worker="producer-0", mean={"producer/in_flight_tasks": 4.0}))
    lines = {name: WorkerLine(worker=name, state=state) for name, state in (STATES | (workers or {})).items() if state}
    return replace(view.numbers(elapsed_s=60.0, supervised=lines), engines=tuple(engines))


def test_what_is_full_or_hangs_is_said_and_the_bus_comes_before_all_that_waits_for_it() -> None:
    assert "bus.samples_bytes" in diagnose(standing_run({"producer-0": FULL_STREAM})).hint
    assert "bus.sample_blobs_bytes" in diagnose(standing_run({"producer-0": FULL_STREAM, "feeder-0": FULL_BLOBS})).hint
    found = diagnose(replace(standing_run(), hung_tasks=3, hung_s=21.4))
    assert found.what.startswith("user code") and "3 have not for up to 21 s" in found.what
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
    mean = {"producer/in_flight_tasks": 10.0, "producer/hung_tasks": float(hung)}
    view.metric(MetricReport(worker="producer-0", mean=mean, max={"producer/hung_s": 21.4}))
    numbers = view.numbers(elapsed_s=60.0)
    words = "user code that has asked no engine for up to 21 s holds 5 of 16 credits. hint: a tool or reward that hangs? lower"
    assert hung_line(numbers).startswith(words) if said else not hung_line(numbers)
    assert ("hung=5/16" in plain_line(numbers)) is said
    assert any(words in line for line in drawn(numbers, 200)) is said
    view.finished = True
    assert not hung_line(view.numbers(elapsed_s=60.0))


@pytest.mark.parametrize(("worker", "own"), [("producer-0", {"producer/in_flight_tasks": 10.0}), ("rewarder-0", {})])
def test_graders_that_hang_are_said_with_how_many_were_ended_for_it(worker: str, own: dict[str, float]) -> None:
    view = RunView("demo", steps=100)
    held = MetricReport(worker=worker, mean={**own, "reward/hung": 3.0}, max={"reward/hung_s": 8.4}, sum={"reward/ended_early_total": 5.0})
    view.metric(held)
    view.metric(held)
    numbers = view.numbers(elapsed_s=60.0)
    said = "calls of the reward that hang: 3, for up to 8 s; 10 were ended early, as more hung than reward.max_hung"
    assert graders_line(numbers).startswith(said)
    assert any(said in line for line in drawn(numbers, 200))
    view.metric(MetricReport(worker=worker, mean={**own, "reward/hung": 0.0}))
    assert not graders_line(view.numbers(elapsed_s=60.0))


def looks(watch: Watch, numbers: RunNumbers, seconds: float, start_s: float) -> Standing | None:
    found = None
    for tick in range(round(seconds / 0.5)):
        now_s = start_s + tick / 2
        found = watch.look(numbers, now_s=now_s, time_s=1000.0 + now_s, away_s=0.0)
    return found


def test_a_wait_is_said_within_30_s_unless_the_looker_missed_it() -> None:
    watch = Watch()
    assert looks(watch, standing_run(), 24.0, 0.0) is None
    found = looks(watch, standing_run(), 6.0, 24.0)
    assert found is not None and found.since_s == 1000.0
    assert watch.look(standing_run(), now_s=40.0, time_s=1040.0, away_s=0.0) == found
    assert watch.look(standing_run(issued=25), now_s=41.0, time_s=1041.0, away_s=0.0) is None
    watch = Watch()
    looks(watch, standing_run(), 10.0, 0.0)
    assert watch.look(standing_run(), now_s=500.0, time_s=1500.0, away_s=0.0) is None


@pytest.mark.parametrize("every_s", [1.0, 1.1, 1.3, 2.5])
def test_looks_that_come_late_say_a_wait_within_30_s(every_s: float) -> None:
    watch, now_s = Watch(), 0.0
    while watch.look(standing_run(), now_s=now_s, time_s=1000.0 + now_s, away_s=0.0) is None:
        now_s += every_s
        assert now_s < 29
    assert now_s >= STILL_S


def test_a_load_and_a_step_are_said_late_and_a_finished_run_waits_for_nothing() -> None:
    training, loading = standing_run({"trainer-0": "trains version 4"}), standing_run({"engine-0": "loading"})
    for numbers in (training, loading):
        watch = Watch()
        assert looks(watch, numbers, LONG_S - 10, 0.0) is None
        assert looks(watch, numbers, 20.0, LONG_S - 10) is not None
    assert looks(Watch(), replace(standing_run(), phase="finished"), 100.0, 0.0) is None


@pytest.mark.parametrize(("state", "what"), [("loading", "loading"), ("loading: SmolLM2", "loading SmolLM2")])
def test_a_worker_that_loads_says_what_and_is_no_alarm(state: str, what: str) -> None:
    since_s = 1000.0
    numbers = standing_run({"engine-0": state, "producer-0": state})
    found = diagnose(numbers)
    assert (found.cause, found.what, found.normal) == ("loading", f"engine-0, which is {what}", True) and is_normal(state)
    assert found.what in standing_line(found) and standing_line(found).startswith("since ")
    workers = [replace(worker, since_s=since_s) for worker in numbers.workers if worker.worker == "engine-0"]
    assert f"workers=engine-0:{what} (12 s)" in plain_line(replace(numbers, workers=tuple(workers)), now_s=since_s + 12.2)


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
    assert found is not None and "end of a task" in found.what and found.since_s == 1000.0


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
    assert any("waits for an engine" in line for line in drawn(numbers, 80)[:12]), "before the tables"
    learned_run.event(Event(kind=MOVING_EVENT, worker="supervisor"))
    assert learned_run.numbers(elapsed_s=1.0).standing is None


def test_what_a_worker_says_of_itself_is_shown_beside_what_the_supervisor_knows(entry: MakeEntry) -> None:
    view = view_of(entry(1))
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


def stone(task: int, reason: str = "failed", *, rollout: int | None = None, detail: str = "producer: ValueError: no") -> Tombstone:
    return Tombstone(task=task, reason=reason, rollout=rollout, group_size=2, detail=detail, source="main")


def test_failures_are_counted_before_any_batch_and_once_a_task() -> None:
    late = stone(9, "timeout", rollout=0, detail="user code made no progress for 30 s")
    view = view_of(stone(1), stone(2), stone(3), late)
    numbers = view.numbers(elapsed_s=1.0)
    assert (numbers.drops, numbers.dropped, numbers.failed_tasks) == ({"failed": 6, "timeout": 1}, 7, 3)
    assert numbers.newest_error == "timeout: user code made no progress for 30 s"
    assert "dropped=7" in plain_line(numbers) and "failed-tasks=3" in plain_line(numbers)
    view = view_of(stone(5, rollout=0))
    assert view.failures.num_tasks == 0
    view.tombstone(2, stone(5, rollout=1, detail="another"))
    assert view.failures.num_tasks == 1
    view.tombstone(3, stone(5))  # a second delivery
    assert view.failures.num_tasks == 1


def test_the_first_rows_that_cannot_be_used_are_named_once_each_wherever_their_drops_are_counted() -> None:
    rows = [f"expected a label at rows.jsonl line {line}" for line in (3, 3, 7, 9, 11)]
    view = view_of(*(stone(task, "row_broken", detail=row) for task, row in enumerate(rows)), stone(8), stone(9, "left", detail="no row"))
    numbers = view.numbers(elapsed_s=1.0)
    assert (numbers.drops["row_broken"], numbers.newest_error) == (10, "failed: producer: ValueError: no")
    named = tuple(f"row_broken: {rows[place]}" for place in (0, 2, 3))
    assert numbers.unusable_rows == named == summarize(view, wall_s=1.0).unusable_rows


def test_a_batch_takes_over_what_its_entry_has_and_leaves_the_newest_error(entry: MakeEntry) -> None:
    view = RunView("demo")
    view.tombstone(3, stone(1))
    view.tombstone(7, stone(2))
    view.ledger(as_line(entry(1, cursor=5, drops=[Drop(3, 1, (0, 1), "failed")])))
    assert (view.numbers(elapsed_s=1.0).drops, view.failures.num_tasks) == ({"failed": 4}, 1)
    view.tombstone(4, stone(1, detail="seen late"))
    assert view.numbers(elapsed_s=1.0).drops == {"failed": 4}
    view.ledger(as_line(entry(2, cursor=9, drops=[Drop(7, 2, (0, 1), "failed")])))
    numbers = view.numbers(elapsed_s=1.0)
    assert (numbers.drops, numbers.failed_tasks, numbers.newest_error) == ({"failed": 4}, 0, "failed: seen late")


def by(producer: str, task: int, **more: object) -> Tombstone:
    return replace(stone(task), producer=producer, **more)


def test_tasks_and_rollouts_that_fail_are_counted_by_producer() -> None:
    failures = Failures()
    for sequence, one in enumerate((by("producer-1", 1), by("producer-1", 2, rollout=0), by("producer-0", 2, rollout=1), stone(3)), 1):
        failures.add(sequence, one, after=0)
    assert failures.producers == {"producer-1": 1, "producer-0": 1}
    assert failures.lately(4) == {"producer-1": 3, "producer-0": 1}
    failures.trained(1)
    assert (failures.producers, failures.lately(4)) == ({"producer-0": 1}, {"producer-1": 3, "producer-0": 1})
    assert failures.lately(LATELY + 2) == {"producer-0": 1} and not failures.lately(LATELY + 4)


def test_failures_are_said_once_also_those_that_a_batch_came_after() -> None:
    failures = Failures()
    failures.add(1, by("producer-1", 1), after=0)
    failures.trained(2)
    failures.add(2, by("producer-0", 2), after=2)  # read behind the entry that has it
    assert (failures.num_tasks, failures.to_say.num_tasks, failures.to_say.producers) == (0, 2, {"producer-0": 1, "producer-1": 1})
    failures.said()
    assert failures.to_say.num_tasks == 0
    failures.add(3, by("producer-0", 3), after=2)
    failures.said()
    assert failures.to_say.num_tasks == 1, "no batch since: it goes on being said"
    failures.trained(3)
    assert failures.to_say.num_tasks == 0


@pytest.mark.parametrize(
    ("failed", "working", "alone"),
    [
        ({"a": 24}, {"a"}, True),
        ({"a": 23, "gone": 9}, {"a"}, False),
        ({"a": 24}, {"a", "b"}, False),
        ({"a": 500, "b": 11}, {"a", "b"}, False),
        ({"a": 500, "b": 12}, {"a", "b"}, True),
        ({}, set(), True),
    ],
)
def test_a_run_is_given_up_when_no_producer_at_work_fails_less_than_its_part(
    failed: dict[str, int], working: set[str], alone: bool
) -> None:
    assert alone_to_blame(failed, working, most=24) is alone


def test_a_producer_is_at_work_once_loaded_until_its_report_says_that_it_holds_and_gives_nothing() -> None:
    view = RunView("demo")
    for name, state in (("producer-0", "running"), ("producer-1", "loading"), ("producer-2", "running"), ("engine-0", "running")):
        view.worker(name, WorkerPresence(worker=name, kind=name[:-2], state=state, pid=1, host="here"))
    assert view.working_producers == {"producer-0", "producer-2"}
    for held, published, at_work in ((0, 0, False), (1, 0, True), (0, 3, True), (0, 0, False)):
        report = {"producer/in_flight_tasks": float(held)}
        view.metric(MetricReport(worker="producer-0", mean=report, sum={"producer/rollouts_total": float(published)}))
        assert ("producer-0" in view.working_producers) is at_work
    view.metric(MetricReport(worker="producer-2", mean={"producer/in_flight_tasks": 0.0}, sum={"producer/rollouts_total": 0.0}))
    assert view.working_producers == {"producer-0", "producer-2"}, "none is at work: all that have loaded"
    for name in ("producer-0", "producer-2"):
        view.worker(name, None)
    assert not view.working_producers


def test_what_has_failed_is_said_with_whose_it_was_where_there_are_others() -> None:
    view = view_of(*(by("producer-1\x1b[2J", task) for task in range(1, 4)))
    view.worker("producer-1", WorkerPresence(worker="producer-1", kind="producer", state="running", pid=1, host="here"))
    view.failures.producers["producer-1"] += 1
    assert "all by" not in failed_line(view.numbers(elapsed_s=1.0), view.failures.to_say)
    view.worker("producer-0", WorkerPresence(worker="producer-0", kind="producer", state="running", pid=1, host="here"))
    said = failed_line(view.numbers(elapsed_s=1.0), view.failures.to_say)
    assert "no; all by producer-1·[2J, producer-1. hint" in said


def test_what_is_left_out_on_purpose_is_no_failure_and_is_called_so(entry: MakeEntry) -> None:
    view = RunView("demo")
    for reason in ("filtered", "lost", "too-easy"):
        view.tombstone(1, stone(1, reason))
    assert (view.failures.num_tasks, view.failures.newest) == (0, "")
    view = view_of(*(stone(task, "filtered") for task in range(9)))
    view.grant(Grant(granted=24, version=0, retired=12))
    numbers = view.numbers(elapsed_s=1.0)
    assert (numbers.dropped, numbers.drops, numbers.failed_tasks, numbers.given_up_tasks) == (18, {"filtered": 18}, 0, 9)
    said = barren_line(numbers, view.failures.all_reasons)
    assert said.startswith("12 tasks") and "filtered 18" in said and "Failure(" in said
    view.ledger(as_line(entry(1, cursor=5, drops=[Drop(3, 1, (0, 1), "filtered")])))
    assert view.numbers(elapsed_s=1.0).drops == {"filtered": 2 + 8}


def test_reasons_are_counted_together_beyond_so_many(entry: MakeEntry) -> None:
    view = view_of(*(stone(task, f"too long: {task} {'x' * 1000}") for task in range(1, 20_001)))
    reasons = view.failures.given_up.reasons
    assert len(reasons) == MOST_REASONS + 1 and max(map(len, reasons)) == REASON_LENGTH
    assert (reasons.total(), reasons[OTHER_REASON]) == (40_000, 2 * (20_000 - MOST_REASONS))
    view.failures.trained(19_990)
    assert len(reasons := view.failures.given_up.reasons) == 10 and max(map(len, reasons)) == REASON_LENGTH
    view = view_of(entry(1, cursor=5, drops=[Drop(3, 1, (0,), f"ledger {number}") for number in range(100)]))
    for sequence in range(100):
        view.tombstone(6 + sequence, stone(sequence, f"stream {sequence}"))
    numbers = view.numbers(elapsed_s=1.0)
    assert len(numbers.drops) == MOST_REASONS + 1
    assert sum(numbers.drops.values()) == numbers.dropped == 100 + 200


def test_what_is_given_up_pushes_no_failure_out() -> None:
    failures = Failures()
    failures.add(1, stone(1, rollout=0), after=0)
    failures.add(2, stone(2), after=0)
    for sequence in range(3, MOST_STONES + 4):
        failures.add(sequence, stone(sequence, "filtered"), after=0)
    failures.add(MOST_STONES + 4, stone(1, rollout=1), after=0)
    assert (failures.num_tasks, failures.given_up.num_tasks) == (2, MOST_STONES + 1)
    failures.trained(0)
    assert (failures.num_tasks, failures.reasons) == (2, {"failed": 4})


@pytest.mark.parametrize(
    ("reasons", "said", "hint"),
    [
        (("lost",), "(lost 24)", "acknowledge"),
        (("too\x1b easy",) * 7 + ("filtered",) * 5, "(too\N{MIDDLE DOT} easy 14, filtered 10)", "its rule"),
        (tuple(f"too long: {number}" for number in range(9)) + ("filtered",) * 3, "(filtered 6, too long: 0 2,", "its rule"),
        (("x" * 1000,), f"({'x' * 60} 24)", "its rule"),
    ],
)
def test_what_is_not_filtered_is_not_blamed_on_a_return_of_none(reasons: tuple[str, ...], said: str, hint: str) -> None:
    view = view_of(*(stone(task, reasons[task % len(reasons)]) for task in range(12)))
    view.grant(Grant(granted=24, version=0, retired=12))
    line = barren_line(view.numbers(elapsed_s=1.0), view.failures.all_reasons)
    assert said in line and hint in line and "None" not in line


def test_that_tasks_give_no_batch_is_said_ever_more_rarely() -> None:
    barren, numbers = Barren(), RunView("demo").numbers(elapsed_s=1.0)

    def due(tasks: int, failed: int) -> bool:
        return barren.due(replace(numbers, barren_tasks=tasks, failed_tasks=failed), least=8, known=True, now_s=0.0)

    assert not due(7, 0) and not due(8, 5), "too few, then most have failed"
    assert due(10, 5) and not due(12, 5) and not due(12, 7) and not due(20, 7)
    assert not due(0, 0) and due(8, 0)
    pace = Pace()
    said = [second for second in range(200) if pace.due(float(second))]
    assert said == [0, FIRST_PAUSE_S, 3 * FIRST_PAUSE_S, 7 * FIRST_PAUSE_S, 15 * FIRST_PAUSE_S]


def test_why_tasks_give_no_batch_is_waited_for_some_heartbeats() -> None:
    barren, numbers = Barren(), replace(RunView("demo").numbers(elapsed_s=1.0), barren_tasks=9)
    told = [(0.0, False, False), (9.9, False, False), (10.0, False, True), (11.0, True, False)]
    assert [barren.due(numbers, least=8, known=known, now_s=now_s) for now_s, known, _ in told] == [due for _, _, due in told]
    barren = Barren()
    assert not barren.due(numbers, least=8, known=False, now_s=0.0) and barren.due(numbers, least=8, known=True, now_s=2.0)


NONE = (0, 0)


@pytest.mark.parametrize(("batch_tasks", "group_size", "window"), [(4, 4, 256), (16, 8, 256), (64, 16, 2048)])
def test_a_share_is_taken_over_two_batches_at_least(batch_tasks: int, group_size: int, window: int) -> None:
    assert window_of(batch_tasks, group_size) == window


def test_what_is_older_than_the_window_is_forgotten() -> None:
    share = FailedShare(100)
    share.add(failed=60, ended=60)
    assert not share.is_full
    share.add(failed=0, ended=40)
    assert share.is_full and share.exceeds(0.5)
    share.add(failed=0, ended=60)
    assert (share.failed, share.ended, share.exceeds(0.5)) == (0, 100, False)


@pytest.mark.parametrize(
    ("drops", "used", "untrained", "too_many"),
    [
        ({"failed": 93}, 7, NONE, True),
        ({"timeout": 40, "deliveries": 20}, 40, NONE, True),
        ({"failed": 50}, 50, NONE, False),
        ({"filtered": 93}, 7, NONE, False),
        ({"zero_variance": 80, "stale": 13}, 7, NONE, False),
        ({"too easy": 93}, 7, NONE, False),
        ({"failed": 40}, 2, NONE, False),
        # No batch is trained any more: each group has lost too many of its rollouts.
        ({}, 0, (90, 96), False),
        ({}, 0, (90, 100), True),
        ({}, 100, (90, 100), True),
        ({}, 0, (40, 100), False),
    ],
)
def test_failures_and_time_outs_count_and_no_filters_verdict(
    drops: Mapping[str, int], used: int, untrained: tuple[int, int], too_many: bool
) -> None:
    shares = Shares(100)
    shares.trained(used, Counter(drops))
    assert shares.too_many(0.5, untrained) is too_many
    assert not shares.too_many(1.0, untrained), "never"


def test_a_bad_producer_is_told_from_a_bad_run() -> None:
    shares = Shares(100)
    shares.told("producer-0", failed=100)
    shares.trained(5, Counter(failed=95))
    assert shares.bad_beside_good({"producer-0"}, 0.5, untrained=NONE) == set() and shares.too_many(0.5, NONE)
    assert shares.bad_beside_good({"producer-0", "slow"}, 0.5, untrained=NONE) == {"producer-0"}, "nothing is known of the other yet"
    shares.trained(5, Counter(failed=95))
    shares.told("producer-1", failed=80, stored=20)
    assert shares.bad_beside_good({"producer-0", "producer-1"}, 0.5, untrained=NONE) == set(), "both are bad"
    shares.told("producer-2", failed=2, stored=8)
    assert shares.bad_beside_good({"producer-0", "producer-1"}, 0.5, untrained=NONE) == set(), "the good one has left"
    assert shares.bad_beside_good({"producer-0", "producer-1", "producer-2"}, 0.5, untrained=NONE) == {"producer-0", "producer-1"}
    assert not shares.too_many(0.5, NONE), "what they have failed counts no more"
    shares.forget("producer-0")
    assert shares.too_many(0.5, (100, 100)) and not shares.all_bad({"producer-2"}, 0.5), "they have left, and a good one is there"
    assert shares.all_bad({"producer-1"}, 0.5)


@pytest.mark.parametrize(("failed", "drained"), [(30, set[str]()), (100, {"producer-0"})])
def test_a_producer_of_which_little_is_known_is_drained_only_in_place_of_the_run(failed: int, drained: set[str]) -> None:
    shares = Shares(100)
    shares.told("producer-0", failed=failed)
    shares.told("producer-1", stored=10)
    assert shares.bad_beside_good({"producer-0", "producer-1"}, 0.5, untrained=NONE) == drained
    shares.told("producer-0", failed=1)
    assert shares.bad_beside_good({"producer-0", "producer-1"}, 0.5, untrained=(90, 100)) == {"producer-0"}


def test_a_view_counts_what_happens_while_it_is_live(entry: MakeEntry) -> None:
    view = RunView("demo", shares=Shares(100))
    view.live = False
    view.ledger(as_line(entry(1, drops=[Drop(1, 7, (0, 1, 2), "failed")])))
    assert view.shares.run.ended == 0
    view.live = True
    view.ledger(as_line(entry(2, drops=[Drop(1, 8, (0, 1, 2), "failed"), Drop(1, 9, (0,), "filtered")])))
    assert (view.shares.run.failed, view.shares.run.ended) == (3, 6)
    stone = Tombstone(task=1, reason="failed", rollout=0, group_size=2, detail="ValueError: no in reward.py:3", source="main")
    view.tombstone(9, stone)
    view.tombstone(10, Tombstone(task=1, reason="timeout", rollout=None, group_size=2, detail="", source="main", producer="producer-3"))
    view.metric(MetricReport(worker="producer-3", sum={"producer/rollouts_total": 5.0}))
    view.metric(MetricReport(worker="trainer-0", sum={"producer/rollouts_total": 5.0}))
    assert (view.shares.of("producer-3").failed, view.shares.of("producer-3").ended) == (2, 7)
    numbers = view.numbers(elapsed_s=1.0)
    assert (numbers.failed_rollouts, numbers.ended_rollouts) == (3 + 3 + 3, 2 + 2 + 3 + 4 + 3)


@pytest.mark.parametrize(
    ("failed", "ended", "newest", "said"),
    [
        (7624, 8224, "failed: ValueError: no in reward.py:3", "7,624 of 8,224 rollouts failed: ValueError: no in reward.py:3"),
        (6, 100, "timeout: 30 s\nof\x1b user code", "6 of 100 rollouts failed: timeout: 30 s of\N{MIDDLE DOT} user code"),
        (6, 100, "", "6 of 100 rollouts failed"),
        (5, 100, "failed: x", ""),
        (0, 0, "", ""),
    ],
)
def test_how_many_failed_is_said_beyond_a_few_percent(failed: int, ended: int, newest: str, said: str) -> None:
    assert failed_rollouts_line(failed, ended, newest) == said
