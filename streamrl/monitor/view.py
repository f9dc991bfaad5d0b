"""RunView: folds ledger entries, events, metrics and presence into the numbers of a run. No I/O, no clock of its own."""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Mapping

import msgspec

from streamrl.core.failed_share import LEAST_ROLLOUTS
from streamrl.monitor.accounting import Devices, Spent, account
from streamrl.monitor.arrivals import Arrivals
from streamrl.monitor.decoded import LedgerLine, evaluation_of
from streamrl.monitor.engine_lines import engine_line, worker_of
from streamrl.monitor.evaluations import Evaluations
from streamrl.monitor.failed_share import Shares, failed_of
from streamrl.monitor.failures import REASONS, Failures, num_rollouts
from streamrl.monitor.goodput import Backlog, Goodput
from streamrl.monitor.in_hand import InHand
from streamrl.monitor.lengths import Lengths
from streamrl.monitor.numbers import Account, EngineLine, Evaluation, Finding, Level, Point, RunNumbers, Standing, WorkerLine, is_producer
from streamrl.monitor.rates import Growing, Rate, Totals, batch_s, counted_quantile
from streamrl.monitor.series import RUN, Row, Series
from streamrl.monitor.slo import findings_of, worst_of
from streamrl.monitor.trained import Trained, drops_of, known_reason, num_used, stretched_rewards
from streamrl.monitor.waits import standing_of
from streamrl.monitor.worker_lines import worker_lines
from streamrl.runtime.worker import is_loading
from streamrl.schemas.control import ROLLOUT_ROLE, EnginePresence, Grant, Untrained, WorkerPresence
from streamrl.schemas.events import MOVING_EVENT, SLO_EVENT, STANDING_EVENT, Event, MetricReport
from streamrl.schemas.samples import Tombstone

REWARD_WINDOW = 20
"""Batches in the reward means, here and in the summary."""
SPARK_POINTS = 40
_MOST_NOTICES = 100
"""That wait to be shown."""
_STATE_CHARS = 1000
"""A worker's words for what it does are shown and repeated."""
_MOST_SWAPS = 1024
_TRAINER = "trainer-0"
"""The one of the trainer's ranks that folds the stream."""
_MOST_NAMES = 1024
"""Workers, and attempts at them, of which something is remembered that their presence does not clear away."""


class RunView:
    """Feed it what the run says (`ledger`, `event`, `metric`, `engine`, `worker`, `stream`, `grant`); ask it for `numbers`.

    Args:
        run: run id.
        steps: batches after which the run ends; 0 if not known.
        warmup_steps: longest warm-up in batches.
        before: totals of earlier sessions.
        joined: this view looks at a session that others have begun; `before` holds what its engines have counted so far.
        series: makes the rows of `take_rows`; None: there are none.
        devices: of the run, by its configuration.

    What it keeps does not grow with the run.
    """

    def __init__(
        self,
        run: str,
        *,
        steps: int = 0,
        warmup_steps: int = 0,
        before: Totals | None = None,
        joined: bool = False,
        series: Series | None = None,
        shares: Shares | None = None,
        devices: Devices | None = None,
    ) -> None:
        self.run = run
        self.shares = shares or Shares(LEAST_ROLLOUTS)
        self.steps = steps
        self.warmup_steps = warmup_steps
        self.before = before or Totals()
        self.spent = Spent(self.before.seconds)
        self._devices = devices or Devices()
        self._untimed = self.before.untimed or (self.before.wall_s > 0 and not self.before.seconds)
        self.series = series
        self.live = True
        """Whether what is fed happens now, and is not read from history: until it is, no window ends and no task counts as barren."""
        self.trained = Trained()
        self.swap_numbers: set[int] = set()
        """Version numbers that an engine was seen to serve after its first; of many, a part."""
        self.failures = Failures()
        self.lengths = Lengths()
        self._backlog = Backlog()
        self._goodput = None if joined else Goodput()
        self.finished = False
        """True once the run has come to its end (`streamrl.runtime.run_end`); set from outside."""
        self.stalled: set[str] = set()
        self.standing: Standing | None = None
        self.slo: tuple[Finding, ...] = ()
        self.slo_worst: dict[str, Level] = {}
        """The worst level of objectives that were not met."""
        self.evaluated = Evaluations()
        self._notices: deque[str] = deque(maxlen=_MOST_NOTICES)
        self._engines: dict[str, EnginePresence] = {}
        self._workers: dict[str, WorkerLine] = {}
        self._untrained = Untrained()
        self._made = Growing(late=joined, seen=self.before.tokens_by_engine)
        self._swapped = Growing(late=joined, seen=self.before.swaps_by_engine)
        self._made_rate, self._trained_rate = Rate(), Rate()
        self._engine_rates: dict[str, Rate] = {}
        self._stream_last = self._stream_bytes = self._issued = self._ungraded = 0
        self._arrivals = Arrivals()
        self._in_hand = InHand(_MOST_NAMES)
        self._grant = Grant(granted=0, version=0, retired=0)

    def ledger(self, entry: LedgerLine) -> bool:
        """One trained batch. One of a version number that is known replaces it: the epoch was forked. A gap makes later ones void.

        Returns:
            False if the fork lies further back than what is kept: then the ledger has to be read anew, without what it makes void.
        """
        if not self.trained.add(entry):
            return False
        self.failures.trained(entry.cursor)
        if self.live and entry.gap is None:
            self.shares.trained(num_used(entry), drops_of(entry))
        self.lengths.add(entry.histograms, live=self.live)
        if entry.gap is None:
            self._backlog.ledger(entry.cursor, entry.metrics)
        if self.series is not None and entry.gap is None:
            self.series.batch(entry, step=self.trained.num_reinforced, dropped=self.trained.drops.total(), live=self.live)
        return True

    def judged(self, found: tuple[Finding, ...]) -> None:
        """Objectives that are not met now."""
        self.slo = found
        for one in found:
            self.slo_worst[one.objective] = worst_of(one.level, self.slo_worst.get(one.objective, Level.OK))

    def forget_ledger(self) -> None:
        """Before the ledger is read anew; not live until it has been."""
        self.live = False
        self.trained = Trained()
        self._backlog = Backlog()
        self.lengths.forget_ledger()

    def event(self, event: Event, *, live: bool = True, sequence: int = 0) -> None:
        """A lifecycle event, of this session or (not `live`) from before. Raises SchemaError when it cannot be read."""
        match event.kind:
            case "stalled":
                self.stalled.add(event.worker)
                if len(self.stalled) > _MOST_NAMES:
                    self.stalled &= self._workers.keys()
            case "resumed":
                self.stalled.discard(event.worker)
            case kind if kind == STANDING_EVENT:
                self.standing = standing_of(event)
            case kind if kind == MOVING_EVENT:
                self.standing = None
            case kind if kind == SLO_EVENT:
                self.judged(findings_of(event))
            case "notice":
                self._notices.append(f"{event.worker}: {event.detail.get('text', '')}")
            case "evaluation":
                found = evaluation_of(event)
                if self.evaluated.add(found, last_cold=self.trained.last_cold) and self.series is not None:
                    self.series.evaluation(found, step=self.trained.step_of(found.version.number), live=live, sequence=sequence)
            case "weights" if live and self.series is not None:
                if isinstance(lag_s := event.detail.get("lag_s"), float):
                    mean, most = {"lag/publish_to_commit_s": lag_s}, {"lag/publish_to_commit_max_s": lag_s}
                    self.series.report(MetricReport(worker=event.worker, mean=mean, max=most))
            case _:
                pass

    def metric(self, one: MetricReport) -> None:
        """One worker's report."""
        self.lengths.add(one.histograms)
        self.spent.add(one)
        if self._goodput is not None:
            self._goodput.add(one.sum)
        if self.series is not None:
            self.series.report(one)
        self._in_hand.report(one, there=self._workers)
        if self.live and is_producer(one.worker):
            stored = one.sum.get("producer/rollouts_total", 0.0)
            self.shares.told(one.worker, stored=round(stored) if math.isfinite(stored) else 0)

    def engine(self, engine: str, presence: EnginePresence | None) -> None:
        """An engine announced itself, or (None) has not for too long."""
        if presence is None:
            self._engines.pop(engine, None)
            self._engine_rates.pop(engine, None)
            return
        known = self._engines.get(engine)
        if known and known.serving and presence.serving and known.serving != presence.serving:
            self.swap_numbers.add(presence.serving.number)
            if len(self.swap_numbers) > _MOST_SWAPS:
                self.swap_numbers = set(sorted(self.swap_numbers)[::2])
        self._engines[engine] = presence
        sampled = self._made.report(engine, presence.tokens_total)
        if presence.role == ROLLOUT_ROLE:
            self.metric(MetricReport(worker=worker_of(engine), sum={"tokens/sampled_total": float(sampled)}))
        self._swapped.report(engine, presence.swaps_total)

    def tombstone(self, sequence: int, stone: Tombstone) -> None:
        """The end of a task or rollout that gave no sample."""
        self.failures.add(sequence, stone, after=self._newest.cursor if self._newest else 0)
        if self.live and isinstance(stone.producer, str) and stone.reason in REASONS:
            self.shares.told(stone.producer, failed=num_rollouts(stone))

    def worker(self, worker: str, presence: WorkerPresence | None) -> None:
        """A worker announced itself, or (None) has not for too long."""
        if worker == _TRAINER:
            self._untrained = Untrained() if presence is None else _untrained_of(presence)
        if presence is None:
            self._workers.pop(worker, None)
            self._in_hand.forget(worker)
            self.shares.forget(worker)
        else:
            since_s = 0.0 if isinstance(presence.since_s, msgspec.UnsetType) or not math.isfinite(presence.since_s) else presence.since_s
            state = presence.state[:_STATE_CHARS]
            self._workers[worker] = WorkerLine(worker=worker, state=state, pid=presence.pid, host=presence.host, since_s=since_s)

    def stream(self, *, last: int, num_bytes: int) -> None:
        """State of the sample stream."""
        self._stream_last, self._stream_bytes = last, num_bytes

    def issued(self, count: int, *, ungraded: int = 0) -> None:
        """Tasks issued so far, and groups that wait for a rewarder."""
        self._issued, self._ungraded = count, ungraded

    def grant(self, grant: Grant) -> None:
        """How many tasks may be issued and how many have ended."""
        self._grant = grant

    def mark(self, now_s: float) -> None:
        """Sample the totals for the rates; called about once a second."""
        self._made_rate.mark(now_s, self._made.total)
        self._trained_rate.mark(now_s, self.trained.num_tokens)
        self._arrivals.mark(now_s, self._stream_last)
        for name, engine in self._engines.items():
            self._engine_rates.setdefault(name, Rate()).mark(now_s, engine.tokens_total)

    @property
    def stream_last(self) -> int:
        """Sequence of the newest message of the sample stream; 0: there is none, or it is not known."""
        return self._stream_last

    @property
    def tokens_made(self) -> int:
        """Tokens sampled by the engines, earlier sessions included."""
        return self.before.tokens_made + self._made.total

    def totals(self, *, wall_s: float) -> Totals:
        """What the next session has to be told, `wall_s` seconds after the beginning of the run."""
        return Totals(
            tokens_made=self.tokens_made,
            swaps=self.swaps,
            wall_s=wall_s,
            tokens_by_engine=self._made.seen,
            swaps_by_engine=self._swapped.seen,
            seconds=self.spent.sums,
            untimed=self._untimed,
        )

    @property
    def tokens_trained(self) -> int:
        """Tokens of all batches, warm-up and prompts included."""
        return self.trained.num_tokens

    @property
    def swaps(self) -> int:
        """Versions committed by the engines, earlier sessions included."""
        return self.before.swaps + self._swapped.total

    @property
    def account(self) -> Account:
        """The account of this moment."""
        return account(
            self.spent.sums,
            self._devices,
            rollouts_trained=self.trained.num_rollouts,
            rollouts_dropped=self.all_drops.total(),
            tokens_trained=self.tokens_trained,
            complete=not self._untimed,
        )

    @property
    def all_drops(self) -> Counter[str]:
        """Rollouts decided against by reason, and those without a sample since the newest batch, which no entry has yet."""
        drops = self.trained.drops.copy()
        for counts in (self.failures.reasons, self.failures.given_up.reasons):
            for reason, count in counts.items():
                drops[known_reason(reason, drops)] += count
        return drops

    @property
    def num_barren_tasks(self) -> int:
        """Tasks ended since the newest batch, however they did; none while it is not known which batch that is."""
        if not self.live:
            return 0
        return max(0, self._grant.retired - self.trained.retired)

    def untrained_rollouts(self, group_size: int) -> tuple[int, int]:
        """Return the rollouts since the newest batch: failed, and ended. Tasks are counted at the next grant, failures at once."""
        failed = failed_of(self.failures.reasons)
        return failed, max(failed, self.num_barren_tasks * group_size)

    @property
    def working_producers(self) -> set[str]:
        """Producers that have loaded and are not known to be without work; where all are without, every one that has loaded."""
        return {name for name in self.loaded_producers if not self._in_hand.is_idle(name)} or self.loaded_producers

    @property
    def loaded_producers(self) -> set[str]:
        """Producers that are there and have loaded."""
        return {name for name, one in self._workers.items() if is_producer(name) and not is_loading(one.state)}

    @property
    def evaluations(self) -> list[Evaluation]:
        """Those of the first set of problems, the newest of each version, by version; of many, a part."""
        return self.evaluated.ordered

    @property
    def reward_points(self) -> list[Point]:
        """Batches of reinforcement learning, those of long ago as stretches."""
        return self.trained.points(warmup=False)

    def take_notices(self) -> list[str]:
        """What workers have wanted people to know since the last call, oldest first."""
        notices = list(self._notices)
        self._notices.clear()
        return notices

    def take_rows(self, now_s: float, *, end: bool = False) -> list[Row]:
        """The rows since the last call, with those of a window that is over at `now_s` (Unix seconds); none without `series`.

        At the `end` of a session a window is over however short it was.
        """
        if self.series is None:
            return []
        if (self.series.due(now_s) or end) and self.live:
            self.series.close(now_s, self._now(), step=self.trained.num_reinforced)
        return self.series.take()

    def _now(self) -> dict[str, dict[str, float]]:
        """What a window's rows say of its end, by whose it is."""
        behind = self._behind()
        now = {of: {"lag/versions_behind": float(one)} for of, one in behind.items()}
        cursor = self._newest.cursor if self._newest else 0
        now[RUN] = {"lag/stream_messages": float(self._lag()), "lag/stream_s": self._arrivals.age_s(cursor), **self.lengths.values}
        if (backlog := self._backlog.tokens(self._stream_last)) is not None:
            now[RUN]["lag/stream_tokens"] = backlog
        if self._goodput is not None:
            now[RUN]["tokens/open"] = self._goodput.open
        if behind:
            now[RUN]["lag/versions_behind"] = float(max(behind.values()))
        return now

    def _behind(self) -> dict[str, int]:
        """Versions that each engine of the rollouts is behind the newest one, by its worker's name."""
        number = self._newest.version.number if self._newest else 0
        serving = {name: one.serving for name, one in self._engines.items() if one.serving and one.role == ROLLOUT_ROLE}
        return {worker_of(name): max(0, number - version.number) for name, version in serving.items()}

    def _lag(self) -> int:
        """Messages on the sample stream behind the newest batch's cursor."""
        return max(0, self._stream_last - self._newest.cursor) if self._newest else self._stream_last

    @property
    def _newest(self) -> LedgerLine | None:
        return self.trained.newest

    def phase(self) -> str:
        """Where the run is."""
        if self.finished:
            return "finished"
        if not self.trained.num_batches:
            return "starting"
        return "warm-up" if self.trained.is_warming else "training"

    def _engine_line(self, name: str, engine: EnginePresence) -> EngineLine:
        rate, window = self._engine_rates.get(name), self.series.window.get(worker_of(name), {}) if self.series else {}
        number = self._newest.version.number if self._newest else 0
        return engine_line(name, engine, newest=number, tokens_per_s=rate.per_s if rate else 0.0, window=window)

    def numbers(self, *, elapsed_s: float, supervised: Mapping[str, WorkerLine] | None = None) -> RunNumbers:
        """Everything at this moment; `supervised` are workers whose state the caller knows better than their presence."""
        newest, drops, held = self._newest, self.all_drops, self._in_hand.tasks
        measured = newest.metrics if newest else {}
        rewards, held_out = self.trained.last_rewards(REWARD_WINDOW), self.evaluated.newest
        reinforced, left = self.reward_points, max(0, self.steps - self.trained.num_reinforced)
        pace = self.trained.pace(REWARD_WINDOW)
        each_s = None if self.standing else batch_s([one.time_s for one in reinforced])
        number = newest.version.number if newest else 0
        behind = [number - engine.serving.number for engine in self._engines.values() if engine.serving and engine.role == ROLLOUT_ROLE]
        return RunNumbers(
            run=self.run,
            phase=self.phase(),
            step=self.trained.num_reinforced,
            steps=self.steps,
            steps_per_minute=None if each_s is None else 60.0 / each_s,
            rollouts_per_s=None if each_s is None else self.trained.rollouts_a_batch(REWARD_WINDOW) / each_s,
            left_s=each_s * left if self.steps and each_s is not None else None,
            warmup_step=self.trained.num_batches - self.trained.num_reinforced,
            warmup_steps=self.warmup_steps,
            version=str(newest.version) if newest else "-",
            answer_probability=measured.get("train/answer_probability"),
            reward=statistics.fmean(rewards) if rewards else None,
            loss=reinforced[-1].loss if reinforced else None,
            rewards=stretched_rewards(reinforced, SPARK_POINTS),
            heldout=held_out.accuracy if held_out else None,
            heldout_interval=held_out.interval if held_out else None,
            heldout_set=self.evaluated.first_set,
            heldout_by=held_out.answered_by if held_out else "",
            evaluations=self.evaluated.others,
            tokens_made=self.tokens_made,
            tokens_trained=self.tokens_trained,
            made_per_s=self._made_rate.per_s,
            trained_per_s=self._trained_rate.per_s,
            staleness_p50=counted_quantile(self.trained.ages, 0.5),
            staleness_p95=counted_quantile(self.trained.ages, 0.95),
            staleness_max=max(self.trained.ages, default=0),
            staleness_in_flight=measured.get("staleness/in_flight"),
            staleness_queued=measured.get("staleness/queued"),
            staleness_publish_lag=measured.get("staleness/publish_lag"),
            engines_behind=max(0.0, statistics.fmean(behind)) if behind else None,
            stream_lag=self._lag(),
            stream_s=self._arrivals.age_s(newest.cursor if newest else 0),
            stream_tokens=self._backlog.tokens(self._stream_last),
            stream_bytes=self._stream_bytes,
            tasks_ended=self._grant.retired,
            tasks_granted=self._grant.granted,
            tasks_issued=self._issued,
            ungraded=self._ungraded,
            tasks_in_flight=round(sum(held.values())),
            hung_tasks=self._in_hand.hung_tasks,
            hung_s=self._in_hand.hung_s,
            hung_graders=self._in_hand.hung_graders,
            hung_graders_s=self._in_hand.hung_graders_s,
            graders_ended=self._in_hand.graders_ended,
            barren_tasks=self.num_barren_tasks,
            dropped=drops.total(),
            drops=dict(drops),
            lengths=self.lengths.counts,
            length_distance=self.lengths.distance,
            length_cut=self.lengths.knows_cut,
            failed_tasks=self.failures.num_tasks,
            given_up_tasks=self.failures.given_up.num_tasks,
            untrained=self._untrained,
            failed_rollouts=failed_of(drops),
            ended_rollouts=self.trained.num_rollouts + drops.total(),
            newest_error=self.failures.newest,
            unusable_rows=tuple(self.failures.rows),
            swaps=self.swaps,
            stalled=tuple(sorted(self.stalled & self._workers.keys())),
            standing=self.standing,
            slo=self.slo,
            account=self.account,
            trainer_tokens_per_s=pace[0] if pace else None,
            trainer_waits=pace[1] if pace else None,
            engines=tuple(self._engine_line(name, engine) for name, engine in sorted(self._engines.items())),
            workers=worker_lines(self._workers, supervised or {}, held, self.failures.lately(self._stream_last)),
            elapsed_s=elapsed_s,
        )


def _untrained_of(presence: WorkerPresence) -> Untrained:
    """Read what a trainer says of itself; nothing where it is of an earlier version, or says something else."""
    try:
        return msgspec.convert(presence.detail, Untrained)
    except msgspec.ValidationError:
        return Untrained()
