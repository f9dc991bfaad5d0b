"""What has failed since the newest batch, from the tombstones on the sample stream: the ledger has them only once a batch is trained."""

from __future__ import annotations

import math
from collections import Counter, deque

from msgspec.structs import replace

from streamrl.schemas.samples import Tombstone

REASONS = ("failed", "timeout", "deliveries", "poison")
"""Reasons of tombstones that mean that something went wrong; a producer's own words, `filtered` and `lost` do not."""

MOST_CHARS = 2000
"""Of an error's text, which may be whatever user code said."""
MOST_STONES = 10_000
"""Tombstones that are kept one by one until a batch is trained; those before are in the counts until then."""
FIRST_PAUSE_S = 10.0
MOST_PAUSE_S = 600.0


class Failures:
    """Failed rollouts and tasks after the newest batch's cursor, and the newest error of all."""

    def __init__(self) -> None:
        self.newest = ""
        """Reason and detail of the newest; empty: none."""
        self._stones: deque[tuple[int, Tombstone]] = deque()
        self._reasons: Counter[str] = Counter()
        self._rollouts: Counter[int] = Counter()
        """Failed ones by task."""
        self._num_tasks = 0

    @property
    def reasons(self) -> Counter[str]:
        """Failed rollouts by reason."""
        return self._reasons

    @property
    def num_tasks(self) -> int:
        """Tasks of which every rollout has failed."""
        return self._num_tasks

    def add(self, sequence: int, stone: Tombstone, *, after: int) -> None:
        """A tombstone; one at or before the cursor `after` counts no more, but its text does."""
        if stone.reason not in REASONS:
            return
        self.newest = f"{stone.reason}: {stone.detail}"[:MOST_CHARS] if stone.detail else stone.reason
        if sequence > after:
            self._stones.append((sequence, replace(stone, detail="")))
            self._count(stone)
            if len(self._stones) > MOST_STONES:
                self._rollouts.pop(self._stones.popleft()[1].task, None)

    def trained(self, cursor: int) -> None:
        """A batch was trained that holds the stream up to `cursor`; those failures are in its ledger entry."""
        kept = deque((sequence, stone) for sequence, stone in self._stones if sequence > cursor)
        self._stones, self._num_tasks = kept, 0
        self._reasons.clear()
        self._rollouts.clear()
        for _, stone in kept:
            self._count(stone)

    def _count(self, stone: Tombstone) -> None:
        rollouts = stone.group_size if stone.rollout is None else 1
        self._reasons[stone.reason] += rollouts
        before = self._rollouts[stone.task]
        self._rollouts[stone.task] = min(before + rollouts, stone.group_size)
        self._num_tasks += before < stone.group_size <= before + rollouts


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
