from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from streamrl.bus.protocol import Bus, StreamState
from streamrl.config.metrics import MetricsConfig
from streamrl.monitor import trained
from streamrl.monitor.follow import Follower, read_totals
from streamrl.monitor.metrics_file import MetricsFile, decoded, files, written_version
from streamrl.monitor.rates import Totals
from streamrl.monitor.row_writer import RowWriter
from streamrl.monitor.series import MOST_ROWS, Row, Series
from streamrl.monitor.sinks.position import Position
from streamrl.monitor.summary import summarize
from streamrl.monitor.view import RunView
from streamrl.schemas.codec import encode
from streamrl.schemas.control import EnginePresence, Grant, WorkerPresence
from streamrl.schemas.events import Event, MetricReport
from streamrl.schemas.subjects import KEY_GRANTED, Subjects
from streamrl.schemas.versions import Version
from streamrl.telemetry.metrics import report
from tests.monitor.conftest import MakeEntry, as_line, evaluation
from tests.support.processes import until


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
        assert [point.number for point in view.reward_points] == [1, 2]
        assert view.evaluations[0].accuracy == 0.5
        await until(lambda: view.numbers(elapsed_s=0.0).tasks_granted == 24 and view.tokens_made == 40)
        numbers = view.numbers(elapsed_s=0.0)
        assert [worker.worker for worker in numbers.workers] == ["engine-0"]
        assert numbers.swaps == 2
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


async def test_the_end_of_an_earlier_session_is_not_the_end_of_this_one(bus: Bus, run_id: str) -> None:
    subject, finished = Subjects(run_id).events("finished"), encode(Event(kind="finished", worker="trainer-0"))
    await bus.publish(subject, finished)
    view = RunView(run_id)
    async with Follower(bus, view) as follower:
        await follower.catch_up()
        assert not view.finished
        await bus.publish(subject, finished)
        await follower.catch_up()
        assert view.finished


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


async def test_totals_are_carried_to_the_next_session(bus: Bus, run_id: str) -> None:
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


async def test_reading_history_does_not_count_as_training_speed(bus: Bus, run_id: str, entry: MakeEntry) -> None:
    for number in range(1, 6):
        await bus.publish(Subjects(run_id).ledger("main"), encode(entry(number, tokens=1_000_000)), id=f"0.{number}")
    view = RunView(run_id)
    async with Follower(bus, view) as follower:
        await follower.catch_up()
        await asyncio.sleep(2.2)  # two polls
    assert view.tokens_trained == 5_000_000
    assert view.numbers(elapsed_s=0.0).trained_per_s == 0.0


async def test_catching_up_gives_up_in_the_end(bus: Bus, run_id: str, entry: MakeEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    view = RunView(run_id)
    async with Follower(bus, view) as follower:
        state = bus.state

        async def further(stream: str) -> StreamState:
            found = await state(stream)
            return replace(found, last=found.last + 1)  # a message that never comes

        monkeypatch.setattr(bus, "state", further)
        await asyncio.wait_for(follower.catch_up(within_s=0.05), 20)


async def test_an_epoch_that_forks_far_back_is_read_from_the_ledger_again(
    bus: Bus, run_id: str, entry: MakeEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
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
