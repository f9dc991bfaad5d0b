"""Back-test: what other bounds and policies would have done with the records of a run, in seconds and without a trainer.

The recorded run gives when records came, how long steps took and how long new weights took to be served. A simulated trainer folds the
records at their times and closes batches by its own rules (the fold's own functions). A task cannot begin before the simulation has granted
it and made the version that it needs: else its records come that much later. They never come earlier, since nobody knows what engines with
more credits would have made. A token's version becomes the one that is served in the simulation when it was sampled.
"""

from __future__ import annotations

import heapq
import statistics
from bisect import bisect_right
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from streamrl.core.assembly import ages
from streamrl.core.fold import Batch, close, fold, trained
from streamrl.core.records import Record, Rollouts, RolloutView
from streamrl.core.state import FoldConfig, initial_state
from streamrl.errors import ConfigError
from streamrl.history.backtest_model import Arrival, History
from streamrl.schemas.ledger import Drop


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one bound and policy came to. Ages are of a group's oldest token, in versions; the warm-up is left out."""

    max_staleness: int
    stale: str
    batches: int
    staleness_mean: float
    staleness_p50: float
    staleness_max: int
    stale_rollouts: int
    """Rollouts dropped for their age; with `mask`, those all of whose tokens were too old."""
    masked_tokens: float
    """With `mask`: share of the trained groups' tokens that were masked, if a rollout's versions have equal shares."""
    waste: float
    """Share of the rollouts (and, with `mask`, tokens) that arrived and were not trained because of their age."""
    wait_s: float
    """Time in which the trainer had no batch."""
    wait: float
    """The same as a share of the whole time."""
    total_s: float


def check_supported(config: FoldConfig) -> None:
    """Raise ConfigError for rules that a back-test does not model."""
    if config.delay_versions:
        raise ConfigError(
            f"a back-test does not model engines that lag on purpose, got debug.delay_versions = {config.delay_versions}",
            hint="back-test a run without it; `replay --set tasks.max_staleness=...` trains this one's samples under another bound",
            key="debug.delay_versions",
        )


def backtest(history: History, config: FoldConfig) -> Outcome:
    """One bound and policy over a recorded history; raises ConfigError for rules that it does not model."""
    check_supported(config)
    return Simulation(history, config).run()


class Simulation:
    """One simulated trainer over a history. `run` is called once."""

    def __init__(self, history: History, config: FoldConfig) -> None:
        self._history = history
        self._config = config
        self._state = initial_state(config)
        self._grants = [(self._state.grant, history.began_s)]
        self._served = [0.0]
        """When each version is first served, by number."""
        self._coming: list[tuple[float, int, Arrival, float]] = []
        """Heap of (time, place in the stream, arrival, by how much it is late)."""
        self._held: list[tuple[int, int, Arrival]] = []
        """Heap of (task, place, arrival) for tasks that have not been granted yet."""
        self._unserved: list[tuple[int, int, Arrival]] = []
        """Heap of (version needed, place, arrival) for tasks whose version has not been made yet."""
        self._folded = 0
        self._ages: list[int] = []
        self._rollouts = 0
        self._stale = 0
        self._expired: set[int] = set()
        """Tasks whose rollouts came too late because they had expired."""
        self._masked = 0.0
        self._tokens = 0.0
        self._wait_s = 0.0

    def run(self) -> Outcome:
        """Simulate to the last record."""
        now = self._history.began_s
        for place, arrival in enumerate(self._history.arrivals):
            self._admit(place, arrival, now)
        batches = 0
        while True:
            while self._coming and self._coming[0][0] <= now:
                self._fold(now)
            batch = close(self._state, self._config)
            if batch is None:
                if not self._coming:
                    break
                self._wait_s += self._coming[0][0] - now
                now = self._coming[0][0]
                continue
            now += self._history.step_s(batches, len(batch.groups))
            self._train(batch, now)
            batches += 1
        return self._outcome(batches, now - self._history.began_s)

    def _admit(self, place: int, arrival: Arrival, now: float) -> None:
        """Put an arrival where it belongs: it comes at its time, or it waits for a grant or for a version."""
        task = arrival.task
        if task is None:
            heapq.heappush(self._coming, (max(arrival.time_s, now), place, arrival, 0.0))
            return
        issue = bisect_right(self._grants, task, key=lambda known: known[0].granted)
        if issue == len(self._grants):
            heapq.heappush(self._held, (task, place, arrival))
            return
        grant, when = self._grants[issue]
        late = max(0.0, when - (arrival.first_s or self._history.issued_s(task)))
        if arrival.first_s > 0:
            needed = grant.min_version(task, batch_tasks=self._config.batch_tasks, max_staleness=self._config.max_staleness)
            if needed >= len(self._served):
                heapq.heappush(self._unserved, (needed, place, arrival))
                return
            late = max(late, self._served[needed] - arrival.first_s)
        heapq.heappush(self._coming, (max(arrival.time_s + late, now), place, arrival, late))

    def _fold(self, now: float) -> None:
        _, _, arrival, late = heapq.heappop(self._coming)
        self._folded += 1
        record: Record = replace(arrival.record, sequence=self._folded)
        if isinstance(record, Rollouts):
            record = replace(record, rollouts=tuple(self._translated(view, arrival, late) for view in record.rollouts))
            self._rollouts += len(record.rollouts)
        before = self._state.num_drops
        self._state, effects = fold(self._state, record, self._config)
        self._count(self._state.drops_after(before))
        if effects.grant is not None:
            self._granted(now)

    def _train(self, batch: Batch, now: float) -> None:
        before = self._state
        in_warmup = before.in_warmup(batch.groups[0].task)
        if not in_warmup:
            self._ages += ages(batch, before)["total"]
            self._mask(batch)
        warm = before.warmup_steps + 1 >= self._history.warmup_batches
        self._state = trained(before, batch, self._config, warm=warm)
        if before.warmup_end is None and self._state.warmup_end is not None and self._history.warmup_end is not None:
            self._state = replace(self._state, warmup_end=self._history.warmup_end)
        self._count(self._state.drops)
        self._served.append(now + self._history.lag_s)
        if self._state.granted > self._grants[-1][0].granted:
            self._granted(now)
        while self._unserved and self._unserved[0][0] < len(self._served):
            _, place, arrival = heapq.heappop(self._unserved)
            self._admit(place, arrival, now)

    def _granted(self, now: float) -> None:
        self._grants.append((self._state.grant, now))
        while self._held and self._held[0][0] < self._state.granted:
            _, place, arrival = heapq.heappop(self._held)
            self._admit(place, arrival, now)

    def _translated(self, view: RolloutView, arrival: Arrival, late: float) -> RolloutView:
        if view.highest < 0 and view.oldest < 0:
            return view
        oldest, newest = self._serving(arrival.first_s + late), self._serving(arrival.last_s + late)
        if view.oldest < 0:
            oldest, newest = -1, -1
        elif view.oldest == view.newest:
            newest = oldest
        newest = max(oldest, newest)
        shares = tuple(replace(share, oldest=oldest, newest=newest) for share in view.shares)
        return replace(view, oldest=oldest, newest=newest, highest=newest, epochs=(), shares=shares)

    def _serving(self, time_s: float) -> int:
        return max(0, bisect_right(self._served, time_s) - 1)

    def _count(self, drops: Sequence[Drop]) -> None:
        for drop in drops:
            if drop.reason == "expired":
                self._expired.add(drop.task)
            if drop.reason in ("stale", "expired") or (drop.reason == "late" and drop.task in self._expired):
                self._stale += len(drop.rollouts)

    def _mask(self, batch: Batch) -> None:
        if self._config.stale != "mask":
            return
        limit = self._state.version.number - self._config.max_staleness
        for group in batch.groups:
            for rollout in group.rollouts.values():
                versions = rollout.newest - rollout.oldest + 1
                too_old = min(versions, max(0, limit - rollout.oldest))
                self._tokens += rollout.num_tokens
                self._masked += rollout.num_tokens * too_old / versions

    def _outcome(self, batches: int, total_s: float) -> Outcome:
        masked = self._masked / self._tokens if self._tokens else 0.0
        dropped = self._stale / self._rollouts if self._rollouts else 0.0
        return Outcome(
            max_staleness=self._config.max_staleness,
            stale=self._config.stale,
            batches=batches,
            staleness_mean=statistics.fmean(self._ages) if self._ages else 0.0,
            staleness_p50=float(statistics.median(self._ages)) if self._ages else 0.0,
            staleness_max=max(self._ages, default=0),
            stale_rollouts=self._stale,
            masked_tokens=masked,
            waste=dropped + (1 - dropped) * masked,
            wait_s=self._wait_s,
            wait=self._wait_s / total_s if total_s > 0 else 0.0,
            total_s=total_s,
        )
