from __future__ import annotations

import math

from streamrl.monitor.series import MOST_ROWS, MOST_WORKERS, Row, Series
from streamrl.monitor.view import RunView
from streamrl.schemas.control import EnginePresence
from streamrl.schemas.events import MetricReport
from streamrl.schemas.versions import Version
from streamrl.telemetry.metrics import report
from streamrl.telemetry.names import METRICS
from tests.monitor.conftest import MakeEntry, as_line


def windows(view: RunView, now_s: float) -> dict[str, Row]:
    return {row.of: row for row in view.take_rows(now_s) if row.kind == "window"}


def test_every_batch_gives_one_row_with_its_metrics(entry: MakeEntry) -> None:
    view = RunView("demo", series=Series())
    view.ledger(as_line(entry(1, source="warmup", reward=None)))
    view.ledger(as_line(entry(2, reward=0.25)))
    cold, first = view.take_rows(0.0)
    assert (cold.kind, cold.version, cold.step, cold.time_s) == ("batch", "0.1", 0, 1001.0)
    assert (first.kind, first.version, first.step, first.of) == ("batch", "0.2", 1, "")
    assert first.values["rollout/raw_reward"] == 0.25
    assert view.take_rows(0.0) == []


def test_what_an_earlier_session_has_written_gives_no_row_again(entry: MakeEntry) -> None:
    view = RunView("demo", series=Series(after=Version(0, 3)))
    for number in (1, 2, 3, 4):
        view.ledger(as_line(entry(number)))
    for number in (3, 4):
        view.ledger(as_line(entry(number, epoch=1)))
    assert [row.version for row in view.take_rows(0.0)] == ["0.4", "1.3", "1.4"]
    view.forget_ledger()
    for number in (1, 2):
        view.ledger(as_line(entry(number)))
    view.ledger(as_line(entry(2, epoch=2)))
    assert [row.version for row in view.take_rows(0.0)] == ["2.2"]


def test_reports_of_a_window_are_folded_by_reduction_for_each_worker_and_for_the_run() -> None:
    view = RunView("demo", series=Series(window_s=10.0))
    assert view.take_rows(1000.0) == []
    for worker, running, tokens, swap in (("engine-0", 2.0, 10, 0.5), ("engine-0", 4.0, 20, 0.1), ("engine-1", 9.0, 5, 0.2)):
        values = {"engine/running_requests": running, "engine/tokens_total": tokens, "engine/swap_ms": swap}
        view.metric(report(worker, values, time_s=0.0))
    assert view.take_rows(1009.9) == []
    rows = windows(view, 1010.0)
    assert rows["engine-0"].values == {"engine/running_requests": 3.0, "engine/tokens_total": 30.0, "engine/swap_ms": 0.5}
    run = rows[""].values
    assert (run["engine/running_requests"], run["engine/tokens_total"], run["engine/swap_ms"]) == (5.0, 35.0, 0.5)
    assert rows[""].time_s == 1010.0
    assert windows(view, 1020.0).keys() == {""}, "a worker that has said nothing has no row"


def test_engines_have_rows_of_their_own_and_the_run_has_the_worst(entry: MakeEntry) -> None:
    view = RunView("demo", series=Series(window_s=1.0))
    view.take_rows(0.0)
    view.ledger(as_line(entry(10, cursor=30)))
    view.stream(last=50, num_bytes=1)
    for name, number in (("engine-0-aa", 9), ("engine-1-bb", 6)):
        view.engine(name, EnginePresence(engine=name, address="", serving=Version(0, number)))
    rows = windows(view, 1.0)
    assert [rows[of].values["lag/versions_behind"] for of in ("engine-0", "engine-1", "")] == [1.0, 4.0, 4.0]
    assert rows[""].values["lag/stream_messages"] == 20.0
    assert (rows[""].version, rows[""].step) == ("0.10", 1)


def test_a_clock_that_jumps_back_begins_the_window_anew_and_loses_nothing() -> None:
    view = RunView("demo", series=Series(window_s=10.0))
    view.take_rows(5000.0)
    view.metric(report("engine-0", {"engine/tokens_total": 7}, time_s=0.0))
    assert view.take_rows(100.0) == []
    assert windows(view, 110.0)["engine-0"].values == {"engine/tokens_total": 7.0}


def test_only_declared_names_with_finite_values_reach_a_row(entry: MakeEntry) -> None:
    view = RunView("demo", series=Series(window_s=1.0))
    view.take_rows(0.0)
    made_up = {f"made/up_{number}": 1.0 for number in range(100_000)}
    view.metric(MetricReport(worker="w", mean=made_up | {"train/loss": math.nan, "engine/tokens_total": 4.0}, sum={"train/loss": 1.0}))
    view.metric(MetricReport(worker="w", mean={"train/loss": 2.0, "train/grad_norm": math.inf}))
    assert view.series is not None and len(view.series._folds["w"].values) == 1
    line = as_line(entry(1))
    line.metrics.update({"not/declared": 1.0, "train/loss": math.nan, "rollout/zero_spread": 0.5})
    view.ledger(line)
    rows = view.take_rows(1.0)
    assert {row.of: row.values for row in rows if row.of} == {"w": {"train/loss": 2.0}}
    batch = next(row for row in rows if row.kind == "batch")
    assert batch.values.keys() <= METRICS.keys() and "train/loss" not in batch.values
    assert batch.values["rollout/zero_variance"] == 0.5, "a name of an earlier version is read as what it means now"


def test_rows_that_nobody_takes_and_workers_without_end_are_bounded_and_counted(entry: MakeEntry) -> None:
    view = RunView("demo", series=Series(window_s=1.0))
    for number in range(1, MOST_ROWS + 101):
        view.ledger(as_line(entry(number)))
    assert view.series is not None and view.series.num_lost == 100
    assert view.take_rows(0.0)[0].version == "0.101"
    for number in range(MOST_WORKERS + 50):
        view.metric(report(f"producer-{number}", {"producer/tasks_total": 1}, time_s=0.0))
    rows = windows(view, 1.0)
    assert len(rows) == MOST_WORKERS + 1
    assert rows[""].values["producer/tasks_total"] == MOST_WORKERS + 50


def test_a_view_without_series_makes_no_rows(entry: MakeEntry) -> None:
    view = RunView("demo")
    view.ledger(as_line(entry(1)))
    view.metric(report("w", {"train/loss": 2.0}, time_s=0.0))
    assert view.take_rows(100.0) == []
