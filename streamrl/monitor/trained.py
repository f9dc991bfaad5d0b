"""What the ledger says was trained, in bounded memory: the newest batches as they are, those before them as sums and stretches."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from streamrl.monitor.decoded import LedgerLine
from streamrl.monitor.distances import Distances
from streamrl.monitor.numbers import Point
from streamrl.schemas.ledger import decided_by
from streamrl.telemetry.names import OTHER_REASON

TAIL = 1024
"""Newest batches that are kept one by one; an epoch that forks behind them is read from the ledger again."""
MOST_STRETCHES = 512
"""Of the batches before, by kind; once there are more, neighbours are put together."""
MOST_REASONS = 64
"""Words for which drops are counted by themselves: a producer may say anything, and the rest is counted as `other`."""
_FIRST_REWARDS = 20
_Key = TypeVar("_Key", int, str)


def known_reason(reason: str, *counted: Collection[str]) -> str:
    """The word under which a reason is counted beside those that are: itself, or `other` beyond `MOST_REASONS`."""
    return reason if any(reason in words for words in counted) or sum(map(len, counted)) < MOST_REASONS else OTHER_REASON


class _Batch(msgspec.Struct, frozen=True):
    point: Point
    ages: Counter[int]
    drops: Counter[str]
    rollouts: int
    """Number of rollouts that were trained."""
    learned: float
    """Number of tokens under the loss mask; 0: not known."""
    step_s: float
    """Seconds of its step, waiting left out; 0: not known."""
    wait_s: float
    """Seconds that it was waited for."""


class Trained:
    """Folds ledger entries in stream order. An entry of a version number that is known forks the epoch: it and later ones are void."""

    def __init__(self) -> None:
        self.newest: LedgerLine | None = None
        self.retired = 0
        """Tasks ended at the newest of all entries, void ones included: they do not end again when a version is trained again."""
        self.ages: Counter[int] = Counter()
        """Groups by age in versions, reinforcement learning only."""
        self.drops: Counter[str] = Counter()
        self.distances = Distances()
        self.num_rollouts = 0
        """Trained ones."""
        self.num_tokens = 0
        self.num_batches = 0
        self.num_reinforced = 0
        """Batches of reinforcement learning among them."""
        self._tail: deque[_Batch] = deque()
        self._settled = 0
        """Highest version number that is not kept by itself any more."""
        self._stretches = {True: Stretches(), False: Stretches()}
        """By whether they are of the warm-up."""
        self._settled_cold = -1
        self._first_rewards: list[float] = []

    def add(self, entry: LedgerLine) -> bool:
        """Take the next entry; False if it forks the epoch behind the tail: then nothing was taken, and all has to be read anew."""
        last = entry.version.number - (entry.gap is None)
        if last < self._settled:
            return False
        while self._tail and self._tail[-1].point.number > last:
            self._count(self._tail.pop(), -1)
        if entry.gap is not None:
            return True
        self.newest = entry
        self.distances.take(entry.metrics)
        self.retired = max(self.retired, entry.retired)
        batch = self._batch(entry)
        self._tail.append(batch)
        self._count(batch, 1)
        if len(self._tail) > TAIL:
            self._settle(self._tail.popleft().point)
        return True

    def _batch(self, entry: LedgerLine) -> _Batch:
        warmup = entry.source == "warmup"
        ages = () if warmup else entry.staleness
        reward = None if warmup else decided_by(entry).reward
        point = Point(
            number=entry.version.number,
            warmup=warmup,
            warm=entry.warm,
            reward=reward,
            loss=None if warmup or reward is not None else entry.metrics.get("train/loss"),
            age_min=min(ages, default=0),
            age_mean=statistics.fmean(ages) if ages else 0.0,
            age_max=max(ages, default=0),
            num_tokens=entry.num_tokens,
            time_s=entry.time_s,
        )
        times = (entry.metrics.get(name, 0.0) for name in ("rollout/tokens_trained", "perf/step_s", "perf/wait_s"))
        return _Batch(point, Counter(ages), self._known(drops_of(entry)), num_used(entry), *times)

    def _known(self, drops: Counter[str]) -> Counter[str]:
        known = Counter[str]()
        for reason, count in drops.items():
            known[known_reason(reason, self.drops, known)] += count
        return known

    def _count(self, batch: _Batch, times: int) -> None:
        add_counts(self.ages, batch.ages, times)
        add_counts(self.drops, batch.drops, times)
        self.num_rollouts += times * batch.rollouts
        self.num_tokens += times * batch.point.num_tokens
        self.num_batches += times
        self.num_reinforced += times * (not batch.point.warmup)

    def _settle(self, point: Point) -> None:
        self._settled = point.number
        self._stretches[point.warmup].add(point)
        if not point.warm:
            self._settled_cold = point.number
        if point.reward is not None and len(self._first_rewards) < _FIRST_REWARDS:
            self._first_rewards.append(point.reward)

    def step_of(self, number: int) -> int:
        """Batches of reinforcement learning up to version `number`; of one from before the newest `TAIL`, up to the oldest of those."""
        later = itertools.takewhile(lambda batch: batch.point.number > number, reversed(self._tail))
        return self.num_reinforced - sum(not batch.point.warmup for batch in later)

    @property
    def is_warming(self) -> bool:
        """Whether the newest batch is of the warm-up."""
        return bool(self._tail) and self._tail[-1].point.warmup

    @property
    def last_cold(self) -> int:
        """Newest version before the end of the warm-up; -1: there was none."""
        return next((batch.point.number for batch in reversed(self._tail) if not batch.point.warm), self._settled_cold)

    def points(self, *, warmup: bool) -> list[Point]:
        """All batches of reinforcement learning, or of the warm-up, by version: stretches of them, then the newest by themselves."""
        return [*self._stretches[warmup].points, *(batch.point for batch in self._tail if batch.point.warmup == warmup)]

    def first_rewards(self, most: int) -> list[float]:
        """Of the first batches that had one, at most 20."""
        return [*self._first_rewards, *itertools.islice(self._rewards(self._tail), _FIRST_REWARDS)][:most]

    def last_rewards(self, most: int) -> list[float]:
        """Of the newest batches that have one, the newest last."""
        return list(itertools.islice(self._rewards(reversed(self._tail)), most))[::-1]

    def pace(self, most: int) -> tuple[float, float] | None:
        """Return the tokens under the loss mask a second of steps, and the part of steps and waiting together that was waiting.

        Of the newest `most` batches, the warm-up left out; None: not known.
        """
        told = (batch for batch in reversed(self._tail) if not batch.point.warmup and batch.step_s > 0)
        newest = list(itertools.islice(told, most))
        step_s, wait_s = sum(batch.step_s for batch in newest), sum(batch.wait_s for batch in newest)
        return (sum(batch.learned for batch in newest) / step_s, wait_s / (step_s + wait_s)) if newest else None

    def rollouts_a_batch(self, most: int) -> float:
        """Return the mean number of rollouts trained or decided against with a batch: of the newest `most`, the warm-up left out."""
        newest = itertools.islice((batch for batch in reversed(self._tail) if not batch.point.warmup), most)
        counts = [batch.rollouts + batch.drops.total() for batch in newest]
        return statistics.fmean(counts) if counts else 0.0

    @staticmethod
    def _rewards(batches: Iterator[_Batch] | Sequence[_Batch]) -> Iterator[float]:
        return (batch.point.reward for batch in batches if batch.point.reward is not None)

    @property
    def num_kept(self) -> int:
        """Objects that are kept, which the number of entries does not decide."""
        return len(self._tail) + sum(len(one.points) for one in self._stretches.values()) + len(self.ages) + len(self.drops)


class Stretches:
    """Batches in a row as at most `most` points, each of as many of them; the last may have fewer."""

    def __init__(self, most: int = MOST_STRETCHES) -> None:
        self.points: list[Point] = []
        self._most = most
        self._width = 1

    def add(self, point: Point) -> None:
        """The next batch."""
        if self.points and self.points[-1].num_batches < self._width:
            self.points[-1] = merged(self.points[-1], point)
            return
        self.points.append(point)
        if len(self.points) > self._most:
            self._width *= 2
            pairs = itertools.zip_longest(self.points[::2], self.points[1::2])
            self.points = [first if second is None else merged(first, second) for first, second in pairs]


def num_used(entry: LedgerLine) -> int:
    """Rollouts that were trained with an entry."""
    return sum(len(group.rollouts) for group in entry.used)


def drops_of(entry: LedgerLine) -> Counter[str]:
    """Rollouts decided against with an entry, by reason."""
    drops = Counter[str](entry.spilled.reasons if entry.spilled is not None else {})
    for drop in entry.drops:
        drops[drop.reason] += max(1, len(drop.rollouts))
    return drops


def add_counts(total: Counter[_Key], counts: Counter[_Key], times: int) -> None:
    """Add `counts` to `total` so many times; what comes to 0 is not kept."""
    for key, count in counts.items():
        total[key] += times * count
        if not total[key]:
            del total[key]


def merged(first: Point, second: Point) -> Point:
    """Two stretches in a row as one: means weighted by their batches, of which those without a reward count as having the others'."""
    weight = second.num_batches / (first.num_batches + second.num_batches)

    def mean(one: float | None, other: float | None) -> float | None:
        return one + (other - one) * weight if one is not None and other is not None else other if one is None else one

    return replace(
        second,
        num_batches=first.num_batches + second.num_batches,
        reward=mean(first.reward, second.reward),
        loss=mean(first.loss, second.loss),
        age_min=min(first.age_min, second.age_min),
        age_mean=first.age_mean + (second.age_mean - first.age_mean) * weight,
        age_max=max(first.age_max, second.age_max),
        num_tokens=first.num_tokens + second.num_tokens,
    )


def stretched_rewards(points: Sequence[Point], num_points: int) -> tuple[float, ...]:
    """Mean rewards of at most `num_points` stretches of the batches that have one; all but the last are equally long, up to a point."""
    rewarded = [(point.reward, point.num_batches) for point in points if point.reward is not None]
    width = max(1, -(-sum(count for _, count in rewarded) // num_points))
    means: list[float] = []
    total, weight = 0.0, 0
    for place, (reward, count) in enumerate(rewarded, 1):
        total, weight = total + reward * count, weight + count
        if weight >= width or place == len(rewarded):
            means.append(total / weight)
            total, weight = 0.0, 0
    return tuple(means)
