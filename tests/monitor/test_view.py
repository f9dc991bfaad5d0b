"""What a view has of a run, and how it follows one."""

import asyncio
import contextlib
import logging
import statistics
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from streamrl.bus.protocol import Bus, StreamState
from streamrl.config.metrics import MetricsConfig
from streamrl.consumers.training.ledger import take_fence
from streamrl.errors import SchemaError
from streamrl.monitor import trained
from streamrl.monitor.follow import Follower, read_totals
from streamrl.monitor.metrics_file import MetricsFile, decoded, files, written_version
from streamrl.monitor.rates import RATE_WINDOW_S, Totals, counted_quantile
from streamrl.monitor.row_writer import RowWriter
from streamrl.monitor.series import MOST_ROWS, Row, Series
from streamrl.monitor.sinks.position import Position
from streamrl.monitor.summary import summarize
from streamrl.monitor.view import RunView
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.control import EnginePresence, Grant, RunEnd, WorkerPresence
from streamrl.schemas.events import Event, MetricReport
from streamrl.schemas.ledger import Drop, Gap
from streamrl.schemas.subjects import KEY_GRANTED, Subjects
from streamrl.schemas.versions import Version
from streamrl.telemetry.metrics import report
from tests.monitor.conftest import MakeEntry, as_line, evaluation, view_of, windowed
from tests.support.processes import until
from tests.support.tiny import ended


def presence(*, number: int | None, tokens: int = 0, swaps: int = 0) -> EnginePresence:
    serving = None if number is None else Version(0, number)
    return EnginePresence(engine="e", address="http://127.0.0.1:1", serving=serving, slots=8, tokens_total=tokens, swaps_total=swaps)


def test_an_empty_view_has_numbers() -> None:
    numbers = RunView("demo", steps=5).numbers(elapsed_s=1.0)
    assert (numbers.phase, numbers.step, numbers.version, numbers.reward, numbers.heldout) == ("starting", 0, "-", None, None)


def test_warmup_batches_count_neither_as_steps_nor_in_rewards_nor_in_ages(entry: MakeEntry) -> None:
    view = view_of(entry(1, source="warmup", reward=None, ages=(7,)), steps=5, warmup_steps=9)
    numbers = view.numbers(elapsed_s=1.0)
    assert (numbers.phase, numbers.step, numbers.warmup_step, numbers.staleness_max) == ("warm-up", 0, 1, 0)
    assert numbers.answer_probability == 0.125
    view.ledger(as_line(entry(2, reward=0.25, ages=(0, 3))))
    numbers = view.numbers(elapsed_s=1.0)
    assert (numbers.phase, numbers.step, numbers.warmup_step, numbers.staleness_max) == ("training", 1, 1, 3)
    assert (numbers.reward, numbers.staleness_in_flight, numbers.staleness_queued) == (0.25, 0.25, 0.5)


def test_reward_is_the_mean_of_twenty_batches_and_drops_are_counted_by_reason(entry: MakeEntry) -> None:
    view = view_of(*(entry(number, reward=0.0 if number <= 10 else 1.0) for number in range(1, 31)))
    assert view.numbers(elapsed_s=1.0).reward == 1.0
    view = RunView("demo")
    drops = [
        Drop(sequence=3, task=1, rollouts=(0, 1, 2), reason="stale"),
        Drop(sequence=4, task=2, rollouts=(), reason="poison"),
        Drop(sequence=5, task=3, rollouts=(1,), reason="stale"),
    ]
    view.ledger(as_line(entry(1, drops=drops)))
    numbers = view.numbers(elapsed_s=1.0)
    assert (numbers.drops, numbers.dropped) == ({"stale": 4, "poison": 1}, 5)


def test_tokens_of_engines_add_up_over_restarts_joins_and_sessions() -> None:
    view = RunView("demo", before=Totals(tokens_made=1000, swaps=10, wall_s=5.0))
    for tokens, swaps in ((100, 1), (250, 2), (30, 1)):
        view.engine("engine-0", presence(number=1, tokens=tokens, swaps=swaps))
    view.engine("engine-1", presence(number=None, tokens=7))
    assert (view.tokens_made, view.swaps) == (1000 + 250 + 30 + 7, 10 + 2 + 1)
    view = RunView("demo", before=Totals(tokens_made=1000, swaps=10), joined=True)
    view.engine("engine-0", presence(number=1, tokens=900, swaps=9))
    assert (view.tokens_made, view.swaps) == (1000, 10)
    for tokens in (950, 30):
        view.engine("engine-0", presence(number=1, tokens=tokens, swaps=9))
    assert (view.tokens_made, view.swaps) == (1080, 10)
    first = RunView("demo", before=Totals(tokens_made=1000))
    first.engine("engine-0-aa", presence(number=1, tokens=200, swaps=3))
    carried = decode(encode(first.totals(wall_s=1.0)), Totals)
    for joined in (False, True):
        view = windowed(before=carried, joined=joined)
        for engine, tokens in (("engine-0-aa", 200), ("engine-0-aa", 205), ("engine-1-bb", 7)):
            view.engine(engine, presence(number=1, tokens=tokens, swaps=3))
        assert view.tokens_made == 1205 + (0 if joined else 7)
        sampled = {row.of: row.values["tokens/sampled_total"] for row in view.take_rows(1.0) if row.of}
        assert sampled == {"engine-0": 5.0, "engine-1": 0.0 if joined else 7.0}
    assert decode(encode({"tokens_made": 5, "swaps": 1, "wall_s": 2.0}), Totals).tokens_by_engine == {}, "as earlier versions wrote it"


def test_engines_that_vanish_or_hold_a_pinned_version_are_not_behind(entry: MakeEntry) -> None:
    view = view_of(entry(10))
    view.engine("engine-0", presence(number=9))
    view.engine("engine-1", presence(number=6))
    view.engine("engine-2", presence(number=None))
    assert view.numbers(elapsed_s=1.0).engines_behind == 2.5
    view = view_of(entry(9))
    view.engine("engine-0", presence(number=8))
    view.engine("engine-1", replace(presence(number=2), role="evaluation"))
    numbers = view.numbers(elapsed_s=1.0)
    assert (numbers.engines_behind, [engine.serving for engine in numbers.engines]) == (1.0, ["0.8", "0.2 (pinned)"])
    view = RunView("demo")
    view.engine("engine-0", presence(number=3, tokens=40))
    view.engine("engine-0", None)
    numbers = view.numbers(elapsed_s=1.0)
    assert (numbers.engines, numbers.tokens_made) == ((), 40)
    view = RunView("demo")
    for number in (0, 0, 2, 3, 3):
        view.engine("engine-0", presence(number=number))
    assert view.swap_numbers == {2, 3}


def test_stream_lag_and_ended_tasks_count_from_the_newest_batch(entry: MakeEntry) -> None:
    view = RunView("demo")
    view.stream(last=40, num_bytes=123)
    assert view.numbers(elapsed_s=1.0).stream_lag == 40
    view.ledger(as_line(entry(1, cursor=30)))
    numbers = view.numbers(elapsed_s=1.0)
    assert (numbers.stream_lag, numbers.stream_bytes) == (10, 123)
    view = RunView("demo")
    view.grant(Grant(granted=24, version=0, retired=9))
    numbers = view.numbers(elapsed_s=1.0)
    assert (numbers.tasks_ended, numbers.tasks_granted, numbers.barren_tasks) == (9, 24, 9)
    view.ledger(as_line(entry(11)))
    view.grant(Grant(granted=30, version=1, retired=15))
    assert view.numbers(elapsed_s=1.0).barren_tasks == 4


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


@pytest.mark.parametrize("detail", [{}, {"version": "0.1"}, {"version": "none", "accuracy": 0.5}, {"version": "0.1", "accuracy": "good"}])
def test_an_evaluation_that_cannot_be_read_is_refused(detail: dict[str, object]) -> None:
    view = RunView("demo")
    with pytest.raises(SchemaError):
        view.event(Event(kind="evaluation", worker="evaluator-0", detail=detail))
    assert view.evaluations == []


@given(st.lists(st.integers(min_value=0, max_value=9), min_size=1))
def test_the_median_of_counts_is_the_median_of_the_values(values: list[int]) -> None:
    assert counted_quantile(Counter(values), 0.5) == statistics.median(values)


def test_a_gap_is_no_batch_and_makes_later_ones_void(entry: MakeEntry) -> None:
    view = view_of(*(entry(number) for number in (1, 2, 3, 4)))
    lost = Gap(lost="samples", missing=(), highest=Version(0, 4), known_by="ledger")
    view.ledger(as_line(replace(entry(2, epoch=1, tokens=0), used=(), gap=lost)))
    assert [point.number for point in view.reward_points] == [1, 2]
    view.ledger(as_line(entry(3, epoch=1)))
    assert [point.number for point in view.reward_points] == [1, 2, 3] and view.tokens_trained == 300
    assert view.numbers(elapsed_s=0.0).version == "1.3"


def test_notices_and_events_are_kept() -> None:
    view = RunView("r")
    view.event(Event(kind="notice", worker="trainer-0", detail={"text": "goes on from an older checkpoint"}))
    assert view.take_notices() == ["trainer-0: goes on from an older checkpoint"]
    assert view.take_notices() == []
    view = RunView("demo")
    view.worker("producer-0", WorkerPresence(worker="producer-0", kind="producer", pid=7))
    view.event(
        Event(kind="evaluation", worker="evaluator-0", detail=evaluation(3, 0.75, [{"prompt": "1+1=", "expected": "2", "got": "3"}]))
    )
    view.event(Event(kind="stalled", worker="producer-0"))
    numbers = view.numbers(elapsed_s=1.0)
    assert (numbers.heldout, numbers.stalled, numbers.phase) == (0.75, ("producer-0",), "starting")
    assert (view.evaluations[0].version, view.evaluations[0].problems[0].got) == (Version(0, 3), "3")
    view.event(Event(kind="resumed", worker="producer-0"))
    view.event(Event(kind="finished", worker="trainer-0"))
    assert view.numbers(elapsed_s=1.0).phase == "starting"
    view.finished = True
    numbers = view.numbers(elapsed_s=1.0)
    assert (numbers.stalled, numbers.phase) == ((), "finished")


async def test_a_view_follows_ledger_events_metrics_presence_and_grant(bus: Bus, run_id: str, entry: MakeEntry) -> None:
    subjects, view = Subjects(run_id), RunView(run_id, series=Series(window_s=0.0))
    await bus.publish(subjects.ledger("main"), encode(entry(1)), id="0.1")
    await bus.publish(subjects.metrics("trainer-0"), encode(report("trainer-0", {"train/loss": 9.0}, time_s=0.0)))
    async with Follower(bus, view) as follower:
        await bus.publish(subjects.ledger("main"), encode(entry(2)), id="0.2")
        await bus.publish(subjects.events("evaluation"), encode(Event(kind="evaluation", worker="e", detail=evaluation(2, 0.5))))
        await bus.publish(subjects.metrics("trainer-0"), encode(report("trainer-0", {"train/loss": 3.0}, time_s=0.0)))
        engine = EnginePresence(engine="engine-0", address="http://127.0.0.1:1", serving=Version(0, 1), tokens_total=40, swaps_total=2)
        await bus.kv.put("presence/engines/engine-0", encode(engine), ttl_s=60)
        await bus.kv.put("presence/workers/engine-0", encode(WorkerPresence(worker="engine-0", kind="engine", pid=3)), ttl_s=60)
        await bus.kv.put(KEY_GRANTED, encode(Grant(granted=24, version=0, retired=6)))
        await follower.catch_up()
        assert ([point.number for point in view.reward_points], view.evaluations[0].accuracy) == ([1, 2], 0.5)
        await until(lambda: view.numbers(elapsed_s=0.0).tasks_granted == 24 and view.tokens_made == 40)
        numbers = view.numbers(elapsed_s=0.0)
        assert ([worker.worker for worker in numbers.workers], numbers.swaps) == (["engine-0"], 2)
        rows: list[Row] = []
        await until(lambda: bool(rows.extend(view.take_rows(time.time())) or [row for row in rows if row.of == "trainer-0"]))
        trainer = next(row for row in rows if row.of == "trainer-0")
        assert trainer.values == {"train/loss": 3.0}, "reports from before count for nothing"
        assert [row.version for row in rows if row.kind == "batch"] == ["0.1", "0.2"]
        await bus.kv.delete("presence/engines/engine-0")
        await until(lambda: not view.numbers(elapsed_s=0.0).engines)


async def test_reports_from_where_it_is_told_on_count(bus: Bus, run_id: str) -> None:
    subject, view = Subjects(run_id).metrics("producer-0"), RunView(run_id, series=Series(window_s=1.0))
    for tokens in (1.0, 10.0, 100.0):
        await bus.publish(subject, encode(report("producer-0", {"tokens/cut_total": tokens}, time_s=0.0)))
    async with Follower(bus, view, after=1) as follower:
        await bus.publish(subject, encode(report("producer-0", {"tokens/cut_total": 1000.0}, time_s=0.0)))
        await follower.catch_up()
    (row,) = [row for row in view.take_rows(time.time(), end=True) if row.of == "producer-0"]
    assert row.values["tokens/cut_total"] == 1110.0


async def test_evaluations_get_their_rows_once_over_sessions_whatever_their_clocks_say(bus: Bus, run_id: str) -> None:
    """A sink is ended and started again at any moment; an evaluator's clock may stand still, go back, or give no time at all."""
    position, written = Position(), list[str]()

    async def evaluated(number: int, time_s: float) -> None:
        event = Event(kind="evaluation", worker="e", detail=evaluation(number, 0.5), time_s=time_s)
        await bus.publish(Subjects(run_id).events("evaluation"), encode(event))

    for times in ((7.0, 7.0), (7.0, 3.0), (float("nan"), float("inf")), (8.0, 7.5)):
        await evaluated(len(written) + 1, times[0])
        view = RunView(run_id, series=Series(window_s=1e9, evaluated=replace(position).has))
        async with Follower(bus, view) as follower:
            await evaluated(len(written) + 2, times[1])
            await follower.catch_up()
            rows = [row for row in view.take_rows(0.0) if row.kind == "evaluation"]
            position.add(rows)
            written += [row.version for row in rows]
    assert written == [f"0.{number}" for number in range(1, 9)]


async def test_what_cannot_be_folded_costs_a_message_and_the_bus_is_not_blamed(
    bus: Bus, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[str]()
    await bus.kv.put(KEY_GRANTED, b"no grant")
    view = RunView(run_id)

    def metric(one: MetricReport) -> None:
        seen.append(one.worker)
        _ = round(one.mean["x"])

    monkeypatch.setattr(view, "metric", metric)
    async with Follower(bus, view) as follower:
        began_s = follower.answered_s
        for name, value in (("a", float("inf")), ("b", 1.0)):
            await bus.publish(Subjects(run_id).metrics(name), encode(MetricReport(worker=name, mean={"x": value})))
        await bus.kv.put("presence/workers/a", b"no presence")
        await follower.catch_up()
        await until(lambda: follower.answered_s > began_s)
        first_s = follower.answered_s
        await until(lambda: follower.answered_s > first_s)
    assert seen == ["a", "b"]


async def test_what_cannot_be_read_is_passed_over(bus: Bus, run_id: str, entry: MakeEntry, caplog: pytest.LogCaptureFixture) -> None:
    subjects, view = Subjects(run_id), RunView(run_id)
    await bus.publish(subjects.ledger("main"), b"\xc1 no entry")
    await bus.publish(subjects.ledger("main"), encode(entry(1)))
    await bus.publish(subjects.events("evaluation"), encode(Event(kind="evaluation", worker="e", detail={"accuracy": "high"})))
    await bus.kv.put("presence/workers/x", b"\xc1")
    with caplog.at_level(logging.WARNING):
        async with Follower(bus, view) as follower:
            await follower.catch_up()
            await until(lambda: caplog.text.count("event=unreadable") == 3)
    assert [point.number for point in view.reward_points] == [1]


async def test_totals_are_carried_and_an_earlier_end_is_not_this_ones(bus: Bus, run_id: str) -> None:
    assert await read_totals(bus) == Totals()
    view = RunView(run_id, before=Totals(tokens_made=100, swaps=3, wall_s=50.0))
    view.engine("engine-0", EnginePresence(engine="engine-0", address="", tokens_total=11, swaps_total=2))
    async with Follower(bus, view, started_s=time.monotonic() - 7.0) as follower:
        await follower.store_totals()
    totals = await read_totals(bus)
    assert (totals.tokens_made, totals.swaps) == (111, 5)
    assert 57.0 <= totals.wall_s < 1000.0
    after = RunView(run_id, before=totals)
    after.engine("engine-0", EnginePresence(engine="engine-0", address="", tokens_total=12, swaps_total=2))
    assert (after.tokens_made, after.swaps) == (112, 5), "its presence outlives the session that it was counted in"


async def test_the_end_of_an_earlier_session_is_not_the_end_of_this_one(bus: Bus, run_id: str) -> None:
    """Nor is that of a trainer which has been replaced; an event decides nothing. Who looks from outside sees the end that there is."""
    await ended(bus, 1)
    view, outside = RunView(run_id), RunView(run_id)
    async with Follower(bus, view, carry_totals=True) as follower:
        await bus.publish(Subjects(run_id).events("finished"), encode(Event(kind="finished", worker="trainer-0")))
        fence = await take_fence(bus, "main")
        await bus.kv.put("ends/main", encode(RunEnd(version=Version(0, 1), steps=1, limit="steps", fence=fence - 1)))
        await follower.catch_up()
        async with Follower(bus, outside):
            assert not view.finished and not outside.finished
            await ended(bus, 2)
            await until(lambda: view.finished and outside.finished)


async def test_reading_history_is_no_training_speed(bus: Bus, run_id: str, entry: MakeEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.monitor.follow._POLL_S", 0.05)
    for number in range(1, 6):
        await bus.publish(Subjects(run_id).ledger("main"), encode(entry(number, tokens=1_000_000)), id=f"0.{number}")
    view, polls = RunView(run_id), list[float]()
    mark = view.mark
    monkeypatch.setattr(view, "mark", lambda now_s: (polls.append(now_s), mark(now_s)))
    async with Follower(bus, view) as follower:
        await follower.catch_up()
        count = len(polls)
        await until(lambda: len(polls) > count + 2)
    assert (view.tokens_trained, view.numbers(elapsed_s=0.0).trained_per_s) == (5_000_000, 0.0)


async def test_catching_up_gives_up_in_the_end(bus: Bus, run_id: str, entry: MakeEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    view = RunView(run_id)
    async with Follower(bus, view) as follower:
        state = bus.state

        async def further(stream: str) -> StreamState:
            found = await state(stream)
            return replace(found, last=found.last + 1)  # a message that never comes

        monkeypatch.setattr(bus, "state", further)
        await asyncio.wait_for(follower.catch_up(within_s=0.05), 20)


async def test_an_epoch_that_forks_far_back_is_read_anew(bus: Bus, run_id: str, entry: MakeEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained, "TAIL", 4)
    line = [entry(number, reward=0.1) for number in range(1, 21)]
    line += [entry(number, epoch=1, reward=0.2) for number in range(17, 22)]  # within the tail or not, it is void later
    line += [entry(number, epoch=2, reward=0.9, ages=(3,)) for number in range(3, 8)]
    for one in line[:-2]:
        await bus.publish(Subjects(run_id).ledger("main"), encode(one), id=str(one.version))
    view, straight = RunView(run_id, series=Series()), RunView(run_id)
    async with Follower(bus, view) as follower:
        await follower.catch_up()
        for one in line[-2:]:
            await bus.publish(Subjects(run_id).ledger("main"), encode(one), id=str(one.version))
        await follower.catch_up()
        assert view.live, "windows end again"
        rows = view.take_rows(0.0)
    for one in [*line[:2], *line[-5:]]:
        straight.ledger(as_line(one))
    assert view.numbers(elapsed_s=0.0).version == "2.7"
    assert (view.reward_points, view.trained.ages, view.tokens_trained) == (straight.reward_points, straight.trained.ages, 700)
    assert [row.version for row in rows] == [str(one.version) for one in line], "each entry gives one row, read again or not"


async def test_evaluations_are_judged_by_the_ledger_that_came_before_this_session(bus: Bus, run_id: str, entry: MakeEntry) -> None:
    for number in range(1, 401):
        await bus.publish(Subjects(run_id).ledger("main"), encode(entry(number, warm=number > 39)), id=f"0.{number}")
        event = Event(kind="evaluation", worker="e", detail=evaluation(number, number / 1000))
        await bus.publish(Subjects(run_id).events("evaluation"), encode(event))
    view = RunView(run_id)
    async with Follower(bus, view) as follower:
        await follower.catch_up(within_s=60)
    assert len(view.evaluations) < 300
    assert summarize(view, wall_s=1.0).heldout_first == 0.04


async def test_a_long_ledger_whose_rows_are_gone_gets_them_all_again(bus: Bus, run_id: str, entry: MakeEntry, tmp_path: Path) -> None:
    count = MOST_ROWS + 600
    for number in range(1, count + 1):
        await bus.publish(Subjects(run_id).ledger("main"), encode(entry(number)), id=f"0.{number}")
    for _ in range(2):
        view = RunView(run_id, series=Series(after=written_version(tmp_path)))
        with contextlib.closing(RowWriter(MetricsFile(tmp_path, MetricsConfig()))) as rows:
            async with Follower(bus, view, rows=rows) as follower:
                await follower.catch_up(within_s=100)
        assert (rows.num_lost, view.series and view.series.num_lost) == (0, 0)
    found = [decoded(line) for path in files(tmp_path) for line in path.read_bytes().splitlines()]
    assert [row.version for row in found if row and row.kind == "batch"] == [f"0.{number}" for number in range(1, count + 1)]
    assert len([row for row in found if row and row.kind == "window"]) >= 2, "one at the end of each session"
