"""What a view has of a run, how it follows one, and how a run is summed up at its end."""

import asyncio
import contextlib
import json
import logging
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from rich.console import Console

from streamrl.bus.protocol import Bus, StreamState
from streamrl.config.metrics import MetricsConfig
from streamrl.consumers.training.ledger import take_fence
from streamrl.errors import SchemaError
from streamrl.history.compare import Curve
from streamrl.monitor import trained
from streamrl.monitor.decoded import evaluation_of
from streamrl.monitor.evaluations import MOST_SETS, Evaluations
from streamrl.monitor.follow import Follower, read_totals
from streamrl.monitor.metrics_file import MetricsFile, decoded, files, written_version
from streamrl.monitor.numbers import Evaluation
from streamrl.monitor.outcome import Outcome, conclude, summed_up
from streamrl.monitor.plot import smooth, write_plot
from streamrl.monitor.rates import RATE_WINDOW_S, Totals, counted_quantile
from streamrl.monitor.row_writer import RowWriter
from streamrl.monitor.screen import plain_line, reward_line
from streamrl.monitor.series import MOST_ROWS, Row, Series
from streamrl.monitor.sinks.position import Position
from streamrl.monitor.summary import learning_evaluations, problem_table, summarize, summary_line, write_summary
from streamrl.monitor.view import RunView
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.control import EnginePresence, Grant, RunEnd, WorkerPresence
from streamrl.schemas.events import Event, MetricReport
from streamrl.schemas.ledger import Drop, Gap
from streamrl.schemas.subjects import KEY_GRANTED, Subjects
from streamrl.schemas.versions import Version
from streamrl.telemetry.metrics import report
from tests.monitor.conftest import MakeEntry, as_line, evaluation, view_of, windowed
from tests.support.processes import until
from tests.support.runs import bare_run
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
        await asyncio.wait_for(follower.catch_up(within_s=0.05), 60)


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


KEYS = (
    "steps reward_first reward_last loss_first loss_last heldout_first heldout_last evaluations tokens_made tokens_trained staleness_p50 "
    "staleness_max dropped drops failed_rollouts ended_rollouts newest_error unusable_rows slo swaps wall_s account verdict"
)


def test_summary_has_the_promised_keys_and_numbers(learned_run: RunView, tmp_path: Path) -> None:
    summary = summarize(learned_run, wall_s=75.25)
    write_summary(summary, tmp_path / "summary.json")
    written = json.loads((tmp_path / "summary.json").read_text())
    assert list(written) == KEYS.split()
    rewards = [point.reward for point in learned_run.reward_points if point.reward is not None]
    assert len(rewards) == 80
    assert (written["steps"], written["reward_first"]) == (80, pytest.approx(sum(rewards[:20]) / 20))
    assert written["reward_last"] == pytest.approx(sum(rewards[-20:]) / 20)
    assert (written["loss_first"], written["loss_last"]) == (None, None)
    assert (written["heldout_first"], written["heldout_last"]) == (0.21, 0.91)
    assert (written["tokens_made"], written["tokens_trained"]) == (10_000, 10_000)
    assert (written["staleness_p50"], written["staleness_max"]) == (1.0, 2)
    assert (written["dropped"], written["swaps"], written["wall_s"]) == (160, 80, 75.25)


@pytest.mark.parametrize(("batches", "first", "last"), [(1, 1.0, 1.0), (2, 1.0, 2.0), (7, 2.0, 6.0), (30, 8.0, 23.0), (41, 10.5, 31.5)])
def test_the_rewards_before_and_after_share_no_batch(entry: MakeEntry, batches: int, first: float, last: float) -> None:
    view = view_of(*(entry(number, reward=float(number)) for number in range(1, batches + 1)))
    summary = summarize(view, wall_s=1.0)
    assert (summary.reward_first, summary.reward_last) == (first, last)
    curve = Curve(numbers=tuple(range(batches)), values=tuple(float(number + 1) for number in range(batches)))
    assert (curve.first, curve.last) == (first, last)


def test_an_end_before_the_ledger_was_read_claims_nothing_of_what_was_trained(learned_run: RunView, tmp_path: Path) -> None:
    run = bare_run(tmp_path / "demo")
    assert summed_up(run, None, state="killed").unread is False, "a run that never began"
    run.config_path.touch()
    history = RunView("demo")
    history.live = False
    for view in (None, history):
        found = summed_up(run, view, state="killed", exit_code=130)
        assert (found.summary, found.unread, found.exit_code) == (None, True, 130)
    told = summed_up(run, learned_run, state="killed")
    assert told.summary is not None and (told.summary.steps, told.unread) == (80, False)
    assert summed_up(run, history, state="killed") == Outcome(run=run, state="killed", summary=told.summary, unread=True)


def test_the_line_tells_reward_and_heldout_before_and_after(learned_run: RunView) -> None:
    line = summary_line(summarize(learned_run, wall_s=75.0))
    assert line.startswith("80 steps in 1:15, reward 0.")
    assert "held-out 0.210 -> 0.910" in line and "160 dropped (zero_variance 160), 80 swaps" in line


def test_everything_that_people_read_says_which_versions_answered_where_they_are_others(learned_run: RunView) -> None:
    first, last = learned_run.evaluations[0], learned_run.evaluations[-1]
    assert "(by " not in summary_line(summarize(learned_run, wall_s=1.0)) and first.answered_by == last.answered_by == ""
    for number, accuracy, versions in ((19, 0.21, ["0.21", "0.23"]), (100, 0.91, ["0.99", "0.99"])):
        detail = evaluation(number, accuracy, [{"prompt": "a", "expected": "1", "got": "1"}]) | {"versions": versions}
        learned_run.event(Event(kind="evaluation", worker="evaluator-0", detail=detail))
        learned_run.event(Event(kind="evaluation", worker="evaluator-0", detail=detail | {"set": "words"}))
    summary = summarize(learned_run, wall_s=1.0)
    assert all(f"(by {by})" in summary_line(summary) for by in ("versions 0.21 to 0.23", "version 0.99"))
    assert (summary.evaluations["words"].first_by, summary.evaluations["words"].last_by) == ("versions 0.21 to 0.23", "version 0.99")
    shown = "".join(part.text for part in reward_line(learned_run.numbers(elapsed_s=1.0)))
    assert "held-out 0.910 (by version 0.99)" in shown and "words 0.910 (by version 0.99)" in shown
    table = problem_table(learned_run.evaluations)
    titles = [str(column.header) for column in table.columns] if table else []
    assert titles[2:] == ["version 0.19 (by versions 0.21 to 0.23)", "version 0.100 (by version 0.99)"]


def test_runs_without_evaluations_or_rewards_and_problems_of_one_evaluation(learned_run: RunView) -> None:
    summary = summarize(RunView("demo"), wall_s=1.0)
    assert (summary.steps, summary.reward_first, summary.heldout_last, summary.staleness_p50) == (0, None, None, 0.0)
    assert "reward" not in summary_line(summary)
    first, last = ([{"prompt": prompt, "expected": "1", "got": "1"} for prompt in prompts] for prompts in ("ab", "bc"))
    learned_run.event(Event(kind="evaluation", worker="evaluator-0", detail=evaluation(19, 0.5, first)))
    learned_run.event(Event(kind="evaluation", worker="evaluator-0", detail=evaluation(100, 0.5, last)))
    table = problem_table([one for one in learned_run.evaluations if len(one.problems) == 2])
    assert table is not None and [str(cell) for cell in table.columns[0].cells] == ["b"]
    assert problem_table(learned_run.evaluations[:1]) is None


def test_evaluations_of_the_warm_up_are_no_start_and_without_one_version_0_is(learned_run: RunView, entry: MakeEntry) -> None:
    learned_run.event(Event(kind="evaluation", worker="evaluator-0", detail=evaluation(18, 0.01)))
    learned_run.event(Event(kind="evaluation", worker="evaluator-0", detail=evaluation(60, 0.83)))
    assert [(one.version.number, one.accuracy) for one in learning_evaluations(learned_run)] == [(19, 0.21), (60, 0.83), (100, 0.91)]
    view = view_of(entry(1))
    for number in (0, 1):
        view.event(Event(kind="evaluation", worker="evaluator-0", detail=evaluation(number, 0.5 + number)))
    assert [one.version.number for one in learning_evaluations(view)] == [0, 1]


def test_the_table_shows_the_same_problems_before_and_after(learned_run: RunView) -> None:
    table = problem_table(learned_run.evaluations)
    assert table is not None
    console = Console(width=120, record=True)
    console.print(table)
    text = console.export_text()
    row = next(line for line in text.splitlines() if "2+8=" in line)
    assert row.index("7 wrong") < row.index("10 right")
    assert "version 0.19" in text and "version 0.100" in text


@pytest.mark.parametrize(
    ("problems", "shown"),
    [
        (
            [
                {"prompt": prompt, "expected": "72", "got": got, "reward": reward}
                for prompt, got, reward in (("a", "#### 72", 1.0), ("b", "72", 0.0), ("c", "#### 7", 0.25))
            ],
            ["#### 72 right", " 72 wrong", "#### 7 reward 0.25"],
        ),
        ([{"prompt": "[bold]x", "expected": "[/red]", "got": "[red]"}], ["[bold]x", "[red] wrong"]),
        ([{"prompt": "x", "expected": r"\[x\]", "got": r"\[/x\]"}], [r" \[x\] ", r" \[/x\] wrong"]),
    ],
    ids=["rewards", "markup", "formulas"],
)
def test_the_reward_says_what_is_right_and_text_is_as_it_is(learned_run: RunView, problems: list[dict[str, Any]], shown: list[str]) -> None:
    for number in (19, 100):
        learned_run.event(Event(kind="evaluation", worker="evaluator-0", detail=evaluation(number, 0.5, problems)))
    console = Console(width=120, record=True)
    console.print(problem_table([one for one in learned_run.evaluations if one.problems[0].prompt == problems[0]["prompt"]]))
    text = console.export_text()
    assert [words for words in shown if words not in text] == []


def test_the_end_names_files_in_a_folder_with_brackets(learned_run: RunView, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "[" / "red]" / "demo")
    run.path.mkdir(parents=True)
    write_summary(summary := summarize(learned_run, wall_s=1.0), run.summary_path)
    console = Console(record=True, soft_wrap=True)
    Outcome(run=run, state="finished", summary=summary).print(console)
    assert f"{run.summary_path}\n" in console.export_text()


def test_smoothing_is_centred_and_the_plot_is_a_picture(learned_run: RunView, tmp_path: Path) -> None:
    assert smooth([1.0, 2.0, 6.0, 4.0], 3) == [1.5, 3.0, 4.0, 5.0]
    assert smooth([], 3) == []
    from matplotlib.image import imread

    write_plot(learned_run, tmp_path / "plot.png")
    pixels = imread(tmp_path / "plot.png")
    assert pixels.shape[:2] == (780, 1170)
    assert len({tuple(pixel) for pixel in pixels[::10, ::10].reshape(-1, pixels.shape[2]).tolist()}) > 5


async def test_the_end_of_a_run_is_written_and_told_unless_nothing_was_trained(
    learned_run: RunView, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = bare_run(tmp_path / "demo")
    outcome = await conclude(run, learned_run, state="finished", wall_s=9.0)
    assert run.summary_path.is_file()
    assert run.plot_path.is_file()
    assert json.loads(outcome.summary_json)["steps"] == 80
    outcome.print()
    said = capsys.readouterr().out
    assert "demo finished: 80 steps in 0:09" in said and str(run.plot_path) in said
    run = bare_run(tmp_path / "empty")
    outcome = await conclude(run, RunView("demo"), state="stopped", wall_s=1.0)
    outcome.print()
    assert not run.summary_path.exists()
    assert capsys.readouterr().out.startswith("empty stopped; nothing")


def told(name: str, number: int, accuracy: float | None, **more: Any) -> Event:
    detail = {"set": name, "version": f"0.{number}", "versions": [f"0.{number}"] * 2, "accuracy": accuracy, "num": 4, "problems": []}
    return Event(kind="evaluation", worker="evaluator-0", detail=detail | more, time_s=float(number))


SUMS = {
    "samples": 32,
    "answered": 30,
    "truncated": 3,
    "pass": {"1": {"value": 0.5, "low": 0.4, "high": 0.6, "problems": 4}, "8": {"value": 0.75, "low": 0.5, "high": 1.0, "problems": 4}},
    "majority": {"8": {"value": 0.6, "low": 0.5, "high": 1.0, "problems": 4}},
    "tokens": {"mean": 12.0, "p50": 11.0, "p95": 20.0, "sum": 384.0},
    "took_s": 2.0,
}


def told_of(*events: Event) -> RunView:
    view = RunView("run", steps=10)
    view.series = Series(evaluated=Position().has)
    for event in events:
        view.event(event)
    return view


def test_an_event_is_read_with_all_that_it_says() -> None:
    found = evaluation_of(told("sums", 3, 0.5, pinned=True, interval=[0.4, 0.6], **SUMS))
    assert (found.set, found.accuracy, found.interval, found.pinned) == ("sums", 0.5, (0.4, 0.6), True)
    assert (found.passes, found.majorities) == ({1: 0.5, 8: 0.75}, {8: 0.6})
    assert (found.truncated_ratio, found.failed_ratio, found.response_len, found.took_s) == (0.1, 2 / 32, 12.0, 2.0)


@pytest.mark.parametrize("name", ["", "a b", "a" * 65, "a\n"])
def test_a_set_of_another_name_is_no_evaluation(name: str) -> None:
    with pytest.raises(SchemaError):
        evaluation_of(told(name, 3, 0.5))


def test_the_first_set_is_that_of_the_held_out_rows() -> None:
    view = told_of(told("sums", 1, 0.25, **SUMS), told("heldout", 1, 0.5), told("sums", 2, None), told("words", 2, 0.125))
    numbers = view.numbers(elapsed_s=1.0)
    assert numbers.heldout == 0.5
    assert [(one.set, one.accuracy) for one in numbers.evaluations] == [("sums", None), ("words", 0.125)]
    assert "heldout=0.500 words=0.125" in plain_line(numbers)
    assert [part.text.strip() for part in reward_line(numbers)][-3:] == ["held-out 0.500", "sums -", "words 0.125"]
    found = summarize(view, wall_s=1.0)
    assert (found.heldout_first, found.heldout_last) == (0.5, 0.5)
    ends = {name: (one.first, one.last) for name, one in found.evaluations.items()}
    assert ends == {"sums": (0.25, None), "heldout": (0.5, 0.5), "words": (0.125, 0.125)}


def test_every_set_has_its_rows_up_to_so_many() -> None:
    view = told_of(told("sums", 1, 0.25, **SUMS), told("words", 1, None))
    [row] = [row for row in view.take_rows(0.0) if row.kind == "evaluation"]
    assert (row.values["eval/sums"], row.values["eval/sums-pass@8"]) == (0.25, 0.75)
    kept = Evaluations()
    for number in range(MOST_SETS + 5):
        one = Evaluation(version=Version(0, 1), accuracy=0.5, num=1, set=f"s{number}")
        assert kept.add(one, last_cold=-1) == (number < MOST_SETS)
    assert len(kept.sets) == MOST_SETS
