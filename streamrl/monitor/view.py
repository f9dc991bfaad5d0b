"""RunView: folds ledger entries, events, metrics and presence into the numbers of a run. No I/O, no clock of its own."""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from streamrl.errors import SchemaError
from streamrl.monitor.failures import Failures
from streamrl.monitor.numbers import EngineLine, Evaluation, Point, Problem, RunNumbers, Standing, WorkerLine
from streamrl.monitor.rates import Growing, Rate, left_s
from streamrl.monitor.waits import standing_of
from streamrl.schemas.control import EVALUATION_ROLE, ROLLOUT_ROLE, EnginePresence, Grant, WorkerPresence
from streamrl.schemas.events import MOVING_EVENT, STANDING_EVENT, Event, MetricReport
from streamrl.schemas.ledger import decided_by
from streamrl.schemas.samples import Tombstone
from streamrl.schemas.versions import Version
from streamrl.telemetry.metrics import Fold

REWARD_WINDOW = 20
"""Batches in the reward means, here and in the summary."""
SPARK_POINTS = 40
_IN_FLIGHT = "producer/in_flight_tasks"
_HUNG, _HUNG_S = "producer/hung_tasks", "producer/hung_s"


class DropLine(msgspec.Struct, frozen=True):
    """What a view needs of a `Drop`."""

    reason: str
    rollouts: tuple[int, ...] = ()


class SpilledLine(msgspec.Struct, frozen=True):
    """What a view needs of `SpilledDrops`."""

    reasons: dict[str, int]


class GapLine(msgspec.Struct, frozen=True):
    """What a view needs of a `Gap`: that it is one."""

    lost: str


class LedgerLine(msgspec.Struct, frozen=True, kw_only=True):
    """What a view needs of a `LedgerEntry`: decoding skips the sequences of every rollout, which are most of its bytes."""

    version: Version
    source: str
    cursor: int
    drops: tuple[DropLine, ...] = ()
    staleness: tuple[int, ...] = ()
    num_tokens: int = 0
    retired: int = 0
    warm: bool = False
    metrics: dict[str, float] = {}
    time_s: float = 0.0
    spilled: SpilledLine | None = None
    score: float | msgspec.UnsetType = msgspec.UNSET
    reward: float | msgspec.UnsetType = msgspec.UNSET
    gap: GapLine | None = None


class ProblemDetail(msgspec.Struct, frozen=True):
    """One problem of an evaluation event."""

    prompt: Any = ""
    expected: Any = ""
    got: Any = ""
    reward: float | None = None


class EvaluationDetail(msgspec.Struct, frozen=True):
    """The detail of an `evaluation` event."""

    version: Version | str | int
    accuracy: float
    num: int = 0
    problems: tuple[ProblemDetail, ...] = ()


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Counts that the streams do not hold, carried from one session of a run to the next under the key `totals`."""

    tokens_made: int = 0
    swaps: int = 0
    wall_s: float = 0.0


class RunView:
    """Feed it what the run says (`ledger`, `event`, `metric`, `engine`, `worker`, `stream`, `grant`); ask it for `numbers`.

    Args:
        run: run id.
        steps: batches after which the run ends; 0 if not known.
        warmup_steps: longest warm-up in batches.
        before: totals of earlier sessions.
        joined: this view looks at a session that others have begun; `before` holds what its engines have counted so far.
    """

    def __init__(self, run: str, *, steps: int = 0, warmup_steps: int = 0, before: Totals | None = None, joined: bool = False) -> None:
        self.run = run
        self.steps = steps
        self.warmup_steps = warmup_steps
        self.before = before or Totals()
        self.points: list[Point] = []
        self.evaluations: list[Evaluation] = []
        self.swap_numbers: set[int] = set()
        """Version numbers that an engine was seen to serve after its first."""
        self.metrics = Fold()
        self.failures = Failures()
        self.finished = False
        self.stalled: set[str] = set()
        self.standing: Standing | None = None
        self.notices: list[str] = []
        """What workers want people to know, oldest first."""
        self.ages: Counter[int] = Counter()
        """Groups by age in versions, reinforcement learning only."""
        self.drops: Counter[str] = Counter()
        self._newest: LedgerLine | None = None
        self._entries: dict[int, LedgerLine] = {}
        self._engines: dict[str, EnginePresence] = {}
        self._workers: dict[str, WorkerLine] = {}
        self._made, self._swapped = Growing(late=joined), Growing(late=joined)
        self._made_rate, self._trained_rate = Rate(), Rate()
        self._num_trained_tokens = 0
        self._stream_last, self._stream_bytes = 0, 0
        self._issued = 0
        self._held: dict[str, tuple[float, float, float]] = {}
        """By producer: tasks that it holds, how many of them hang, and for how long."""
        self._grant = Grant(granted=0, version=0, retired=0)

    def ledger(self, entry: LedgerLine) -> None:
        """One trained batch. One of a version number that is known replaces it: the epoch was forked. A gap makes later ones void."""
        number = entry.version.number
        forked = number in self._entries or entry.gap is not None
        if entry.gap is None:
            self._entries[number] = self._newest = entry
        self.failures.trained(entry.cursor)
        if forked:
            self._entries = {known: one for known, one in self._entries.items() if known <= number}
            self.points, self.ages, self.drops, self._num_trained_tokens = [], Counter(), Counter(), 0
            for one in self._entries.values():
                self._count(one)
        else:
            self._count(entry)

    def _count(self, entry: LedgerLine) -> None:
        warmup = entry.source == "warmup"
        ages = () if warmup else entry.staleness
        self.ages.update(ages)
        for drop in entry.drops:
            self.drops[drop.reason] += max(1, len(drop.rollouts))
        if entry.spilled is not None:
            self.drops.update(entry.spilled.reasons)
        self._num_trained_tokens += entry.num_tokens
        self.points.append(
            Point(
                number=entry.version.number,
                warmup=warmup,
                warm=entry.warm,
                reward=None if warmup else decided_by(entry).reward,
                age_min=min(ages, default=0),
                age_mean=statistics.fmean(ages) if ages else 0.0,
                age_max=max(ages, default=0),
                num_tokens=entry.num_tokens,
                time_s=entry.time_s,
            )
        )

    def event(self, event: Event) -> None:
        """A lifecycle event. Raises SchemaError when it cannot be read."""
        match event.kind:
            case "finished":
                self.finished = True
            case "stalled":
                self.stalled.add(event.worker)
            case "resumed":
                self.stalled.discard(event.worker)
            case kind if kind == STANDING_EVENT:
                self.standing = standing_of(event)
            case kind if kind == MOVING_EVENT:
                self.standing = None
            case "notice":
                self.notices.append(f"{event.worker}: {event.detail.get('text', '')}")
            case "evaluation":
                self.evaluations.append(evaluation_of(event))
            case _:
                pass

    def metric(self, one: MetricReport) -> None:
        """One worker's report."""
        self.metrics.add(one)
        if _IN_FLIGHT in one.mean:
            self._held[one.worker] = (one.mean[_IN_FLIGHT], one.mean.get(_HUNG, 0.0), one.max.get(_HUNG_S, 0.0))

    def engine(self, engine: str, presence: EnginePresence | None) -> None:
        """An engine announced itself, or (None) has not for too long."""
        if presence is None:
            self._engines.pop(engine, None)
            return
        known = self._engines.get(engine)
        if known and known.serving and presence.serving and known.serving != presence.serving:
            self.swap_numbers.add(presence.serving.number)
        self._engines[engine] = presence
        self._made.report(engine, presence.tokens_total)
        self._swapped.report(engine, presence.swaps_total)

    def tombstone(self, sequence: int, stone: Tombstone) -> None:
        """The end of a task or rollout that gave no sample."""
        self.failures.add(sequence, stone, after=self._newest.cursor if self._newest else 0)

    def worker(self, worker: str, presence: WorkerPresence | None) -> None:
        """A worker announced itself, or (None) has not for too long."""
        if presence is None:
            self._workers.pop(worker, None)
            self._held.pop(worker, None)
        else:
            since_s = 0.0 if isinstance(presence.since_s, msgspec.UnsetType) else presence.since_s
            self._workers[worker] = WorkerLine(worker=worker, state=presence.state, pid=presence.pid, host=presence.host, since_s=since_s)

    def stream(self, *, last: int, num_bytes: int) -> None:
        """State of the sample stream."""
        self._stream_last, self._stream_bytes = last, num_bytes

    def issued(self, count: int) -> None:
        """Tasks issued so far."""
        self._issued = count

    def grant(self, grant: Grant) -> None:
        """How many tasks may be issued and how many have ended."""
        self._grant = grant

    def mark(self, now_s: float) -> None:
        """Sample the totals for the rates; called about once a second."""
        self._made_rate.mark(now_s, self._made.total)
        self._trained_rate.mark(now_s, self._num_trained_tokens)

    @property
    def tokens_made(self) -> int:
        """Tokens sampled by the engines, earlier sessions included."""
        return self.before.tokens_made + self._made.total

    @property
    def tokens_trained(self) -> int:
        """Tokens of all batches, warm-up and prompts included."""
        return self._num_trained_tokens

    @property
    def swaps(self) -> int:
        """Versions committed by the engines, earlier sessions included."""
        return self.before.swaps + self._swapped.total

    @property
    def all_drops(self) -> Counter[str]:
        """Rollouts decided against by reason, and those that have failed since the newest batch, which no entry has yet."""
        return self.drops + self.failures.reasons

    @property
    def num_barren_tasks(self) -> int:
        """Tasks ended since the newest batch, however they did."""
        return max(0, self._grant.retired - (self._newest.retired if self._newest else 0))

    @property
    def reward_points(self) -> list[Point]:
        """Batches of reinforcement learning."""
        return [point for point in self.points if not point.warmup]

    def _told(self, supervised: Mapping[str, WorkerLine]) -> dict[str, WorkerLine]:
        """The supervisor knows whether a process runs; what one does that runs, it says itself."""
        told: dict[str, WorkerLine] = {}
        for name, line in supervised.items():
            own = self._workers.get(name)
            if line.state == "running" and own is not None and own.pid == line.pid:
                line = replace(line, state=own.state, since_s=own.since_s)
            told[name] = line
        return told

    def _doing(self, line: WorkerLine) -> WorkerLine:
        """A producer that holds no task waits for one, which its reports say."""
        idle = line.state == "running" and self._held.get(line.worker, (1.0,))[0] == 0
        return replace(line, state="waits for tasks", since_s=0.0) if idle else line

    def phase(self) -> str:
        """Where the run is."""
        if self.finished:
            return "finished"
        if not self.points:
            return "starting"
        return "warm-up" if self.points[-1].warmup else "training"

    def numbers(self, *, elapsed_s: float, supervised: Mapping[str, WorkerLine] | None = None) -> RunNumbers:
        """Everything at this moment; `supervised` are workers whose state the caller knows better than their presence."""
        newest, drops = self._newest, self.all_drops
        measured = newest.metrics if newest else {}
        reinforced = self.reward_points
        rewards = [point.reward for point in reinforced if point.reward is not None]
        number = newest.version.number if newest else 0
        behind = [number - engine.serving.number for engine in self._engines.values() if engine.serving and engine.role == ROLLOUT_ROLE]
        return RunNumbers(
            run=self.run,
            phase=self.phase(),
            step=len(reinforced),
            steps=self.steps,
            left_s=left_s([one.time_s for one in reinforced], self.steps - len(reinforced)) if self.steps and not self.standing else None,
            warmup_step=len(self.points) - len(reinforced),
            warmup_steps=self.warmup_steps,
            version=str(newest.version) if newest else "-",
            answer_probability=measured.get("train/answer_probability"),
            reward=statistics.fmean(rewards[-REWARD_WINDOW:]) if rewards else None,
            rewards=stretched(rewards, SPARK_POINTS),
            heldout=self.evaluations[-1].accuracy if self.evaluations else None,
            tokens_made=self.tokens_made,
            tokens_trained=self.tokens_trained,
            made_per_s=self._made_rate.per_s,
            trained_per_s=self._trained_rate.per_s,
            staleness_p50=counted_median(self.ages),
            staleness_max=max(self.ages, default=0),
            staleness_in_flight=measured.get("staleness/in_flight"),
            staleness_queued=measured.get("staleness/queued"),
            staleness_publish_lag=measured.get("staleness/publish_lag"),
            engines_behind=max(0.0, statistics.fmean(behind)) if behind else None,
            stream_lag=max(0, self._stream_last - newest.cursor) if newest else self._stream_last,
            stream_bytes=self._stream_bytes,
            tasks_ended=self._grant.retired,
            tasks_granted=self._grant.granted,
            tasks_issued=self._issued,
            tasks_in_flight=round(sum(held for held, _, _ in self._held.values())),
            hung_tasks=round(sum(hung for _, hung, _ in self._held.values())),
            hung_s=max((seconds for _, _, seconds in self._held.values()), default=0.0),
            barren_tasks=self.num_barren_tasks,
            dropped=drops.total(),
            drops=dict(drops),
            failed_tasks=self.failures.num_tasks,
            newest_error=self.failures.newest,
            swaps=self.swaps,
            stalled=tuple(sorted(self.stalled & self._workers.keys())),
            standing=self.standing,
            engines=tuple(engine_line(name, engine) for name, engine in sorted(self._engines.items())),
            workers=tuple(self._doing(line) for _, line in sorted({**self._workers, **self._told(supervised or {})}.items())),
            elapsed_s=elapsed_s,
        )


def engine_line(name: str, engine: EnginePresence) -> EngineLine:
    """One engine for the table."""
    serving = str(engine.serving) if engine.serving else "-"
    if engine.role == EVALUATION_ROLE:
        serving += " (pinned)"
    degraded = "" if isinstance(engine.degraded, msgspec.UnsetType) else engine.degraded
    return EngineLine(
        engine=name,
        serving=serving,
        running=engine.running,
        waiting=engine.waiting,
        slots=engine.slots,
        degraded=degraded,
        pinned=engine.role == EVALUATION_ROLE,
    )


def stretched(values: Sequence[float], num_points: int) -> tuple[float, ...]:
    """Means of at most `num_points` stretches of `values`; all stretches but the last are equally long."""
    width = max(1, -(-len(values) // num_points))
    return tuple(statistics.fmean(values[start : start + width]) for start in range(0, len(values), width))


def counted_median(counts: Counter[int]) -> float:
    """Median of the values that `counts` counts; 0.0 if there are none."""
    if not counts:
        return 0.0
    values = sorted(counts)
    last_ranks = list(itertools.accumulate(counts[value] for value in values))
    low, high = (values[bisect.bisect_right(last_ranks, rank)] for rank in ((last_ranks[-1] - 1) // 2, last_ranks[-1] // 2))
    return (low + high) / 2


def evaluation_of(event: Event) -> Evaluation:
    """What an `evaluation` event says; raises SchemaError when it is none."""
    try:
        detail = msgspec.convert(event.detail, EvaluationDetail)
    except msgspec.ValidationError as error:
        raise SchemaError(f"an evaluation event of {event.worker} cannot be read: {error}") from error
    version = detail.version
    if isinstance(version, str):
        version = Version.parse(version)
    elif isinstance(version, int):
        version = Version(0, version)
    problems = tuple(
        Problem(prompt=str(one.prompt), expected=str(one.expected), got=str(one.got), reward=one.reward) for one in detail.problems
    )
    return Evaluation(version=version, accuracy=detail.accuracy, num=detail.num, problems=problems, time_s=event.time_s)
