"""Counts what has ended without a sample since the newest batch, by tombstones: the ledger has them only once a batch is trained."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Mapping

from msgspec.structs import replace

from streamrl.monitor.numbers import RunNumbers
from streamrl.monitor.trained import known_reason
from streamrl.schemas.ledger import REASON_LENGTH
from streamrl.schemas.samples import Tombstone

REASONS = ("failed", "timeout", "deliveries", "poison")
"""Reasons of tombstones that mean that something went wrong; a producer's own words, `filtered` and `lost` do not."""
ROWS = ("row_broken", "row_too_long")
"""Reasons of tombstones of tasks whose row of the data cannot be used; their detail names file and line."""

MOST_CHARS = 2000
"""Of an error's text, which may be whatever user code said."""
MOST_STONES = 10_000
"""Tombstones of a kind that are kept one by one until a batch is trained; those before are in the counts until then."""
MOST_ROWS = 3
"""Rows that cannot be used that are named; the feeder's log and the tombstones name more."""
LATELY = 1000
"""Messages of the sample stream; who failed in them is named though batches have been trained since."""
_HEARTBEATS_S = 10.0
FIRST_PAUSE_S = 10.0
MOST_PAUSE_S = 600.0


class Count:
    """Rollouts and tasks of one kind that have ended without a sample after the newest batch's cursor, in bounded memory."""

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter()
        """Rollouts by reason (`known_reason`)."""
        self.num_tasks = 0
        """Tasks of which every rollout has."""
        self.producers: Counter[str] = Counter()
        """The same by the producer whose claim ended so, where that is told."""
        self._stones: deque[tuple[int, Tombstone]] = deque()
        self._rollouts: Counter[int] = Counter()
        """By task of a stone that is kept."""

    def add(self, sequence: int, stone: Tombstone) -> None:
        """One more."""
        stone = replace(stone, reason=stone.reason[:REASON_LENGTH], detail="")  # as the ledger has it
        self._stones.append((sequence, stone))
        self._count(stone)
        if len(self._stones) > MOST_STONES:
            self._rollouts.pop(self._stones.popleft()[1].task, None)  # a task whose rollouts are all told; it stays counted

    def trained(self, cursor: int) -> None:
        """Count again, without what is at or before `cursor`."""
        self._stones = deque((sequence, stone) for sequence, stone in self._stones if sequence > cursor)
        self.reasons, self.num_tasks, self.producers, self._rollouts = Counter(), 0, Counter(), Counter()
        for _, stone in self._stones:
            self._count(stone)

    def _count(self, stone: Tombstone) -> None:
        rollouts = num_rollouts(stone)
        self.reasons[known_reason(stone.reason, self.reasons)] += rollouts
        before = self._rollouts[stone.task]
        self._rollouts[stone.task] = min(before + rollouts, stone.group_size)
        if before < stone.group_size <= before + rollouts:
            self.num_tasks += 1
            if isinstance(stone.producer, str):
                self.producers[stone.producer] += 1


class Failures:
    """Rollouts and tasks without a sample after the newest batch's cursor, failed ones and others apart, and the newest error of all."""

    def __init__(self) -> None:
        self.newest = ""
        """Reason and detail of the newest; empty: none."""
        self.rows: list[str] = []
        """The first rows of the data that cannot be used: what is wrong, with their file and line."""
        self._failed, self._given_up = Count(), Count()
        self._num_unsaid = 0
        """The newest of `_lately` that nobody has been told of."""
        self._lately: deque[tuple[int, Tombstone]] = deque(maxlen=LATELY)

    @property
    def reasons(self) -> Counter[str]:
        """Failed rollouts by reason."""
        return self._failed.reasons

    @property
    def num_tasks(self) -> int:
        """Tasks of which every rollout has failed."""
        return self._failed.num_tasks

    @property
    def producers(self) -> Counter[str]:
        """These tasks by producer."""
        return self._failed.producers

    @property
    def to_say(self) -> Count:
        """Failures since the newest batch; where there are none, the newest ones (at most `LATELY` stones) that were not `said`.

        A batch may be trained between them and the next look.
        """
        if self._failed.num_tasks or not self._num_unsaid:
            return self._failed
        unsaid = Count()
        for sequence, stone in [*self._lately][-self._num_unsaid :]:
            unsaid.add(sequence, stone)
        return unsaid

    def said(self) -> None:
        """People have been told."""
        self._num_unsaid = 0

    def lately(self, last: int) -> Counter[str]:
        """Failed rollouts by producer, of those among the `LATELY` messages of the sample stream up to `last`, trained since or not."""
        counts = Counter[str]()
        for sequence, stone in self._lately:
            if sequence > last - LATELY and isinstance(stone.producer, str):
                counts[stone.producer] += num_rollouts(stone)
        return counts

    @property
    def all_reasons(self) -> Counter[str]:
        """Rollouts that have ended without a sample since the newest batch, by reason."""
        return self._failed.reasons + self._given_up.reasons

    @property
    def given_up(self) -> Count:
        """What has ended without a sample for another reason: a producer's own, `filtered`, `lost`."""
        return self._given_up

    def add(self, sequence: int, stone: Tombstone, *, after: int) -> None:
        """A tombstone; one at or before the cursor `after` counts no more, but its text does."""
        if stone.reason in REASONS:
            self.newest = f"{stone.reason}: {stone.detail}"[:MOST_CHARS] if stone.detail else stone.reason
            self._lately.append((sequence, replace(stone, detail="")))
            self._num_unsaid = min(self._num_unsaid + 1, LATELY)
        if (
            stone.reason in ROWS
            and len(self.rows) < MOST_ROWS
            and (said := f"{stone.reason}: {stone.detail}"[:MOST_CHARS]) not in self.rows
        ):
            self.rows.append(said)
        if sequence > after:
            (self._failed if stone.reason in REASONS else self._given_up).add(sequence, stone)

    def trained(self, cursor: int) -> None:
        """A batch was trained that holds the stream up to `cursor`; those failures are in its ledger entry."""
        self._failed.trained(cursor)
        self._given_up.trained(cursor)


def num_rollouts(stone: Tombstone) -> int:
    """Count the rollouts that a tombstone ends."""
    return stone.group_size if stone.rollout is None else 1


def alone_to_blame(failed: Mapping[str, int], working: Collection[str], *, most: int) -> bool:
    """Whether nothing but failures is to be expected, for no producer at work has failed less than its part of `most`.

    Args:
        failed: tasks since the newest batch, by producer.
        working: producers whose failures count (`RunView.working_producers`).
        most: failed tasks at which a run is given up.
    """
    return all(failed.get(name, 0) * len(working) >= most for name in working)


class Barren:
    """When to say that tasks end and give no batch: once, until one is trained."""

    def __init__(self) -> None:
        self._said = False
        self._began_s: float | None = None

    def due(self, numbers: RunNumbers, *, least: int, known: bool, now_s: float) -> bool:
        """Tell whether it is to be said now, of at least so many tasks; then it has been. Where most fail, that is what is said instead.

        Why they do is waited for some seconds while it is not `known`, for it comes with the trainer's next heartbeat.
        """
        if numbers.barren_tasks < least:
            self._said, self._began_s = False, None
        if self._said or numbers.barren_tasks < least or 2 * numbers.failed_tasks > numbers.barren_tasks:
            return False
        self._began_s = now_s if self._began_s is None else self._began_s
        self._said = known or now_s - self._began_s >= _HEARTBEATS_S
        return self._said


class Pace:
    """When to say something that goes on: at once, and then after pauses that double."""

    def __init__(self) -> None:
        self._next_s = -math.inf
        self._pause_s = FIRST_PAUSE_S

    def due(self, now_s: float) -> bool:
        """Whether it is to be said now; then it has been."""
        if now_s < self._next_s:
            return False
        self._next_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, MOST_PAUSE_S)
        return True
