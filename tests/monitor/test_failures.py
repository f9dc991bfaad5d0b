from __future__ import annotations

import pytest
from msgspec.structs import replace

from streamrl.monitor.failures import FIRST_PAUSE_S, GIVEN_UP, LATELY, MOST_STONES, Barren, Failures, Pace, alone_to_blame, barren_line
from streamrl.monitor.screen import failed_line, plain_line
from streamrl.monitor.trained import MOST_REASONS
from streamrl.monitor.view import RunView
from streamrl.schemas.control import Grant, WorkerPresence
from streamrl.schemas.events import MetricReport
from streamrl.schemas.ledger import REASON_LENGTH, Drop
from streamrl.schemas.samples import Tombstone
from streamrl.telemetry.names import OTHER_REASON
from tests.monitor.conftest import MakeEntry, as_line


def stone(task: int, reason: str = "failed", *, rollout: int | None = None, detail: str = "producer: ValueError: no") -> Tombstone:
    return Tombstone(task=task, reason=reason, rollout=rollout, group_size=2, detail=detail, source="main")


def test_what_fails_is_counted_before_any_batch_is_trained() -> None:
    view = RunView("demo")
    for sequence in range(1, 4):
        view.tombstone(sequence, stone(sequence))
    view.tombstone(4, stone(9, "timeout", rollout=0, detail="user code made no progress for 30 s"))
    numbers = view.numbers(elapsed_s=1.0)
    assert numbers.drops == {"failed": 6, "timeout": 1}
    assert (numbers.dropped, numbers.failed_tasks) == (7, 3)
    assert numbers.newest_error == "timeout: user code made no progress for 30 s"
    assert "dropped=7" in plain_line(numbers)
    assert "failed-tasks=3" in plain_line(numbers)


def test_a_task_has_failed_when_each_of_its_rollouts_has() -> None:
    view = RunView("demo")
    view.tombstone(1, stone(5, rollout=0))
    assert view.failures.num_tasks == 0
    view.tombstone(2, stone(5, rollout=1, detail="another"))
    assert view.failures.num_tasks == 1
    view.tombstone(3, stone(5))  # a second delivery
    assert view.failures.num_tasks == 1


def test_a_batch_takes_over_what_its_entry_has_and_leaves_the_newest_error(entry: MakeEntry) -> None:
    view = RunView("demo")
    view.tombstone(3, stone(1))
    view.tombstone(7, stone(2))
    view.ledger(as_line(entry(1, cursor=5, drops=[Drop(3, 1, (0, 1), "failed")])))
    assert view.numbers(elapsed_s=1.0).drops == {"failed": 4}
    assert view.failures.num_tasks == 1
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
def test_a_run_is_given_up_only_when_no_producer_at_work_fails_less_than_its_part(
    failed: dict[str, int], working: set[str], alone: bool
) -> None:
    assert alone_to_blame(failed, working, most=24) is alone


def test_a_producer_is_at_work_once_loaded_until_its_report_says_that_it_holds_and_gives_nothing() -> None:
    view = RunView("demo")
    for name, state in (("producer-0", "running"), ("producer-1", "loading"), ("engine-0", "running")):
        view.worker(name, WorkerPresence(worker=name, kind=name[:-2], state=state, pid=1, host="here"))
    assert view.working_producers == {"producer-0"}
    for held, published, at_work in ((0, 0, False), (1, 0, True), (0, 3, True), (0, 0, False)):
        report = {"producer/in_flight_tasks": float(held)}
        view.metric(MetricReport(worker="producer-0", mean=report, sum={"producer/rollouts_total": float(published)}))
        assert ("producer-0" in view.working_producers) is at_work
    view.worker("producer-0", None)
    assert not view.working_producers


def test_what_has_failed_is_said_with_whose_it_was_where_there_are_others() -> None:
    view = RunView("demo")
    for sequence in range(1, 4):
        view.tombstone(sequence, by("producer-1\x1b[2J", sequence))
    view.worker("producer-1", WorkerPresence(worker="producer-1", kind="producer", state="running", pid=1, host="here"))
    view.failures.producers["producer-1"] += 1
    assert "all by" not in failed_line(view.numbers(elapsed_s=1.0), view.failures.producers)
    view.worker("producer-0", WorkerPresence(worker="producer-0", kind="producer", state="running", pid=1, host="here"))
    said = failed_line(view.numbers(elapsed_s=1.0), view.failures.producers)
    assert "no; all by producer-1·[2J, producer-1. hint" in said


def test_what_a_producer_leaves_out_on_purpose_is_no_failure() -> None:
    view = RunView("demo")
    for reason in ("filtered", "lost", "too-easy"):
        view.tombstone(1, stone(1, reason))
    assert (view.failures.num_tasks, view.failures.newest) == (0, "")


def test_what_producers_give_up_is_counted_before_any_batch_and_called_so(entry: MakeEntry) -> None:
    view = RunView("demo")
    for task in range(9):
        view.tombstone(1 + task, stone(task, "filtered"))
    view.grant(Grant(granted=24, version=0, retired=12))
    numbers = view.numbers(elapsed_s=1.0)
    assert (numbers.dropped, numbers.drops, numbers.failed_tasks, numbers.given_up_tasks) == (18, {"filtered": 18}, 0, 9)
    said = barren_line(numbers, view.failures.given_up.reasons)
    assert said.startswith("12 tasks") and "filtered 18" in said and GIVEN_UP.hint in said
    view.ledger(as_line(entry(1, cursor=5, drops=[Drop(3, 1, (0, 1), "filtered")])))
    assert view.numbers(elapsed_s=1.0).drops == {"filtered": 2 + 8}


def test_a_producers_own_words_are_counted_together_beyond_so_many_and_cut() -> None:
    view = RunView("demo")
    for sequence in range(1, 20_001):
        view.tombstone(sequence, stone(sequence, f"too long: {sequence} {'x' * 1000}"))
    reasons = view.failures.given_up.reasons
    assert len(reasons) == MOST_REASONS + 1 and max(map(len, reasons)) == REASON_LENGTH
    assert (reasons.total(), reasons[OTHER_REASON]) == (40_000, 2 * (20_000 - MOST_REASONS))
    view.failures.trained(19_990)
    assert len(reasons := view.failures.given_up.reasons) == 10 and max(map(len, reasons)) == REASON_LENGTH


def test_reasons_of_the_ledger_and_of_what_is_not_in_it_yet_are_bounded_together(entry: MakeEntry) -> None:
    view = RunView("demo")
    view.ledger(as_line(entry(1, cursor=5, drops=[Drop(3, 1, (0,), f"ledger {number}") for number in range(100)])))
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
    view = RunView("demo")
    for task in range(12):
        view.tombstone(1 + task, stone(task, reasons[task % len(reasons)]))
    view.grant(Grant(granted=24, version=0, retired=12))
    line = barren_line(view.numbers(elapsed_s=1.0), view.failures.given_up.reasons)
    assert said in line and hint in line and "None" not in line


def test_tasks_with_samples_that_give_no_batch_are_asked_for_their_rewards() -> None:
    view = RunView("demo")
    view.tombstone(1, stone(1, "filtered"))
    view.grant(Grant(granted=24, version=0, retired=12))
    assert "rewards" in barren_line(view.numbers(elapsed_s=1.0), view.failures.given_up.reasons)


def test_that_tasks_give_no_batch_is_said_once_failures_are_not_most_of_them_any_more() -> None:
    barren, numbers = Barren(), RunView("demo").numbers(elapsed_s=1.0)

    def due(tasks: int, failed: int) -> bool:
        return barren.due(replace(numbers, barren_tasks=tasks, failed_tasks=failed), least=8)

    assert not due(7, 0) and not due(8, 5), "too few, then most have failed"
    assert due(10, 5) and not due(12, 5) and not due(12, 7) and not due(20, 7)
    assert not due(0, 0) and due(8, 0)


def test_what_goes_on_is_said_at_once_and_then_ever_more_rarely() -> None:
    pace = Pace()
    said = [second for second in range(200) if pace.due(float(second))]
    assert said == [0, FIRST_PAUSE_S, 3 * FIRST_PAUSE_S, 7 * FIRST_PAUSE_S, 15 * FIRST_PAUSE_S]
