from __future__ import annotations

import random
import statistics
from collections import Counter

from streamrl.monitor.evaluations import MOST_EVALUATIONS, Evaluations
from streamrl.monitor.failures import MOST_STONES, Failures
from streamrl.monitor.numbers import Evaluation, Point
from streamrl.monitor.rates import Growing, Rate
from streamrl.monitor.series import Series
from streamrl.monitor.trained import MOST_STRETCHES, TAIL, Stretches, Trained, stretched_rewards
from streamrl.monitor.view import RunView
from streamrl.schemas.control import EnginePresence, Grant, WorkerPresence
from streamrl.schemas.events import Event
from streamrl.schemas.ledger import Drop
from streamrl.schemas.samples import Tombstone
from streamrl.schemas.versions import Version
from streamrl.telemetry.metrics import report
from tests.monitor.conftest import MakeEntry, as_line, evaluation, kept

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
        assert trained.ages == Counter(number % 5 for number in range(101, count + 1))
        assert trained.last_cold == 100
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
    assert failures.reasons == {"failed": MOST_STONES + 2000}
    assert failures.num_tasks == MOST_STONES + 2000
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
