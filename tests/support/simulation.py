"""A run on a simulated clock: feeder, producers that die and repeat themselves, a trainer that is killed, and one log between them.

Nothing here decides what the fold decides: the trainer drives `fold`, `close` and `trained` exactly as a live one does, keeps a ledger, and
after a kill starts again from its checkpoint, trains by its ledger and goes on.
"""

import heapq
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from msgspec import structs

from streamrl.core.assembly import ages, used
from streamrl.core.fold import Batch, close, fold, is_warm, trained
from streamrl.core.records import Ended, Poison, Record, Rewarded, Rollouts, RolloutView
from streamrl.core.state import FoldConfig, FoldState, initial_state, window
from streamrl.schemas.control import Grant
from streamrl.schemas.ledger import Drop, Used

Pause = Generator[float | None, None, None]


@dataclass(frozen=True)
class World:
    """The faults that a run meets; chances are per task, kills per line of the trainer."""

    batch: int = 3
    staleness: int = 1
    stale: str = "drop"
    group: int = 2
    steps: int = 8
    warmup_steps: int = 0
    slots: int = 8
    tail: str = "pareto"
    length: float = 1.0
    """Typical length of a rollout in units of one training step."""
    publish_lag: float = 0.2
    feed_lag: float = 0.0
    messages: str = "split"
    """`split`: one message a rollout, `whole`: one a task."""
    lost: float = 0.0
    duplicate: float = 0.0
    tombstone: float = 0.0
    poison: float = 0.0
    no_spread: float = 0.0
    apart: float = 0.0
    """Chance that a rollout's reward comes by itself, before or after it."""
    kill: float = 0.0
    checkpoint_every: int = 3
    eager: float = 0.5
    """Chance that the trainer tries to close before it has folded everything that is there."""
    hold: bool = False
    delay: int = 0
    """Versions that engines lag on purpose."""
    expire: int = 0
    """Versions after which a task expires."""
    baseline: bool = False
    """The last rollout of each task after the warm-up is greedy."""
    hung_every: int = 0
    """Every so many tasks one hangs: nothing ever comes of it, and it holds its slot until it has ended."""
    seed: int = 0

    @property
    def config(self) -> FoldConfig:
        return FoldConfig(
            batch_tasks=self.batch,
            max_staleness=self.staleness,
            stale=self.stale,
            warmup_steps=self.warmup_steps,
            hold_ahead=self.hold,
            delay_versions=self.delay,
            expire_versions=self.expire,
            baseline=self.baseline,
        )


@dataclass(frozen=True)
class Entry:
    cursor: int
    used: tuple[Used, ...]
    drops: tuple[Drop, ...]
    warm: bool
    ages: tuple[int, ...]
    newest: tuple[int, ...]
    """Age of the youngest trained token of each group."""


@dataclass
class Result:
    state: FoldState
    log: list[Record]
    ledger: list[Entry]
    granted: Grant
    issued: int
    kills: int
    time: float


class Killed(Exception):
    """The trainer's process ends here."""


@dataclass
class Simulation:
    """One run; `run` returns what happened or fails when nothing can happen any more."""

    world: World
    now: float = 0.0
    log: list[Record] = field(default_factory=list)
    ledger: list[Entry] = field(default_factory=list)
    served: int = 0
    issued: int = 0
    kills: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.world.seed)
        self.config = self.world.config
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.queue: list[tuple[int, int, int, bool]] = []  # (task, lowest version, deliveries, of the warm-up)
        self.free = self.world.slots
        self.hung: set[int] = set()
        self.checkpoint = initial_state(self.config).encode()
        self.grant = initial_state(self.config).grant
        self.final: FoldState | None = None
        self.process: Pause | None = None
        self.waiting = False

    def run(self, horizon: float = 1e5) -> Result:
        self.at(0, self.feed)
        self.start_trainer()
        while self.final is None:
            assert self.events, f"deadlock at {self.now} with {len(self.ledger)} versions: {self.world}"
            self.now, _, action = heapq.heappop(self.events)
            assert self.now < horizon, f"nothing gets done: {self.world}"
            action()
        return Result(self.final, self.log, self.ledger, self.grant, self.issued, self.kills, self.now)

    def at(self, delay: float, action: Callable[[], None]) -> None:
        self.count = getattr(self, "count", 0) + 1
        heapq.heappush(self.events, (self.now + delay, self.count, action))

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    # Feeder and producers.

    def feed(self) -> None:
        g = self.grant
        while self.issued < g.granted:
            lowest = max(0, g.version + (self.issued - g.retired) // self.world.batch - self.world.staleness)
            assert lowest <= max(0, g.version - self.world.delay), "a task would wait for a version that needs it"
            warm = g.warmup_end is None or self.issued < g.warmup_end
            self.queue.append((self.issued, 0 if warm else lowest, 1, warm))
            self.issued += 1
        self.claim()

    def claim(self) -> None:
        while self.free:
            item = next((item for item in self.queue if item[1] <= self.served), None)
            if item is None:
                return
            self.queue.remove(item)
            self.free -= 1
            self.work(*item)

    def work(self, task: int, lowest: int, deliveries: int, warm: bool) -> None:
        """One delivery of a task: its rollouts begin now, and end each in its own time, unless the producer dies first."""
        if not warm and self.world.hung_every and task % self.world.hung_every == self.world.hung_every - 1:
            self.hung.add(task)
            return None
        if deliveries > 3:
            self.publish(Ended(0, "main", task, None, self.world.group, "deliveries"))
            return self.at(0, self.release)
        lengths = [self.length(task) for _ in range(self.world.group)]
        end, oldest = max(lengths), -1 if warm else self.served
        dies = self.random.uniform(0, end) if self.chance(self.world.lost) else None
        spread = not self.chance(self.world.no_spread)
        rewards = [None if warm else float(k if spread else 1) for k in range(self.world.group)]
        if self.world.messages == "split":
            for k, length in enumerate(lengths):
                if dies is None or length < dies:
                    self.at(length, lambda k=k: self.finish(task, oldest, {k: rewards[k]}))
        elif dies is None:
            self.at(end, lambda: self.finish(task, oldest, dict(enumerate(rewards))))
        if dies is not None:
            self.at(dies, self.release)
            self.at(dies + 2.0, lambda: self.redeliver(task, lowest, deliveries + 1, warm))
        else:
            self.at(end, self.release)

    def release(self) -> None:
        self.free += 1
        self.claim()

    def redeliver(self, *item: int) -> None:
        self.queue.insert(0, item)  # type: ignore[arg-type]
        self.claim()

    def length(self, task: int) -> float:
        match self.world.tail:
            case "fixed":
                return self.world.length
            case "uniform":
                return self.world.length * self.random.random()
            case "pareto":
                return min(50.0, self.world.length * 0.4 * self.random.paretovariate(1.3))
            case "first":  # only the tasks of the first grant are slow
                return self.world.length * (20.0 if self.world.batch <= task < (self.world.staleness + 1) * self.world.batch else 0.1)
            case "rare":
                return self.world.length * (20.0 if self.chance(0.03) else 0.8)
        raise AssertionError(self.world.tail)

    def finish(self, task: int, oldest: int, rewards: dict[int, float | None]) -> None:
        w = self.world
        newest = -1 if oldest < 0 else self.served
        if self.chance(w.poison):
            return self.publish(Poison(0, task, "broken body"))
        if self.chance(w.poison):
            self.publish(Poison(0, None, "from somewhere else"))
        if self.chance(w.tombstone):
            whole = self.chance(0.5) or w.messages == "whole"
            return self.publish(Ended(0, "main", task, None if whole else next(iter(rewards)), w.group, "failed"))
        apart = [k for k in rewards if oldest >= 0 and self.chance(w.apart)]
        for k in apart:
            when = self.random.choice([0.0, self.random.uniform(0, 3)])
            update = Rewarded(0, task, k, float(rewards[k] or 0), 1)
            self.publish(update) if when == 0 else self.at(when, lambda update=update: self.publish(update))
            if self.chance(0.3):
                self.at(self.random.uniform(0, 3), lambda k=k: self.publish(Rewarded(0, task, k, self.random.random(), 2)))
        views = tuple(
            RolloutView(k, 1, 0, -1, -1, None if k in apart else reward, newest)
            if w.baseline and oldest >= 0 and k == w.group - 1
            else RolloutView(k, 1, 4, oldest, newest, None if k in apart else reward, newest)
            for k, reward in sorted(rewards.items())
        )
        record = Rollouts(0, "warmup" if oldest < 0 else "main", task, w.group, views)
        self.publish(record)
        if self.chance(w.duplicate):
            self.at(self.random.uniform(0, 2), lambda: self.publish(record))

    def publish(self, record: Record) -> None:
        self.log.append(structs.replace(record, sequence=len(self.log) + 1))
        if self.waiting:
            self.waiting = False
            self.step()

    # The trainer.

    def start_trainer(self) -> None:
        self.process = self.train()
        self.step()

    def step(self) -> None:
        """Run the trainer to its next pause: a time, or None to wait for a record."""
        assert self.process is not None
        try:
            pause = next(self.process)
        except StopIteration:
            return
        except Killed:
            self.kills += 1
            return self.at(1.0, self.start_trainer)
        if pause is None:
            self.waiting = True
        else:
            process = self.process
            self.at(pause, lambda: self.step() if self.process is process else None)

    def line(self) -> None:
        """Between two lines of the loop: the process may end here."""
        if self.kills < 12 and self.chance(self.world.kill):
            raise Killed

    def train(self) -> Pause:
        state = FoldState.decode(self.checkpoint)
        saved = state.version.number
        self.raise_grant(state.grant)
        while state.version.number < self.world.steps:
            past = self.ledger[state.version.number] if state.version.number < len(self.ledger) else None
            batch = None
            while batch is None:
                if past is None and (state.cursor == len(self.log) or self.chance(self.world.eager)):
                    batch = self.close(state)
                elif past is not None and state.cursor == past.cursor:
                    batch = self.close(state)
                    assert batch is not None and used(batch) == past.used and state.drops == past.drops, (
                        "the ledger's batch did not close again"
                    )
                if batch is None:
                    if state.cursor == len(self.log):
                        yield None
                    state = self.take(state)
                    self.line()
            yield 0.0 if past else 1.0
            self.line()
            warm = past.warm if past else is_warm(state, self.config, 0.0)
            after = trained(state, batch, self.config, warm=warm)
            if past is None:
                self.ledger.append(self.entry(state, batch, warm))
            self.line()
            state = after
            self.raise_grant(state.grant)
            self.line()
            number = state.version.number
            self.at(self.world.publish_lag, lambda number=number: self.serve(number))
            self.line()
            if number - saved >= self.world.checkpoint_every:
                self.checkpoint, saved = state.encode(), number
                self.line()
        self.final = state

    def take(self, state: FoldState) -> FoldState:
        before = state.encode()
        after, effects = fold(state, self.log[state.cursor], self.config)
        assert state.encode() == before, "fold changed the state that it was given"
        check_state(after, self.config)
        assert (effects.grant is not None) == (after.granted > state.granted)
        if effects.grant is not None:
            self.raise_grant(effects.grant)
        return after

    def close(self, state: FoldState) -> Batch | None:
        before = state.encode()
        batch = close(state, self.config)
        assert state.encode() == before
        return batch

    def entry(self, state: FoldState, batch: Batch, warm: bool) -> Entry:
        newest = [max((r.newest for r in g.rollouts.values() if r.oldest >= 0), default=state.version.number) for g in batch.groups]
        young = tuple(state.version.number - n for n in newest)
        return Entry(state.cursor, used(batch), state.drops, warm, tuple(ages(batch, state)["total"]), young)

    def raise_grant(self, grant: Grant) -> None:
        if grant.granted > self.grant.granted:
            self.grant = grant
            self.at(self.world.feed_lag, self.feed)
            assert isinstance(grant.first_open, int)
            for task in [task for task in self.hung if task < grant.first_open]:
                self.hung.remove(task)
                self.at(0, self.release)

    def serve(self, number: int) -> None:
        self.served = max(self.served, number - self.world.delay)
        self.claim()


def check_state(state: FoldState, config: FoldConfig) -> None:
    """Check what must hold after every record."""
    if config.hold_ahead:
        # Outstanding tasks always make up a batch, so one becomes ready.
        assert state.retired + config.batch_tasks <= state.granted <= state.retired + window(config)
    else:
        assert state.granted == state.retired + window(config)
    assert state.ready == sum(task.ready for task in state.pending.values())
    assert all(task >= state.watermark and not state.is_retired(task) for task in state.pending)
    assert all(task > state.watermark for task in state.retired_above)
    assert FoldState.decode(state.encode()) == state
