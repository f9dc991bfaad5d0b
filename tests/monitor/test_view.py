from __future__ import annotations

import statistics
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from streamrl.errors import SchemaError
from streamrl.monitor.rates import RATE_WINDOW_S, Totals, counted_quantile
from streamrl.monitor.series import Series
from streamrl.monitor.view import RunView
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.control import EnginePresence, Grant, WorkerPresence
from streamrl.schemas.events import Event
from streamrl.schemas.ledger import Drop, Gap
from streamrl.schemas.versions import Version
from tests.monitor.conftest import MakeEntry, as_line, evaluation


def presence(*, number: int | None, tokens: int = 0, swaps: int = 0) -> EnginePresence:
    serving = None if number is None else Version(0, number)
    return EnginePresence(engine="e", address="http://127.0.0.1:1", serving=serving, slots=8, tokens_total=tokens, swaps_total=swaps)


def test_an_empty_view_has_numbers() -> None:
    numbers = RunView("demo", steps=5).numbers(elapsed_s=1.0)
    assert (numbers.phase, numbers.step, numbers.version, numbers.reward, numbers.heldout) == ("starting", 0, "-", None, None)


def test_warmup_batches_count_neither_as_steps_nor_in_rewards_nor_in_ages(entry: MakeEntry) -> None:
    view = RunView("demo", steps=5, warmup_steps=9)
    view.ledger(as_line(entry(1, source="warmup", reward=None, ages=(7,))))
    numbers = view.numbers(elapsed_s=1.0)
    assert (numbers.phase, numbers.step, numbers.warmup_step, numbers.staleness_max) == ("warm-up", 0, 1, 0)
    assert numbers.answer_probability == 0.125
    view.ledger(as_line(entry(2, reward=0.25, ages=(0, 3))))
    numbers = view.numbers(elapsed_s=1.0)
    assert (numbers.phase, numbers.step, numbers.warmup_step, numbers.staleness_max) == ("training", 1, 1, 3)
    assert numbers.reward == 0.25
    assert (numbers.staleness_in_flight, numbers.staleness_queued) == (0.25, 0.5)


def test_reward_is_the_mean_of_the_last_twenty_batches(entry: MakeEntry) -> None:
    view = RunView("demo")
    for number in range(1, 31):
        view.ledger(as_line(entry(number, reward=0.0 if number <= 10 else 1.0)))
    assert view.numbers(elapsed_s=1.0).reward == 1.0


def test_drops_are_counted_in_rollouts_by_reason(entry: MakeEntry) -> None:
    view = RunView("demo")
    drops = [
        Drop(sequence=3, task=1, rollouts=(0, 1, 2), reason="stale"),
        Drop(sequence=4, task=2, rollouts=(), reason="poison"),
        Drop(sequence=5, task=3, rollouts=(1,), reason="stale"),
    ]
    view.ledger(as_line(entry(1, drops=drops)))
    numbers = view.numbers(elapsed_s=1.0)
    assert numbers.drops == {"stale": 4, "poison": 1}
    assert numbers.dropped == 5


def test_tokens_of_a_restarted_engine_add_up_and_earlier_sessions_count() -> None:
    view = RunView("demo", before=Totals(tokens_made=1000, swaps=10, wall_s=5.0))
    for tokens, swaps in ((100, 1), (250, 2), (30, 1)):
        view.engine("engine-0", presence(number=1, tokens=tokens, swaps=swaps))
    view.engine("engine-1", presence(number=None, tokens=7))
    assert view.tokens_made == 1000 + 250 + 30 + 7
    assert view.swaps == 10 + 2 + 1


def test_a_view_that_joins_counts_from_the_first_report_on() -> None:
    view = RunView("demo", before=Totals(tokens_made=1000, swaps=10), joined=True)
    view.engine("engine-0", presence(number=1, tokens=900, swaps=9))
    assert (view.tokens_made, view.swaps) == (1000, 10)
    for tokens in (950, 30):
        view.engine("engine-0", presence(number=1, tokens=tokens, swaps=9))
    assert (view.tokens_made, view.swaps) == (1080, 10)


def test_an_engine_whose_presence_outlives_the_session_is_not_counted_again() -> None:
    first = RunView("demo", before=Totals(tokens_made=1000))
    first.engine("engine-0-aa", presence(number=1, tokens=200, swaps=3))
    carried = decode(encode(first.totals(wall_s=1.0)), Totals)
    for joined in (False, True):
        view = RunView("demo", before=carried, joined=joined, series=Series(window_s=1.0))
        view.take_rows(0.0)
        for engine, tokens in (("engine-0-aa", 200), ("engine-0-aa", 205), ("engine-1-bb", 7)):
            view.engine(engine, presence(number=1, tokens=tokens, swaps=3))
        assert view.tokens_made == 1205 + (0 if joined else 7)
        sampled = {row.of: row.values["tokens/sampled_total"] for row in view.take_rows(1.0) if row.of}
        assert sampled == {"engine-0": 5.0, "engine-1": 0.0 if joined else 7.0}
    assert decode(encode({"tokens_made": 5, "swaps": 1, "wall_s": 2.0}), Totals).tokens_by_engine == {}, "as earlier versions wrote it"


def test_an_engine_that_vanishes_leaves_the_lines_but_not_the_totals() -> None:
    view = RunView("demo")
    view.engine("engine-0", presence(number=3, tokens=40))
    view.engine("engine-0", None)
    numbers = view.numbers(elapsed_s=1.0)
    assert numbers.engines == ()
    assert numbers.tokens_made == 40


def test_engines_may_be_behind_the_newest_version(entry: MakeEntry) -> None:
    view = RunView("demo")
    view.ledger(as_line(entry(10)))
    view.engine("engine-0", presence(number=9))
    view.engine("engine-1", presence(number=6))
    view.engine("engine-2", presence(number=None))
    assert view.numbers(elapsed_s=1.0).engines_behind == 2.5


def test_versions_seen_in_engines_are_remembered_once_they_change() -> None:
    view = RunView("demo")
    for number in (0, 0, 2, 3, 3):
        view.engine("engine-0", presence(number=number))
    assert view.swap_numbers == {2, 3}


def test_engines_that_hold_a_pinned_version_are_not_behind(entry: MakeEntry) -> None:
    view = RunView("demo")
    view.ledger(as_line(entry(9)))
    view.engine("engine-0", presence(number=8))
    view.engine("engine-1", replace(presence(number=2), role="evaluation"))
    numbers = view.numbers(elapsed_s=1.0)
    assert numbers.engines_behind == 1.0
    assert [engine.serving for engine in numbers.engines] == ["0.8", "0.2 (pinned)"]


def test_stream_lag_is_what_came_after_the_newest_batch(entry: MakeEntry) -> None:
    view = RunView("demo")
    view.stream(last=40, num_bytes=123)
    assert view.numbers(elapsed_s=1.0).stream_lag == 40
    view.ledger(as_line(entry(1, cursor=30)))
    numbers = view.numbers(elapsed_s=1.0)
    assert (numbers.stream_lag, numbers.stream_bytes) == (10, 123)


def test_rates_look_at_the_last_seconds_only() -> None:
    view = RunView("demo")
    view.mark(0.0)
    view.engine("engine-0", presence(number=1, tokens=1_000_000))
    view.mark(1.0)
    assert view.numbers(elapsed_s=1.0).made_per_s == 1_000_000
    for second in range(2, 40):
        view.engine("engine-0", presence(number=1, tokens=1_000_000 + 50 * (second - 1)))
        view.mark(float(second))
    assert RATE_WINDOW_S < 39
    assert view.numbers(elapsed_s=39.0).made_per_s == pytest.approx(50.0)


def test_a_forked_epoch_replaces_what_it_trained_again(entry: MakeEntry) -> None:
    drop = Drop(sequence=1, task=0, rollouts=(0,), reason="stale")
    view, straight = RunView("demo"), RunView("demo")
    for number in (1, 2, 3, 4):
        view.ledger(as_line(entry(number, reward=0.1, drops=(drop,), ages=(5,))))
    for number in (3, 4):
        view.ledger(as_line(entry(number, epoch=1, reward=0.9, ages=(1,))))
    for number in (1, 2):
        straight.ledger(as_line(entry(number, reward=0.1, drops=(drop,), ages=(5,))))
    for number in (3, 4):
        straight.ledger(as_line(entry(number, epoch=1, reward=0.9, ages=(1,))))
    assert view.numbers(elapsed_s=1.0) == straight.numbers(elapsed_s=1.0)
    assert view.reward_points == straight.reward_points


def test_events_finish_the_run_report_evaluations_and_stalls() -> None:
    view = RunView("demo")
    view.worker("producer-0", WorkerPresence(worker="producer-0", kind="producer", pid=7))
    view.event(
        Event(kind="evaluation", worker="evaluator-0", detail=evaluation(3, 0.75, [{"prompt": "1+1=", "expected": "2", "got": "3"}]))
    )
    view.event(Event(kind="stalled", worker="producer-0"))
    numbers = view.numbers(elapsed_s=1.0)
    assert (numbers.heldout, numbers.stalled, numbers.phase) == (0.75, ("producer-0",), "starting")
    assert view.evaluations[0].version == Version(0, 3)
    assert view.evaluations[0].problems[0].got == "3"
    view.event(Event(kind="resumed", worker="producer-0"))
    view.event(Event(kind="finished", worker="trainer-0"))
    assert view.numbers(elapsed_s=1.0).phase == "starting"
    view.finished = True
    numbers = view.numbers(elapsed_s=1.0)
    assert (numbers.stalled, numbers.phase) == ((), "finished")


@pytest.mark.parametrize("detail", [{}, {"version": "0.1"}, {"version": "none", "accuracy": 0.5}, {"version": "0.1", "accuracy": "good"}])
def test_an_evaluation_that_cannot_be_read_is_refused(detail: dict[str, object]) -> None:
    view = RunView("demo")
    with pytest.raises(SchemaError):
        view.event(Event(kind="evaluation", worker="evaluator-0", detail=detail))
    assert view.evaluations == []


@given(st.lists(st.integers(min_value=0, max_value=9), min_size=1))
def test_the_median_of_counts_is_the_median_of_the_values(values: list[int]) -> None:
    assert counted_quantile(Counter(values), 0.5) == statistics.median(values)


def test_tasks_that_end_without_a_batch_are_told_apart(entry: MakeEntry) -> None:
    view = RunView("demo")
    view.grant(Grant(granted=24, version=0, retired=9))
    numbers = view.numbers(elapsed_s=1.0)
    assert (numbers.tasks_ended, numbers.tasks_granted, numbers.barren_tasks) == (9, 24, 9)
    view.ledger(as_line(entry(11)))
    view.grant(Grant(granted=30, version=1, retired=15))
    assert view.numbers(elapsed_s=1.0).barren_tasks == 4


def test_a_gap_is_no_batch_and_makes_later_ones_void(entry: MakeEntry) -> None:
    view = RunView("r")
    for number in (1, 2, 3, 4):
        view.ledger(as_line(entry(number)))
    lost = Gap(lost="samples", missing=(), highest=Version(0, 4), known_by="ledger")
    view.ledger(as_line(replace(entry(2, epoch=1, tokens=0), used=(), gap=lost)))
    assert [point.number for point in view.reward_points] == [1, 2]
    view.ledger(as_line(entry(3, epoch=1)))
    assert [point.number for point in view.reward_points] == [1, 2, 3] and view.tokens_trained == 300
    assert view.numbers(elapsed_s=0.0).version == "1.3"


def test_notices_are_kept_for_the_screen() -> None:
    view = RunView("r")
    view.event(Event(kind="notice", worker="trainer-0", detail={"text": "goes on from an older checkpoint"}))
    assert view.take_notices() == ["trainer-0: goes on from an older checkpoint"]
    assert view.take_notices() == []
