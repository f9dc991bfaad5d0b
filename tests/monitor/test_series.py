"""Numbers of a run as time goes by: its series, and what was trained."""

import itertools
import math
import random
import statistics
from collections import Counter

import pytest
from msgspec.structs import replace

from streamrl.core.lengths import distance, histogram
from streamrl.monitor.arrivals import MOST_MARKS, Arrivals
from streamrl.monitor.evaluations import MOST_EVALUATIONS, Evaluations
from streamrl.monitor.failures import MOST_STONES, Failures
from streamrl.monitor.goodput import Backlog
from streamrl.monitor.lengths import FEWEST, MOST_DECIDED, Lengths, distance_text, side_by_side
from streamrl.monitor.metrics_file import decoded, encoded
from streamrl.monitor.numbers import Evaluation, Point
from streamrl.monitor.rates import Growing, Rate
from streamrl.monitor.series import MOST_ROWS, MOST_WORKERS, RUN, Row, Series
from streamrl.monitor.shares import FORGOTTEN_AFTER_S, named
from streamrl.monitor.trained import MOST_STRETCHES, TAIL, Stretches, Trained, stretched_rewards
from streamrl.monitor.view import RunView
from streamrl.schemas.control import EVALUATION_ROLE, ROLLOUT_ROLE, EnginePresence, Grant, WorkerPresence
from streamrl.schemas.events import Event, MetricReport
from streamrl.schemas.ledger import Drop
from streamrl.schemas.samples import Tombstone
from streamrl.schemas.versions import Version
from streamrl.telemetry.metrics import report
from streamrl.telemetry.names import METRICS
from streamrl.telemetry.states import STATES
from tests.monitor.conftest import MakeEntry, as_line, evaluation, kept, view_of, windowed


def windows(view: RunView, now_s: float) -> dict[str, Row]:
    return {row.of: row for row in view.take_rows(now_s) if row.kind == "window"}


def test_every_batch_gives_one_row_unless_an_earlier_session_did(entry: MakeEntry) -> None:
    view = view_of(entry(1, source="warmup", reward=None), entry(2, reward=0.25), series=Series())
    cold, first = view.take_rows(0.0)
    assert (cold.kind, cold.version, cold.step, cold.time_s) == ("batch", "0.1", 0, 1001.0)
    assert (first.kind, first.version, first.step, first.of) == ("batch", "0.2", 1, "")
    assert first.values["rollout/raw_reward"] == 0.25
    assert view.take_rows(0.0) == []
    view = view_of(*(entry(number) for number in (1, 2, 3, 4)), series=Series(after=Version(0, 3)))
    for number in (3, 4):
        view.ledger(as_line(entry(number, epoch=1)))
    assert [row.version for row in view.take_rows(0.0)] == ["0.4", "1.3", "1.4"]
    view.forget_ledger()
    for number in (1, 2):
        view.ledger(as_line(entry(number)))
    view.ledger(as_line(entry(2, epoch=2)))
    assert [row.version for row in view.take_rows(0.0)] == ["2.2"]
    view = view_of(entry(1))
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
    view = windowed()
    view.ledger(as_line(entry(10, cursor=30)))
    view.stream(last=50, num_bytes=1)
    for name, number in (("engine-0-aa", 9), ("engine-1-bb", 6)):
        view.engine(name, EnginePresence(engine=name, address="", serving=Version(0, number)))
    rows = windows(view, 1.0)
    assert [rows[of].values["lag/versions_behind"] for of in ("engine-0", "engine-1", "")] == [1.0, 4.0, 4.0]
    assert (rows[""].values["lag/stream_messages"], rows[""].version, rows[""].step) == (20.0, "0.10", 1)


def test_a_clock_that_jumps_back_loses_nothing_and_quotients_are_of_a_windows_amounts() -> None:
    view = RunView("demo", series=Series(window_s=10.0))
    view.take_rows(5000.0)
    view.metric(report("engine-0", {"engine/tokens_total": 7}, time_s=0.0))
    assert view.take_rows(100.0) == []
    assert windows(view, 110.0)["engine-0"].values == {"engine/tokens_total": 7.0}
    view = windowed()
    passes = {"engine/verify_passes_total": 10, "engine/drafted_tokens_total": 40, "engine/accepted_drafts_total": 30}
    view.metric(report("engine-0", {**passes, "engine/prompt_tokens_total": 0, "engine/cached_tokens_total": 0}, time_s=0.0))
    values = windows(view, 1.0)["engine-0"].values
    assert (values["rollout/spec_accept_rate"], values["rollout/spec_accept_length"]) == (0.75, 4.0)
    assert "rollout/prefix_cache_hit_rate" not in values


def test_only_declared_names_with_finite_values_reach_a_row(entry: MakeEntry) -> None:
    view = windowed()
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
    view = view_of(replace(entry(1), time_s=time_s), series=Series())
    view.event(Event(kind="evaluation", worker="e", detail=evaluation(1, 0.75), time_s=time_s))
    rows = view.take_rows(0.0)
    assert ([row.time_s for row in rows], [decoded(encoded(row)) for row in rows]) == ([0.0, 0.0], rows)


def test_rows_that_nobody_takes_and_workers_without_end_are_bounded_and_counted(entry: MakeEntry) -> None:
    view = view_of(*(entry(number) for number in range(1, MOST_ROWS + 101)), series=Series(window_s=1.0))
    assert view.series is not None and view.series.num_lost == 100
    assert view.take_rows(0.0)[0].version == "0.101"
    for number in range(MOST_WORKERS + 50):
        view.metric(report(f"producer-{number}", {"producer/tasks_total": 1}, time_s=0.0))
    rows = windows(view, 1.0)
    assert (len(rows), rows[""].values["producer/tasks_total"]) == (MOST_WORKERS + 1, MOST_WORKERS + 50)
    for name in ("\x1b[2J", "", "x" * 65, "a b"):
        view.metric(report(name, {"producer/tasks_total": 1}, time_s=0.0))
    rows = windows(view, 2.0)
    assert {of: row.values["producer/tasks_total"] for of, row in rows.items()} == {"": 4.0}, "names that are none have no rows"


def test_tokens_are_counted_where_they_are_sampled_and_where_they_are_trained(entry: MakeEntry) -> None:
    view = windowed()
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
    view.ledger(as_line(entry(2, drops=drops[:1])))
    stale, so_far = "rollouts/dropped_total/stale", "rollouts/dropped_so_far"
    counted = [{name: value for name, value in row.values.items() if name.startswith("rollouts/")} for row in view.take_rows(1.0)]
    assert counted == [{stale: 4.0, "rollouts/dropped_total/other": 4.0, so_far: 8.0}, {stale: 2.0, so_far: 10.0}]
    forked = as_line(entry(2, epoch=1, drops=drops))
    view.ledger(forked)
    (row,) = view.take_rows(2.0)
    assert row.values[so_far] == 16.0, "what a fork has made void is not in it"
    view = windowed()
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
    assert (first.values["perf/wait_time_ratio"], first.values["rollout/truncated"]) == (pytest.approx(1 / 3), 0.125)


def test_no_window_ends_with_what_half_a_ledger_says(entry: MakeEntry) -> None:
    view = windowed()
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
    view = windowed()
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
    view = view_of(*(entry(number, source="warmup" if number <= 3 else "main") for number in range(1, 11)), series=Series())
    for number in (7, 3, 0, 10, 12):
        view.event(Event(kind="evaluation", worker="e", detail=evaluation(number, 0.75)))
    assert [row.step for row in view.take_rows(0.0) if row.kind == "evaluation"] == [4, 0, 0, 7, 7]


LONG = TAIL + 4 * MOST_STRETCHES


def fed(entry: MakeEntry, count: int, *, warmup: int = 0) -> Trained:
    trained = Trained()
    for number in range(1, count + 1):
        drop = Drop(sequence=number, task=number, rollouts=(0, 1), reason="stale")
        cold = number <= warmup
        source, reward = ("warmup", None) if cold else ("main", number / 1e4)
        made = entry(number, source=source, reward=reward, ages=(number % 5,), drops=(drop,))
        assert trained.add(as_line(made))
    return trained


def test_what_is_kept_does_not_grow_with_the_run_and_no_total_is_lost(entry: MakeEntry) -> None:
    kept: list[int] = []
    for count in (LONG, 4 * LONG):
        trained = fed(entry, count, warmup=100)
        kept.append(trained.num_kept)
        assert (trained.num_batches, trained.num_reinforced, trained.num_tokens) == (count, count - 100, 100 * count)
        assert trained.drops == {"stale": 2 * count}
        assert (trained.ages, trained.last_cold) == (Counter(number % 5 for number in range(101, count + 1)), 100)
        assert trained.first_rewards(20) == [number / 1e4 for number in range(101, 121)]
        assert trained.last_rewards(20) == [number / 1e4 for number in range(count - 19, count + 1)]
        points = trained.points(warmup=False)
        assert sum(point.num_batches for point in points) == count - 100
        assert sum(point.num_tokens for point in points) == 100 * (count - 100)
        assert [point.number for point in points] == sorted({point.number for point in points})
        spark = stretched_rewards(points, 40)
        assert 30 <= len(spark) <= 40
        assert list(spark) == sorted(spark)
        assert abs(statistics.fmean(spark[:-1]) * 1e4 - count / 2) < 0.05 * count
    assert max(kept) <= TAIL + 2 * MOST_STRETCHES + 10


def test_a_fork_within_the_tail_leaves_a_straight_run_and_one_behind_it_is_refused(entry: MakeEntry) -> None:
    forked, straight = fed(entry, LONG), fed(entry, LONG - 700)
    for trained in (forked, straight):
        for number in range(LONG - 699, LONG + 1):
            assert trained.add(as_line(entry(number, epoch=1, reward=0.5, ages=(1, 2))))
    assert (forked.ages, forked.drops, forked.num_tokens) == (straight.ages, straight.drops, straight.num_tokens)
    assert (forked.num_batches, forked.num_reinforced) == (straight.num_batches, straight.num_reinforced)
    assert forked.newest == straight.newest
    total, wanted = ([point.reward * point.num_batches for point in one.points(warmup=False) if point.reward] for one in (forked, straight))
    assert abs(sum(total) - sum(wanted)) < 1e-6
    trained = fed(entry, LONG)
    before = (trained.num_batches, trained.newest, trained.points(warmup=False))
    assert not trained.add(as_line(entry(LONG - TAIL, epoch=1)))
    assert (trained.num_batches, trained.newest, trained.points(warmup=False)) == before
    assert trained.add(as_line(entry(LONG - TAIL + 1, epoch=1)))
    assert trained.num_batches == LONG - TAIL + 1


def point(number: int, reward: float | None) -> Point:
    low, high = number % 3, 3 + number % 7
    return Point(number=number, warmup=False, warm=True, reward=reward, age_min=low, age_mean=1.0, age_max=high, num_tokens=1, time_s=0.0)


def test_stretches_keep_means_extremes_and_sums() -> None:
    stretches = Stretches(8)
    chance = random.Random(3)
    rewards = [chance.random() for _ in range(1000)]
    for number, reward in enumerate(rewards, 1):
        stretches.add(point(number, reward))
    assert 4 < len(stretches.points) <= 8
    assert [one.num_batches for one in stretches.points[:-1]] == [128] * (len(stretches.points) - 1)
    first = stretches.points[0]
    assert (first.number, first.age_min, first.age_max, first.num_tokens) == (128, 0, 9, 128)
    assert first.reward is not None and abs(first.reward - statistics.fmean(rewards[:128])) < 1e-9
    without = Stretches(2)
    for number, reward in enumerate((None, 0.5, None, None), 1):
        without.add(point(number, reward))
    assert [one.reward for one in without.points] == [0.5, None]


def test_stretched_rewards_of_few_batches_are_their_rewards() -> None:
    assert stretched_rewards([], 4) == ()
    assert stretched_rewards([point(1, 0.5), point(2, None), point(3, 0.25)], 4) == (0.5, 0.25)
    assert stretched_rewards([point(number, float(number)) for number in range(10)], 4) == (1.0, 4.0, 7.0, 9.0)


def test_of_many_evaluations_the_first_the_first_after_the_warmup_and_the_newest_stay() -> None:
    evaluations = Evaluations()
    for number in range(10 * MOST_EVALUATIONS):
        evaluations.add(Evaluation(version=Version(0, number), accuracy=number / 1e4, num=1), last_cold=min(number, 30))
    numbers = [one.version.number for one in evaluations.ordered]
    assert len(numbers) <= MOST_EVALUATIONS
    assert {0, 31} <= set(numbers)
    assert numbers[-8:] == list(range(10 * MOST_EVALUATIONS - 8, 10 * MOST_EVALUATIONS))
    assert evaluations.newest is not None and evaluations.newest.version.number == 10 * MOST_EVALUATIONS - 1


def test_what_comes_and_goes_without_end_is_counted_all_and_kept_in_part() -> None:
    failures, counts = Failures(), list[int]()
    for sequence in range(1, MOST_STONES + 2001):
        failures.add(sequence, Tombstone(task=sequence, reason="failed", detail="x" * 5000), after=0)
        if sequence in (MOST_STONES, MOST_STONES + 2000):
            counts.append(kept(failures))
    assert (failures.reasons, failures.num_tasks) == ({"failed": MOST_STONES + 2000}, MOST_STONES + 2000)
    assert counts[1] < 1.01 * counts[0]
    failures.trained(MOST_STONES + 1990)
    assert (failures.reasons, failures.num_tasks) == ({"failed": 10}, 10)
    growing, counts = Growing(late=False), list[int]()
    for number in range(10_000):
        growing.report(f"engine-{number}", 3)
        if number in (4999, 9999):
            counts.append(kept(growing))
    assert growing.total == 30_000
    assert counts[1] <= 1.01 * counts[0] < 20_000


def test_a_view_of_a_run_nearly_twice_as_long_keeps_no_more(entry: MakeEntry) -> None:
    counts: list[int] = []
    for length in (TAIL + 4 * MOST_STRETCHES, TAIL + 8 * MOST_STRETCHES):
        view = RunView("demo", series=Series(window_s=1.0))
        for number in range(1, length + 1):
            drop = Drop(sequence=number, task=number, rollouts=(0, 1), reason=f"word {number}")
            view.ledger(as_line(entry(number, ages=(number % 5,), drops=(drop,))))
            view.tombstone(2 * number, Tombstone(task=number, reason="failed"))
            view.event(Event(kind="evaluation", worker="e", detail=evaluation(number, 0.5, [{"prompt": f"{number}"}])))
            view.event(Event(kind="notice", worker="e", detail={"text": f"{number}"}))
            view.event(Event(kind="stalled", worker=f"producer-{number}"))
            view.event(Event(kind="weights", worker=f"engine-{number}", detail={"lag_s": 0.5}))
            view.metric(report(f"producer-{number}", {"producer/in_flight_tasks": 1.0}, time_s=0.0))
            name = f"engine-{number}-ab"
            for version in (number - 1, number):
                view.engine(name, EnginePresence(engine=name, address="", serving=Version(0, version), tokens_total=number))
            view.engine(name, None)
            view.worker(f"producer-{number}", WorkerPresence(worker=f"producer-{number}", kind="producer"))
            view.worker(f"producer-{number}", None)
            view.stream(last=3 * number, num_bytes=1)
            view.mark(float(number))
            view.take_rows(float(number))
            if number % 1000 == 0:
                view.numbers(elapsed_s=1.0)
        counts.append(kept(view))
    assert counts[1] < 1.1 * counts[0], counts


def test_ended_tasks_give_their_batch_once_and_no_rate_is_negative(entry: MakeEntry) -> None:
    view = RunView("demo")
    for number, epoch in ((1, 0), (2, 0), (3, 0), (2, 1)):
        view.ledger(as_line(entry(number, epoch=epoch)))
    at_three = as_line(entry(3)).retired
    assert at_three > as_line(entry(2)).retired
    view.grant(Grant(granted=at_three + 8, version=3, retired=at_three + 2))
    assert view.num_barren_tasks == 2
    rate = Rate()
    seen = []
    for now_s, total in ((0.0, 100), (1.0, 300), (2.0, 50), (3.0, 60)):
        rate.mark(now_s, total)
        seen.append(rate.per_s)
    assert min(seen) == 0.0 and seen[-1] == 10.0


START_S = 10_000.0


class Reader:
    """Feeds a series second by second, and keeps the window rows."""

    def __init__(self) -> None:
        self.series = Series(window_s=10.0)
        self.now_s = START_S
        self.series.due(self.now_s)
        self.rows: list[dict[str, dict[str, float]]] = []

    def hear(self, worker: str, values: dict[str, float], *, time_s: float | None = None, left: bool = False) -> None:
        self.series.report(report(worker, values, time_s=self.now_s if time_s is None else time_s, left=left))

    def go(self, to_s: float) -> None:
        self.now_s = to_s
        if self.series.due(to_s):
            self.series.close(to_s, {}, step=0)
            self.rows.append({row.of: row.values for row in self.series.take()})


def trainer(**states: float) -> dict[str, float]:
    return {f"trainer/{state}_s": amount for state, amount in states.items()}


def total(values: dict[str, float], kind: str) -> float:
    return sum(amount for name, amount in values.items() if name.startswith(f"{kind}/share/"))


def down(values: dict[str, float], kind: str = "trainer") -> float:
    return values[f"{kind}/share/down"]


def test_shares_of_a_window_are_its_seconds_over_their_sum() -> None:
    reader = Reader()
    for second in range(2, 12, 2):
        reader.go(START_S + second)
        reader.hear("trainer-0", trainer(compute=0.5, wait_samples=1.5))
        reader.hear("engine-0", {"engine/decode_s": 1.0, "engine/idle_s": 1.0, "engine/saturated_s": 0.5})
        reader.hear("engine-1", {"engine/decode_s": 2.0})
    reader.go(START_S + 20)
    values = reader.rows[-1]["trainer-0"] if len(reader.rows) > 1 else reader.rows[0]["trainer-0"]
    assert (values["trainer/share/compute"], values["trainer/share/wait_samples"], values["trainer/share/publish"]) == (0.25, 0.75, 0.0)
    run = reader.rows[0][""]
    assert run["starvation/trainer"] == 0.75
    assert (run["starvation/engines_idle"], run["starvation/engines_saturated"]) == (0.25, 0.125)
    assert reader.rows[0]["engine-1"]["starvation/engines_idle"] == 0.0
    assert "starvation/producers" not in run


def test_a_worker_that_was_killed_is_down_until_its_successor_begins() -> None:
    """Killed at second 13, last heard at 12; a new process from 33 on, which says so at 35 and 37 and ..."""
    reader = Reader()
    for second in range(1, 61):
        reader.go(START_S + second)
        if second % 2 == 0 and second <= 12:
            reader.hear("trainer-0", trainer(compute=2.0))
        if second % 2 and second >= 35:
            reader.hear("trainer-0", trainer(setup=2.0))
        reader.hear("engine-0", {"engine/decode_s": 1.0})
    rows = [row["trainer-0"] for row in reader.rows]
    assert [down(values) for values in rows] == pytest.approx([0.0, 0.8, 1.0, 0.3, 0.0, 0.0], abs=0.15)
    assert [total(values, "trainer") for values in rows] == pytest.approx([1.0] * 6)
    assert sum(values.get("trainer/down_s", 0.0) for values in rows) == pytest.approx(21.0), "from its last word to its successor's start"
    assert sum(values.get(name, 0.0) for values in rows for name in named("trainer")) == pytest.approx(59.0)


def test_a_short_or_late_report_counts_no_second_twice() -> None:
    reader = Reader()
    for second, values in ((2, trainer(compute=2.0)), (4, trainer(compute=2.0)), (8, trainer(setup=1.0)), (10, trainer(compute=2.0))):
        reader.go(START_S + second)
        if second == 10:
            break
        reader.hear("trainer-0", values)
    assert reader.rows[0]["trainer-0"]["trainer/down_s"] == pytest.approx(3.0)
    reader = Reader()
    for second in range(1, 31):
        reader.go(START_S + second)
        reader.hear("engine-0", {"engine/decode_s": 1.0})
        if second in (1, 2, 3):
            reader.hear("trainer-0", trainer(compute=1.0))
        if second == 25:
            reader.hear("trainer-0", trainer(compute=22.0))
    spent = sum(row["trainer-0"].get(name, 0.0) for row in reader.rows for name in named("trainer"))
    assert spent == pytest.approx(25.0 + 5.0 - 5.0, abs=0.2)
    assert [total(row["trainer-0"], "trainer") for row in reader.rows] == pytest.approx([1.0] * 3)


def test_a_reader_that_is_cut_off_calls_nobody_down() -> None:
    reader = Reader()
    for second in range(1, 6):
        reader.go(START_S + second)
        reader.hear("trainer-0", trainer(compute=1.0))
    for second in range(6, 31):
        reader.go(START_S + second)
    assert all("trainer-0" not in row for row in reader.rows[1:])
    reader.hear("trainer-0", trainer(wait_bus=25.0))
    reader.go(START_S + 40)
    assert reader.rows[-1]["trainer-0"]["trainer/share/wait_bus"] == 1.0


def test_one_that_has_left_is_forgotten_and_not_down() -> None:
    reader = Reader()
    reader.go(START_S + 1)
    reader.hear("producer-3", {"producer/slot_generate_s": 8.0, "producer/slots": 8.0})
    for second in itertools.count(2, 2):
        reader.go(START_S + second)
        reader.hear("engine-0", {"engine/decode_s": 2.0})
        if second > FORGOTTEN_AFTER_S + 40:
            break
    assert "producer-3" not in reader.rows[-1] and "producer-3" in reader.rows[5]
    assert reader.rows[5]["producer-3"]["producer/slot_down_s"] == pytest.approx(80.0), "of all its slots"
    reader = Reader()
    for second in range(2, 62, 2):
        reader.go(START_S + second)
        reader.hear("engine-0", {"engine/decode_s": 2.0})
        if second in (2, 4, 52, 54):
            reader.hear("engine-1", {"engine/decode_s": 2.0}, left=second == 4)
    assert "engine-1" in reader.rows[0] and "engine-1" in reader.rows[-1]
    assert all("engine-1" not in row for row in reader.rows[1:4])
    assert [down(row[""], "engine") for row in reader.rows[:5]] == [0.0] * 5


@pytest.mark.parametrize("step_s", [-3600.0, 3600.0])
def test_a_clock_that_is_set_makes_no_time(step_s: float) -> None:
    reader = Reader()
    for second in range(1, 41):
        reader.go(START_S + second)
        reader.hear("trainer-0", trainer(compute=1.0), time_s=reader.now_s + (step_s if second > 15 else 0.0))
    for row in reader.rows:
        spent = sum(row["trainer-0"].get(name, 0.0) for name in named("trainer"))
        assert 8.0 <= spent <= 18.0
        assert row["trainer-0"]["trainer/share/compute"] > 0.5


def test_shares_are_of_all_states_and_a_ledger_that_is_read_anew_counts_once(entry: MakeEntry) -> None:
    reader = Reader()
    reader.hear("producer-0", {"producer/slot_wait_credit_s": 4.0, "producer/slots": 2.0})
    reader.go(START_S + 10)
    found = {name.rpartition("/")[2] for name in reader.rows[0][""] if name.startswith("producer/share/")}
    assert found == {*STATES["producer"], "down"}
    assert reader.rows[0][""]["starvation/producers"] == 1.0
    view = RunView("demo")
    view.metric(MetricReport(worker="p", histograms={"lengths/cut": LONG_ONES}))
    for _ in range(2):
        view.ledger(as_line(replace(entry(1), histograms={"lengths/trained": SHORT_ONES})))
        view.forget_ledger()
    assert view.lengths.counts == {"lengths/cut": LONG_ONES}


def engine(name: str, tokens: int, role: str = ROLLOUT_ROLE) -> EnginePresence:
    return EnginePresence(engine=name, address="", serving=Version(0, 1), tokens_total=tokens, role=role)


def test_what_is_sampled_is_open_until_said_and_unknown_to_who_joins() -> None:
    view = windowed()

    def still_open(now_s: float) -> float:
        (row,) = [row for row in view.take_rows(now_s) if row.of == RUN]
        return row.values["tokens/open"]

    view.engine("engine-0-aa", engine("engine-0-aa", 100))
    view.engine("engine-1-bb", engine("engine-1-bb", 70, EVALUATION_ROLE))
    assert still_open(1.0) == 100.0
    ended = {"tokens/published_total": 28.0, "tokens/greedy_total": 12.0, "tokens/cut_total": 10.0}
    view.metric(report("producer-0", ended, time_s=0.0))
    view.metric(report("engine-0", {"tokens/cut_total": 5.0, "tokens/sampled_total": 20.0}, time_s=0.0))
    view.metric(report("evaluator-0", {"tokens/evaluated_total": 15.0}, time_s=0.0))
    assert still_open(2.0) == 50.0
    view.engine("engine-0-cc", engine("engine-0-cc", 7))
    assert still_open(3.0) == 57.0, "an engine that was started anew counts from 0"
    view = windowed(joined=True)
    view.metric(report("producer-0", {"tokens/published_total": 40.0}, time_s=0.0))
    assert all("tokens/open" not in row.values for row in view.take_rows(1.0))


def test_tokens_on_the_stream_are_those_that_wait_and_those_behind_the_cursor(entry: MakeEntry) -> None:
    view = windowed()
    assert view.numbers(elapsed_s=1.0).stream_tokens is None
    for number, stored in ((1, 300.0), (2, 500.0)):
        metrics = {"tokens/stored_total": stored, "tokens/waiting": 70.0}
        view.ledger(as_line(replace(entry(number, cursor=10 * number), metrics=metrics)))
    view.stream(last=20, num_bytes=1)
    assert view.numbers(elapsed_s=1.0).stream_tokens == 70.0
    view.stream(last=25, num_bytes=1)
    (row,) = [row for row in view.take_rows(1.0) if row.kind == "window"]
    assert row.values["lag/stream_tokens"] == 70.0 + 5 * 800.0 / 20


def test_a_backlog_goes_by_the_newest_fork_and_is_not_always_known() -> None:
    backlog = Backlog()
    for cursor, stored in ((10, 100.0), (20, 100.0), (30, 100.0), (20, 900.0)):
        backlog.ledger(cursor, {"tokens/stored_total": stored, "tokens/waiting": 0.0})
    assert (backlog.tokens(21), backlog.tokens(3)) == (pytest.approx(1000.0 / 20), 0.0)
    backlog = Backlog()
    for cursor, stored in ((10, 500.0), (10, 0.0)):
        backlog.ledger(cursor, {"tokens/stored_total": stored, "tokens/waiting": 0.0})
    assert backlog.tokens(20) == 500.0
    backlog = Backlog()
    backlog.ledger(10, {})
    assert backlog.tokens(20) is None


SHORT_ONES, LONG_ONES = histogram([10] * 100), histogram([200] * 100)


def test_answers_make_a_distance_where_there_are_enough_known_ones() -> None:
    lengths = Lengths()
    lengths.add({"lengths/trained": SHORT_ONES})
    assert lengths.distance == 0.0
    lengths.add({"lengths/dropped": LONG_ONES})
    lengths.add({"lengths/cut": LONG_ONES, "lengths/finished": LONG_ONES})
    assert (lengths.distance, lengths.values["lengths/cut_p50"]) == (pytest.approx(2 / 3), pytest.approx(200, rel=0.19))
    lengths = Lengths()
    lengths.add({"lengths/trained": histogram([1] * (FEWEST - 1)), "lengths/dropped": LONG_ONES})
    assert lengths.distance is None and "lengths/distance" not in lengths.values
    assert Lengths().values == {}
    lengths = Lengths()
    lengths.add({"lengths/trained": [1, -1], "lengths/other": [1], "lengths/cut": [1] * 100_000})
    assert lengths.counts == {}


def test_the_newest_answers_weigh_most_and_memory_is_bounded() -> None:
    lengths = Lengths()
    for _ in range(1000):
        lengths.add({"lengths/trained": SHORT_ONES, "lengths/dropped": LONG_ONES})
    assert lengths.distance == pytest.approx(0.5, abs=0.01)
    for _ in range(1000):
        lengths.add({"lengths/trained": LONG_ONES})
    assert lengths.distance is not None and lengths.distance < 0.01
    assert sum(map(sum, lengths.counts.values())) <= 2 * MOST_DECIDED


def test_cut_answers_are_compared_with_those_of_their_time() -> None:
    lengths = Lengths()
    lengths.add({"lengths/cut": histogram([200] * 2000)})
    for _ in range(1000):
        lengths.add({"lengths/trained": SHORT_ONES}, live=False)
    assert (lengths.distance, lengths.knows_cut) == (0.0, False) and "lengths/distance" not in lengths.values
    assert sum(lengths.counts["lengths/cut"]) == 2000
    for _ in range(20):
        lengths.add({"lengths/trained": SHORT_ONES})
    assert lengths.knows_cut and lengths.values["lengths/distance"] == pytest.approx(0.5)
    lengths.forget_ledger()
    lengths.add({"lengths/trained": SHORT_ONES}, live=False)
    assert (lengths.distance, lengths.knows_cut, sum(lengths.counts["lengths/cut"])) == (0.0, False, 2000)


def test_of_history_no_cut_answer_is_spoken_of(entry: MakeEntry) -> None:
    view = RunView("demo")
    texts: list[str] = []
    for live in (False, True):
        view.live = live
        view.ledger(as_line(replace(entry(1 + live), histograms={"lengths/trained": SHORT_ONES})))
        numbers = view.numbers(elapsed_s=1.0)
        texts.append(distance_text(numbers.length_distance, cut=numbers.length_cut))
    assert [text.partition("from those ")[2] for text in texts] == ["trained or dropped", "trained, dropped or cut"]


def test_rows_have_quantiles_of_the_batch_and_of_the_window(entry: MakeEntry) -> None:
    view = RunView("demo", series=Series(window_s=10.0))
    view.take_rows(1000.0)
    lengths = {"lengths/trained": SHORT_ONES, "lengths/dropped": LONG_ONES}
    view.ledger(as_line(replace(entry(1), histograms=lengths)))
    view.metric(report("engine-0", {"tokens/cut_total": 9.0}, time_s=0.0, histograms={"lengths/cut": LONG_ONES}))
    batch, *rows = view.take_rows(1010.0)
    assert batch.values["lengths/trained_p95"] == pytest.approx(10, rel=0.19) and "lengths/cut_p50" not in batch.values
    (of_run,) = [row for row in rows if row.of == ""]
    assert of_run.values["lengths/distance"] == pytest.approx(2 / 3) and of_run.values["lengths/cut_p50"] > 150
    assert view.numbers(elapsed_s=1.0).length_distance == pytest.approx(2 / 3)


def test_stretches_side_by_side_are_of_the_same_lengths() -> None:
    least, counts = side_by_side({"a": histogram([10, 11, 3000]), "b": histogram([90])}, 8)
    assert least[0] <= 10 and least[-1] > 3000 and {len(one) for one in counts.values()} == {len(least) - 1} and len(least) <= 9
    assert (sum(counts["a"]), counts["a"][0], sum(counts["b"])) == (3, 2, 1)
    assert side_by_side({}, 8)[1] == {} and distance(SHORT_ONES, LONG_ONES) == 1.0
