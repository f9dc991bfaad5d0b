from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from streamrl.monitor.arrivals import MOST_MARKS, Arrivals
from streamrl.monitor.metrics_file import decoded, encoded
from streamrl.monitor.series import MOST_ROWS, MOST_WORKERS, Row, Series
from streamrl.monitor.view import RunView
from streamrl.schemas.control import EnginePresence, Grant
from streamrl.schemas.events import Event, MetricReport
from streamrl.schemas.ledger import Drop
from streamrl.schemas.versions import Version
from streamrl.telemetry.metrics import report
from streamrl.telemetry.names import METRICS
from tests.monitor.conftest import MakeEntry, as_line, evaluation, kept


def windows(view: RunView, now_s: float) -> dict[str, Row]:
    return {row.of: row for row in view.take_rows(now_s) if row.kind == "window"}


def test_every_batch_gives_one_row_unless_an_earlier_session_did(entry: MakeEntry) -> None:
    view = RunView("demo", series=Series())
    view.ledger(as_line(entry(1, source="warmup", reward=None)))
    view.ledger(as_line(entry(2, reward=0.25)))
    cold, first = view.take_rows(0.0)
    assert (cold.kind, cold.version, cold.step, cold.time_s) == ("batch", "0.1", 0, 1001.0)
    assert (first.kind, first.version, first.step, first.of) == ("batch", "0.2", 1, "")
    assert first.values["rollout/raw_reward"] == 0.25
    assert view.take_rows(0.0) == []
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
    view = RunView("demo")
    view.ledger(as_line(entry(1)))
    view.metric(report("w", {"train/loss": 2.0}, time_s=0.0))
    assert view.take_rows(100.0) == []


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


def test_a_clock_that_jumps_back_loses_nothing_and_quotients_are_of_a_windows_amounts() -> None:
    view = RunView("demo", series=Series(window_s=10.0))
    view.take_rows(5000.0)
    view.metric(report("engine-0", {"engine/tokens_total": 7}, time_s=0.0))
    assert view.take_rows(100.0) == []
    assert windows(view, 110.0)["engine-0"].values == {"engine/tokens_total": 7.0}
    view = RunView("demo", series=Series(window_s=1.0))
    view.take_rows(0.0)
    passes = {"engine/verify_passes_total": 10, "engine/drafted_tokens_total": 40, "engine/accepted_drafts_total": 30}
    view.metric(report("engine-0", {**passes, "engine/prompt_tokens_total": 0, "engine/cached_tokens_total": 0}, time_s=0.0))
    values = windows(view, 1.0)["engine-0"].values
    assert (values["rollout/spec_accept_rate"], values["rollout/spec_accept_length"]) == (0.75, 4.0)
    assert "rollout/prefix_cache_hit_rate" not in values


def test_only_declared_names_with_finite_values_reach_a_row(entry: MakeEntry) -> None:
    view = RunView("demo", series=Series(window_s=1.0))
    view.take_rows(0.0)
    made_up = {f"made/up_{number}": 1.0 for number in range(100_000)}
    view.metric(MetricReport(worker="w", mean=made_up | {"train/loss": math.nan, "engine/tokens_total": 4.0}, sum={"train/loss": 1.0}))
    view.metric(MetricReport(worker="w", mean={"train/loss": 2.0, "train/grad_norm": math.inf}))
    assert view.series is not None and kept(view.series) < 5_000
    line = as_line(entry(1))
    line.metrics.update({"not/declared": 1.0, "train/loss": math.nan, "rollout/zero_spread": 0.5})
    view.ledger(line)
    rows = view.take_rows(1.0)
    assert {row.of: row.values for row in rows if row.of} == {"w": {"train/loss": 2.0}}
    batch = next(row for row in rows if row.kind == "batch")
    assert batch.values.keys() <= METRICS.keys() and "train/loss" not in batch.values
    assert batch.values["rollout/zero_variance"] == 0.5, "a name of an earlier version is read as what it means now"


@pytest.mark.parametrize("time_s", [math.nan, math.inf, -math.inf])
def test_a_time_that_is_none_leaves_a_row_that_can_be_read(entry: MakeEntry, time_s: float) -> None:
    view = RunView("demo", series=Series())
    view.ledger(as_line(replace(entry(1), time_s=time_s)))
    view.event(Event(kind="evaluation", worker="e", detail=evaluation(1, 0.75), time_s=time_s))
    rows = view.take_rows(0.0)
    assert [row.time_s for row in rows] == [0.0, 0.0]
    assert [decoded(encoded(row)) for row in rows] == rows


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
    for name in ("\x1b[2J", "", "x" * 65, "a b"):
        view.metric(report(name, {"producer/tasks_total": 1}, time_s=0.0))
    rows = windows(view, 2.0)
    assert {of: row.values["producer/tasks_total"] for of, row in rows.items()} == {"": 4.0}, "names that are none have no rows"


def test_tokens_are_counted_where_they_are_sampled_and_where_they_are_trained(entry: MakeEntry) -> None:
    view = RunView("demo", series=Series(window_s=1.0))
    view.take_rows(0.0)
    for name, tokens, role in (
        ("engine-0-aa", 40, "rollout"),
        ("engine-0-aa", 100, "rollout"),
        ("engine-1-bb", 7, "rollout"),
        ("engine-2-cc", 9, "evaluation"),
    ):
        view.engine(name, EnginePresence(engine=name, address="", serving=Version(0, 1), tokens_total=tokens, role=role))
    cold, first = as_line(entry(1, source="warmup")), as_line(entry(2))
    for line in (cold, first):
        line.metrics["rollout/tokens_trained"] = 60.0
        view.ledger(line)
    made = view.take_rows(1.0)
    rows = {row.of: row.values for row in made if row.kind == "window"}
    assert [rows[of]["tokens/sampled_total"] for of in ("engine-0", "engine-1", "")] == [100.0, 7.0, 107.0]
    trained = [row.values.get("tokens/trained_total") for row in made if row.kind == "batch"]
    assert trained == [None, 60.0], "of demonstrations none was sampled"


def test_trained_tokens_and_drops_stand_in_the_rows_of_their_batches(entry: MakeEntry) -> None:
    view = RunView("demo", series=Series())
    drops = [Drop(sequence=1, task=1, rollouts=(0, 1), reason=reason) for reason in ("stale", "stale", "my own", "another")]
    view.ledger(as_line(entry(1, drops=drops)))
    (row,) = view.take_rows(1.0)
    counted = {name: value for name, value in row.values.items() if name.startswith("rollouts/")}
    assert counted == {"rollouts/dropped_total/stale": 4.0, "rollouts/dropped_total/other": 4.0}
    view = RunView("demo", series=Series(window_s=1.0))
    view.take_rows(0.0)
    view.live = False
    for number in (1, 2):
        line = as_line(entry(number))
        line.metrics.update({"rollout/tokens_trained": 60.0, "perf/wait_s": 0.25, "perf/step_s": 0.5, "rollout/truncated_ratio": 0.125})
        view.ledger(line)
        view.live = True
    first, second, window = view.take_rows(1.0)
    assert [row.values.get("tokens/trained_total") for row in (first, second, window)] == [60.0, 60.0, None]
    assert (first.version, second.version) == ("0.1", "0.2")
    assert [first.values[f"perf/{name}"] for name in ("train_wait_time", "train_time", "step_time")] == [0.25, 0.5, 0.75]
    assert first.values["perf/wait_time_ratio"] == pytest.approx(1 / 3)
    assert first.values["rollout/truncated"] == 0.125


def test_no_window_ends_with_what_half_a_ledger_says(entry: MakeEntry) -> None:
    view = RunView("demo", series=Series(window_s=1.0))
    view.take_rows(0.0)
    view.stream(last=50, num_bytes=1)
    view.metric(report("engine-0", {"engine/tokens_total": 7}, time_s=0.0))
    view.live = False
    for again in (False, True):
        view.grant(Grant(granted=24, version=0, retired=20))
        if again:
            view.forget_ledger()
        view.ledger(as_line(entry(1)))
        assert (windows(view, 5.0), windows(view, 5.5), view.take_rows(6.0, end=True)) == ({}, {}, []) and view.num_barren_tasks == 0
        view.ledger(as_line(entry(20)))
        view.live = True
        assert windows(view, 7.0)[""].values["lag/stream_messages"] == 10.0 and view.num_barren_tasks == 0
        view.grant(Grant(granted=24, version=0, retired=23))
        assert view.num_barren_tasks == 3


def test_commits_of_engines_say_how_long_a_version_took(entry: MakeEntry) -> None:
    view = RunView("demo", series=Series(window_s=1.0))
    view.take_rows(0.0)
    for worker, lag_s in (("engine-0", 0.25), ("engine-0", 0.75), ("engine-1", 2.0), ("engine-1", "soon"), ("engine-1", math.nan)):
        view.event(Event(kind="weights", worker=worker, detail={"lag_s": lag_s}))
    view.event(Event(kind="weights", worker="engine-0", detail={"lag_s": 99.0}), live=False)
    view.event(Event(kind="weights", worker="engine-0", detail={"error": "not taken"}))
    rows = windows(view, 1.0)
    assert [rows[of].values["lag/publish_to_commit_s"] for of in ("engine-0", "engine-1", "")] == [0.5, 2.0, 1.0]
    assert rows[""].values["lag/publish_to_commit_max_s"] == 2.0


def test_the_age_of_the_stream_is_that_of_its_oldest_message_and_arrivals_are_bounded(entry: MakeEntry) -> None:
    view = RunView("demo", series=Series(window_s=1.0))
    for now_s, last in ((10.0, 2), (11.0, 2), (12.0, 6), (15.0, 9)):
        view.stream(last=last, num_bytes=1)
        view.mark(now_s)
    view.take_rows(0.0)
    ages = []
    for cursor in (1, 2, 5, 8, 9):
        view.ledger(as_line(entry(cursor, cursor=cursor)))
        ages.append(windows(view, 2.0 * cursor)[""].values["lag/stream_s"])
    assert ages == [5.0, 3.0, 3.0, 0.0, 0.0]
    arrivals = Arrivals()
    for second in range(100_000):
        arrivals.mark(float(second), second + 1)
    assert kept(arrivals) < 4 * MOST_MARKS
    assert arrivals.age_s(0) == 99_999.0
    ages = [arrivals.age_s(cursor) for cursor in range(1000, 100_001, 1000)]
    assert ages == sorted(ages, reverse=True) and ages[-1] == 0.0


def test_evaluations_have_rows_at_the_steps_of_their_versions(entry: MakeEntry) -> None:
    view = RunView("demo", series=Series())
    one = Event(kind="evaluation", worker="e", detail=evaluation(3, 0.75), time_s=7.0)
    view.event(one, live=False)
    view.event(one)
    (row,) = view.take_rows(0.0)
    assert (row.kind, row.version, row.time_s, row.values) == ("evaluation", "0.3", 7.0, {"eval/heldout": 0.75})
    view = RunView("demo", series=Series())
    for number in range(1, 11):
        view.ledger(as_line(entry(number, source="warmup" if number <= 3 else "main")))
    for number in (7, 3, 0, 10, 12):
        view.event(Event(kind="evaluation", worker="e", detail=evaluation(number, 0.75)))
    assert [row.step for row in view.take_rows(0.0) if row.kind == "evaluation"] == [4, 0, 0, 7, 7]
