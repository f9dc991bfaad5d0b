"""Objectives of a run: ok, warn or breach, with the likely cause and the key to turn. Plain functions over numbers; no clock, no bus.

A cause is looked for along the path of a sample, where its time goes: shares of a window (`trainer/share/...`) say which part keeps the
others waiting, and reasons of drops say what is made in vain.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from streamrl.config.metrics import SloConfig
from streamrl.errors import SchemaError
from streamrl.monitor.distances import Distance
from streamrl.monitor.engine_lines import worker_of
from streamrl.monitor.numbers import Cause, Finding, Level, RunNumbers
from streamrl.monitor.series import RUN, TRAINED
from streamrl.monitor.untrained import cause_of, since_newest_batch
from streamrl.monitor.waits import loading
from streamrl.runtime.worker import ENGINES_FAIL, ENGINES_LEFT_OUT, WEIGHTS_FAIL
from streamrl.schemas.events import FULL_SERVER, SLO_EVENT, Event

_FALLS_BELOW = 0.9
"""A level is left below this part of its bound, lest it flap."""
_MANY = 0.5
"""More than half of the time, or of the drops, is what names a cause."""
_SOME = 0.25
_SICK = 0.4
"""An engine that samples less than this part of what the others do, by request, is slow."""
_MOST_CAUSES = 2


_LOGPROBS = ("logprob_float32", "logprob_bfloat16", "logprob_growth")

_SEVERITY = {Level.OK: 0, Level.WARN: 1, Level.BREACH: 2}


class Signs(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a run at one moment."""

    numbers: RunNumbers
    batch: Mapping[str, float] = {}
    """Metrics of the newest batch."""
    window: Mapping[str, Mapping[str, float]] = {}
    """Values of the newest window, by whose they are; empty before the first."""
    decided: Mapping[str, int] = {}
    """Of the newest window: see `Series.decided`."""
    stones: Mapping[str, int] = {}
    """Rollouts that have ended since the newest batch without a sample, by reason."""
    distances: Mapping[str, Distance] = {}
    """The distance of each engine's log-probs from the trainer's, by worker."""
    float32: bool = True
    """The weights are."""
    still_s: float = 0.0
    """Seconds since the newest batch."""
    num_rollouts: int = 1
    """Of a task."""
    batch_tasks: int = 1
    """Of a batch."""

    def of_run(self, name: str) -> float | None:
        """A value of the window for the run as a whole; None: not known."""
        return self.window.get(RUN, {}).get(name)

    def share(self, kind: str, state: str) -> float:
        """Part of the window that workers of a kind spent so; 0 where not known."""
        return self.of_run(f"{kind}/share/{state}") or 0.0

    @property
    def in_use(self) -> float:
        """Part of the window that producers' slots had a task in hand."""
        return sum(self.share("producer", state) for state in ("generate", "tools", "reward", "publish", "wait_engine"))

    @property
    def saturated(self) -> float:
        """Part of the window that engines had no free slot and requests that waited for one; of this moment where windows do not say."""
        if (share := self.of_run("starvation/engines_saturated")) is not None:
            return share
        engines = [engine for engine in self.numbers.engines if not engine.pinned]
        full = [engine for engine in engines if engine.waiting and engine.running >= engine.slots]
        return len(full) / len(engines) if engines else 0.0

    @property
    def dropped(self) -> dict[str, float]:
        """Rollouts dropped in the window, by reason."""
        return {name.rpartition("/")[2]: float(count) for name, count in self.decided.items() if name != TRAINED and count}

    @property
    def barren(self) -> int:
        """Tasks that have ended since the newest batch beyond those that the next one is made of."""
        return max(0, self.numbers.barren_tasks - self.batch_tasks)

    @property
    def drop_rate(self) -> float | None:
        """Part of the rollouts decided on in the window that were dropped; None: none was.

        Tasks that have ended without a batch count with the batch that they wait for, as if it closed now.
        """
        dropped = sum(self.dropped.values()) + self.barren * self.num_rollouts
        trained = (self.decided.get(TRAINED, 0) + (self.batch_tasks if self.barren else 0)) * self.num_rollouts
        return dropped / (dropped + trained) if dropped + trained > 0 else None

    @property
    def starved(self) -> float | None:
        """Part of its time in which the trainer waits for samples; of the newest batch where windows do not say."""
        if (share := self.of_run("trainer/share/wait_samples")) is not None:
            return share
        wait_s, step_s = self.batch.get("perf/wait_s"), self.batch.get("perf/step_s")
        return None if wait_s is None or step_s is None or wait_s + step_s <= 0 else wait_s / (wait_s + step_s)


def values(signs: Signs) -> dict[str, float]:
    """The values that are held against the bounds, by objective; those not known are left out, and while a model loads all but its time."""
    if loading(signs.numbers):
        return {"no_progress_s": signs.still_s}
    found: dict[str, float] = {"stream_lag_s": signs.numbers.stream_s, "no_progress_s": signs.still_s}
    if (age := signs.batch.get("staleness/p95")) is not None:
        found["p95_age"] = age
    if behind := [engine.behind for engine in signs.numbers.engines if engine.behind is not None]:
        found["versions_behind"] = float(max(behind))
    if (starved := signs.starved) is not None:
        found["starvation"] = starved
    if (rate := signs.drop_rate) is not None:
        found["drop_rate"] = rate
    return found | {objective: getattr(distance, what) for objective, (_, distance, what) in _furthest(signs).items()}


def _furthest(signs: Signs) -> dict[str, tuple[str, Distance, Literal["now", "growth"]]]:
    """Find for each objective the worker whose log-probs are the furthest from the trainer's, as far as that is known."""
    found: dict[str, tuple[str, Distance, Literal["now", "growth"]]] = {}
    if signs.distances:
        worker, distance = max(signs.distances.items(), key=lambda one: one[1].now)
        found["logprob_float32" if signs.float32 else "logprob_bfloat16"] = worker, distance, "now"
    grown = {worker: one for worker, one in signs.distances.items() if one.growth is not None}
    if grown and not signs.float32:
        worker, distance = max(grown.items(), key=lambda one: one[1].growth or 0.0)
        found["logprob_growth"] = worker, distance, "growth"
    return found


class Judge:
    """Holds a run against its objectives; to be asked every second or so.

    Args:
        config: bounds.
    """

    def __init__(self, config: SloConfig) -> None:
        self._config = config
        self._held: dict[str, _Held] = {}

    def look(self, signs: Signs, *, now_s: float, time_s: float) -> tuple[Finding, ...]:
        """What is not met now, the worst first.

        Args:
            signs: of this moment.
            now_s: on the monotonic clock.
            time_s: Unix seconds.
        """
        known = values(signs)
        found: list[Finding] = []
        for objective in OBJECTIVES:
            bound = float(getattr(self._config, objective))
            if bound <= 0:
                continue
            held = self._held.setdefault(objective, _Held(now_s))
            if objective in known:
                held.value = known[objective]
                # Medians of batches need not hold for a time; a run of seconds is to be judged, too.
                hold_s = 0.0 if objective in _LOGPROBS else self._config.hold_s
                held.see(_level(held.value, bound, self._config.warn, held.level), now_s, time_s, hold_s)
            if held.level != Level.OK:
                named = causes(objective, signs)[:_MOST_CAUSES]
                one = Finding(objective=objective, level=held.level, value=held.value, bound=bound, causes=named, since_s=held.since_s)
                found.append(replace(one, reached=held.reached) if held.passing else one)
        return tuple(sorted(found, key=lambda one: -_SEVERITY[one.level]))


class _Held:
    """A level, and the one that may follow it once it has held."""

    def __init__(self, now_s: float) -> None:
        self.level, self.since_s, self.value = Level.OK, 0.0, 0.0
        self.passing, self.reached = False, 0.0
        """The newest value is below the level; and the newest one that was not."""
        self._coming, self._began_s = Level.OK, now_s

    def see(self, seen: Level, now_s: float, time_s: float, hold_s: float) -> None:
        self._judge(seen, now_s, time_s, hold_s)
        self.passing = _SEVERITY[seen] < _SEVERITY[self.level]
        self.reached = self.reached if self.passing else self.value

    def _judge(self, seen: Level, now_s: float, time_s: float, hold_s: float) -> None:
        if seen == self.level:
            self._coming = seen
            return
        if self._coming == self.level or (_SEVERITY[seen] > _SEVERITY[self.level]) != (_SEVERITY[self._coming] > _SEVERITY[self.level]):
            self._began_s = now_s
        self._coming = seen
        if now_s - self._began_s >= hold_s:
            self.level, self.since_s = seen, time_s


def _level(value: float, bound: float, warn: float, before: Level) -> Level:
    """The level of a value; a level that there is already is only left well below where it begins."""
    slack = {level: _FALLS_BELOW if _SEVERITY[before] >= _SEVERITY[level] else 1.0 for level in (Level.WARN, Level.BREACH)}
    if value >= bound * slack[Level.BREACH]:
        return Level.BREACH
    return Level.WARN if warn > 0 and value >= bound * warn * slack[Level.WARN] else Level.OK


def causes(objective: str, signs: Signs) -> tuple[Cause, ...]:
    """Why an objective is not met, the likeliest first; never none.

    What a standing run waits for is its one cause, and who has no room for more is asked only where nothing else is the matter: that
    there are too few samples follows from either.
    """
    found = list[Cause]()
    for find in _SEARCHES[objective]:
        if (cause := None if find is _sampling and found else find(signs)) is not None:
            found.append(cause)
            if find is _standing:
                break
    return tuple({cause.name: cause for cause in found}.values()) or (
        Cause("unknown", "no likely cause was found", "`streamrl top` shows where time goes; the logs are in logs/"),
    )


def _standing(signs: Signs) -> Cause | None:
    found = signs.numbers.standing
    return None if found is None else Cause("standing", f"nothing moves: the run waits for {found.what}", found.hint)


def _full(signs: Signs) -> Cause | None:
    room = signs.share("producer", "wait_room")
    if any(one.state == FULL_SERVER for one in signs.numbers.workers):
        return Cause("full_server", "the bus's disk is full, and others wait for it", "free room on the disk of the server's store")
    if not signs.numbers.stalled and room < _SOME:
        return None
    return Cause(
        "full_stream",
        "the sample stream, or the room for what its samples name, is full, and others wait for it",
        "raise bus.samples_bytes (for images and experts bus.sample_blobs_bytes); does the trainer get on, or does a tap hold the stream?",
    )


def _hung(signs: Signs) -> Cause | None:
    numbers = signs.numbers
    hung = numbers.hung_tasks
    timeouts = signs.dropped.get("timeout", 0.0)
    if not (hung > _SOME * max(1, numbers.tasks_in_flight) or timeouts > _SOME * sum(signs.dropped.values())):
        return None
    if _rewards(signs) is not None:  # they have limits of their own
        return None
    said = f"{hung} tasks hang in user code, for up to {numbers.hung_s:.0f} s" if hung else "user code runs into its time limits"
    return Cause("hung_tool", said, "does a tool hang? lower producer.idle_timeout_s, or mend the tool")


def _engines(signs: Signs) -> Cause | None:
    """Engines that fail whatever a producer asks them, as that says."""
    worker = next((one for one in signs.numbers.workers if one.state.startswith(ENGINES_FAIL)), None)
    return None if worker is None else Cause("failing_engine", f"{worker.worker} {worker.state}", "see logs/engine-0.log")


def _vain(signs: Signs) -> Cause | None:
    rate = signs.drop_rate
    if rate is None or rate < _MANY:
        return None
    reasons = signs.dropped or since_newest_batch(signs.numbers, signs.stones)
    cause = cause_of(reasons, signs.numbers.drops) if reasons else None
    return (_rewards(signs) or cause) if cause is not None and cause.name == "hung_tool" else cause


def _grading(signs: Signs) -> Cause | None:
    """Rewarders that more groups wait for than a batch has."""
    waiting = signs.numbers.ungraded
    if waiting <= signs.batch_tasks:
        return None
    return Cause(
        "slow_reward", f"{waiting} groups wait for rewarders, more than a batch", "raise reward.workers, or make the reward faster"
    )


def _sick(signs: Signs) -> Cause | None:
    """One engine of several that fails, does far less than the others, or serves far older weights."""
    if worker := next((one for one in signs.numbers.workers if one.state.startswith(ENGINES_LEFT_OUT)), None):
        return Cause("sick_engine", f"{worker.worker} {worker.state}", "see its log, and its device; end it, and it is started anew")
    engines = [engine for engine in signs.numbers.engines if not engine.pinned]
    if len(engines) < 2:
        return None
    for engine in engines:
        others = [one for one in engines if one is not engine]
        rate, usual = engine.tokens_per_s, statistics.median(one.tokens_per_s for one in others)
        late = engine.behind is not None and engine.behind > 2 + 2 * max(one.behind or 0 for one in others)
        if late or (engine.running + engine.waiting > 0 and usual > 0 and rate < _SICK * usual):
            what = f"{engine.engine} samples {rate:.0f} tokens/s, others {usual:.0f}" + (
                f"; it is {engine.behind} versions behind" if late else ""
            )
            return Cause("sick_engine", what, f"see logs/{worker_of(engine.engine)}.log, and its device; end it, and it is started anew")
    return None


def _weights(signs: Signs) -> Cause | None:
    """Engines that say that they could not take a version."""
    worker = next((one for one in signs.numbers.workers if one.state.startswith(WEIGHTS_FAIL)), None)
    if worker is None:
        return None
    return Cause("weights_fail", f"{worker.worker} {worker.state}", f"see logs/{worker.worker}.log; does weights.transport reach it?")


def _rewards(signs: Signs) -> Cause | None:
    hint = "make the reward faster, or raise reward.children (async: reward.concurrency); reward.timeout_s where rollouts end as timeout"
    return _mostly("reward", Cause("slow_reward", "rewards take {:.0%} of the time of producers' slots", hint), signs)


def _tools(signs: Signs) -> Cause | None:
    hint = "make the tools faster, or raise producer.concurrency"
    return _mostly("tools", Cause("slow_tool", "tools take {:.0%} of the time of producers' slots", hint), signs)


def _mostly(state: str, cause: Cause, signs: Signs) -> Cause | None:
    """Named where slots that are in use are in this state for most of their time."""
    share = signs.share("producer", state)
    return Cause(cause.name, cause.what.format(share), cause.hint) if share > _MANY * signs.in_use > 0 else None


def _saturated(signs: Signs) -> Cause | None:
    """Engines that have no room for more."""
    if signs.saturated <= _SOME:
        return None
    return _slow_engine(signs, f"engines are saturated {signs.saturated:.0%} of the time")


def _sampling(signs: Signs) -> Cause | None:
    """Engines or producers, whoever has room and gives too little; not where most of what they give is dropped."""
    if (signs.drop_rate or 0.0) >= _MANY:
        return None
    if signs.share("producer", "wait_credit") > _MANY:
        return _slow_engine(signs, "slots are free, and answers take long")
    idle = signs.share("engine", "idle")
    if all(engine.pinned for engine in signs.numbers.engines):
        return Cause("slow_engine", f"{_starved_words(signs)}no engine serves a version", "see logs/engine-0.log")
    return Cause(
        "few_producers",
        f"{_starved_words(signs)}engines have free slots" + (f", and are idle {idle:.0%} of the time" if idle else ""),
        "raise producer.concurrency or producer.workers",
    )


def _slow_engine(signs: Signs, at: str) -> Cause:
    count = sum(not engine.pinned for engine in signs.numbers.engines)
    hint = f"add engines (engine.workers: {count}), or make them faster: engine.slots, shorter answers"
    return Cause("slow_engine", f"{_starved_words(signs)}{at}", hint)


def _starved_words(signs: Signs) -> str:
    return "" if signs.starved is None else f"the trainer waits for samples {signs.starved:.0%} of its time; "


def _slow_trainer(signs: Signs) -> Cause | None:
    if (starved := signs.starved) is None or starved > _MANY:
        return None
    return Cause(
        "slow_trainer",
        f"the trainer is what all wait for: it waits for samples only {starved:.0%} of its time",
        "trainer.ranks or a faster trainer.device; fewer engines; lower tasks.max_staleness or set tasks.hold_ahead for younger samples",
    )


def _publishing(signs: Signs) -> Cause | None:
    behind = [engine.behind for engine in signs.numbers.engines if engine.behind is not None]
    if not behind or min(behind) < 2:
        return None
    return Cause(
        "slow_weights",
        f"all engines are {min(behind)} versions behind or more",
        "weights.transport; does staging keep up? logs/engine-0.log",
    )


def _foreign(signs: Signs) -> Cause | None:
    """The worst engine's log-probs, and whether the others' are as bad."""
    furthest = _furthest(signs)
    if not furthest:
        return None
    worker, distance, _ = next(reversed(furthest.values()))
    others = [one.now for name, one in signs.distances.items() if name != worker]
    said = f"log-probs of {worker} are {distance.now:.2g} nats from the trainer's of the same weights"
    if distance.usual is not None:
        said += f", in its first batches {distance.usual:.2g}"
    if others:
        said += f"; those of the other engines {statistics.median(others):.2g}"
    return Cause(
        "foreign_logprobs",
        said,
        "does it sample by other weights, temperature or types than are trained? docs/training.md has what each fault looks like; "
        f"see logs/{worker}.log",
    )


_Search = Callable[[Signs], Cause | None]
_SUPPLY: Sequence[_Search] = (_standing, _full, _engines, _hung, _vain, _sick, _rewards, _grading, _tools, _saturated, _sampling)
_SEARCHES: Mapping[str, Sequence[_Search]] = {
    "p95_age": (_standing, _weights, _sick, _publishing, _hung, _slow_trainer, _rewards, _tools, _saturated, _sampling),
    "stream_lag_s": (_standing, _full, _slow_trainer, *_SUPPLY),
    "versions_behind": (_standing, _weights, _sick, _publishing),
    "starvation": _SUPPLY,
    "drop_rate": (_vain, _hung, _standing),
    "no_progress_s": (_standing, _full, _slow_trainer, *_SUPPLY),
    **dict.fromkeys(_LOGPROBS, (_foreign,)),
}
OBJECTIVES = tuple(_SEARCHES)
_MEASURED: Mapping[str, str] = {
    "p95_age": "age in versions of the newest batch's trained tokens, 95th percentile",
    "stream_lag_s": "seconds since the oldest message that no batch has come to",
    "versions_behind": "versions that the worst engine is behind now",
    "starvation": "part of the newest window in which the trainer waits for samples",
    "drop_rate": "part of the rollouts decided on in the newest window that was dropped",
    "no_progress_s": "seconds since the newest batch, or the start of this session",
    "logprob_float32": "nats between trainer and engine under the same weights, median of the newest 3 batches",
    "logprob_bfloat16": "nats between trainer and engine under the same weights, median of the newest 3 batches",
    "logprob_growth": "that distance over what it was in the engine's first 5 batches",
}
"""The meaning of an objective's value, for people."""


def worst_of(*levels: Level) -> Level:
    """The worst; ok of none."""
    return max(levels, key=lambda level: _SEVERITY[level], default=Level.OK)


def findings_of(event: Event) -> tuple[Finding, ...]:
    """What a `slo` event says; raises SchemaError when it is none."""
    try:
        return msgspec.convert(event.detail, _Detail).findings
    except msgspec.ValidationError as error:
        raise SchemaError(f"an event {SLO_EVENT} of {event.worker} cannot be read: {error}") from error


def detail_of(found: Sequence[Finding]) -> dict[str, Any]:
    """What a `slo` event has as its detail."""
    return msgspec.to_builtins(_Detail(level=worst_of(*(one.level for one in found)), findings=tuple(found)))


class _Detail(msgspec.Struct, frozen=True, kw_only=True):
    level: Level
    """The worst."""
    findings: tuple[Finding, ...] = ()


def line_of(one: Finding) -> str:
    """A finding in one line: what is measured, over which time, and what to do."""
    why = "; ".join(f"{cause.what}. hint: {cause.hint}" for cause in one.causes)
    said = [_MEASURED[one.objective]] if one.objective in _MEASURED else []  # of another build
    if one.reached is None:
        is_now = f"is {one.value:.3g}"
    else:
        is_now = f"was {one.reached:.3g} and is {one.value:.3g} now"
        said.append(f"the {one.level} level ends once it has stayed so low for slo.hold_s")
    what = f" ({'; '.join(said)})" if said else ""
    return f"{one.level}: slo.{one.objective} {is_now}, bound {one.bound:g}{what}: {why}"
