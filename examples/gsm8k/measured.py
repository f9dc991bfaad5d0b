"""What a run wrote on its bus, read back for the tables and pictures of this example."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from streamrl.bus.protocol import Bus
from streamrl.errors import ConfigError
from streamrl.runtime.run_bus import open_bus
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.codec import decode
from streamrl.schemas.events import Event, MetricReport
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.subjects import EVENTS, LEDGER, METRICS, WARMUP_SOURCE, Subjects
from streamrl.schemas.versions import Version

BEYOND_ROUNDING = 4.0
"""Two roundings of one model are alike in size; tokens sampled from other weights, or behind keys and values of others, are far away."""
SAMPLER_ERROR = "train/float32_sampler_abs_diff_max"
TRAINER_ERROR = "train/float32_trainer_abs_diff_max"


class Swap(msgspec.Struct, frozen=True, kw_only=True):
    """One version that an engine committed."""

    engine: str
    number: int
    time_s: float
    lag_s: float
    """From the manifest's publication to the commit."""
    stage_s: float
    commit_ms: float


class Made(msgspec.Struct, frozen=True):
    """One engine's report: tokens sampled since its previous one, and requests in it."""

    time_s: float
    tokens: float
    running: float
    waiting: float


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A run's own records. Times are Unix seconds of the workers' clocks."""

    run: str
    entries: tuple[LedgerEntry, ...]
    swaps: tuple[Swap, ...]
    made: tuple[Made, ...]
    heldout: tuple[tuple[int, float], ...]
    """(version number, accuracy) of each evaluation."""
    began_s: float
    """When its workers first said something."""

    @property
    def learned(self) -> list[LedgerEntry]:
        """The entries of reinforcement learning."""
        return [entry for entry in self.entries if entry.source != WARMUP_SOURCE]

    @property
    def window(self) -> tuple[float, float]:
        """When reinforcement learning could begin (the warm-up had ended, an engine served), and when its last batch was trained."""
        first, last = self.learned[0], self.learned[-1]
        before = [entry.time_s for entry in self.entries if entry.version.number < first.version.number]
        served = min((swap.time_s for swap in self.swaps), default=first.time_s)
        return min(max([served, *before]), first.time_s), last.time_s

    @property
    def waited_s(self) -> float:
        """Time in that window in which the trainer waited for a batch: the first wait may have begun before it."""
        waits = values(self.learned, "perf/wait_s")
        first = self.learned[0]
        within = first.time_s - self.window[0] - first.metrics["perf/step_s"]
        return sum(waits[1:]) + max(0.0, min(waits[0], within))

    def tokens_made(self, times: list[float]) -> np.ndarray:
        """Tokens that all engines together had sampled at each of `times`; linear between their reports."""
        made = sorted(self.made, key=lambda one: one.time_s)
        if not made:
            return np.zeros(len(times))
        return np.interp(times, [one.time_s for one in made], np.cumsum([one.tokens for one in made]))


def read_run(text: str, *, base: Path | str = "runs") -> Measured:
    """The records of the run that `text` names, up or not. Raises ConfigError when there is none or nothing was trained by rewards."""
    return asyncio.run(_read(RunDir.find(text, base=base)))


async def _read(run: RunDir) -> Measured:
    config = run.load_config()
    subjects = Subjects(config.run.name)
    async with open_bus(run) as bus:
        ledger = [decode(body, LedgerEntry, where=LEDGER) for _, body in await _all(bus, LEDGER, subjects.ledger(config.trainer.name))]
        weights = [decode(body, Event, where=EVENTS) for _, body in await _all(bus, EVENTS, subjects.events("weights"))]
        evaluations = [decode(body, Event, where=EVENTS) for _, body in await _all(bus, EVENTS, subjects.events("evaluation"))]
        reports = [decode(body, MetricReport, where=METRICS) for _, body in await _all(bus, METRICS)]
        times = [decode(body, Event, where=EVENTS).time_s for _, body in await _all(bus, EVENTS)] + [report.time_s for report in reports]
    if all(entry.source == WARMUP_SOURCE for entry in ledger):
        raise ConfigError(
            f"expected batches of reinforcement learning in {run.name}, got {len(ledger)} of the warm-up", hint="let it run for longer"
        )
    return Measured(
        run=run.name,
        entries=tuple(sorted(ledger, key=lambda entry: entry.version)),
        swaps=tuple(_swap(event) for event in weights if "commit_ms" in event.detail),
        made=tuple(_made(report) for report in reports if "engine/tokens_total" in report.sum),
        heldout=tuple(
            (Version.parse(event.detail["version"]).number, event.detail["accuracy"])
            for event in evaluations
            if event.detail.get("set", "heldout") == "heldout" and event.detail["accuracy"] is not None
        ),
        began_s=min(times),
    )


async def _all(bus: Bus, stream: str, subject: str | None = None) -> list[tuple[str, bytes]]:
    """Every message that the stream holds now."""
    state = await bus.state(stream)
    found: list[tuple[str, bytes]] = []
    newest = await bus.last(subject) if subject else None
    last = state.last if subject is None else newest.sequence if newest else 0
    if last < state.first:
        return found
    async for message in bus.read(stream, after=state.first - 1, subject=subject):
        found.append((message.subject, message.body))
        if message.sequence >= last:
            break
    return found


def _swap(event: Event) -> Swap:
    detail: dict[str, Any] = event.detail
    return Swap(
        engine=detail["engine"],
        number=Version.parse(detail["version"]).number,
        time_s=event.time_s,
        lag_s=detail["lag_s"],
        stage_s=detail["stage_s"],
        commit_ms=detail["commit_ms"],
    )


def _made(report: MetricReport) -> Made:
    means = report.mean
    return Made(
        report.time_s,
        report.sum["engine/tokens_total"],
        means.get("engine/running_requests", 0.0),
        means.get("engine/waiting_requests", 0.0),
    )


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """A run of reinforcement learning in numbers, or its steady part; None where nothing was measured."""

    startup_s: float
    """From the workers' start until batches could be sampled."""
    ramp_s: float
    """From then on until the steady part began; 0 for the whole run."""
    ramp_batches: int
    batches: int
    samples: int
    seconds: float
    batches_per_s: float
    samples_per_s: float
    halves: tuple[float, float]
    """Rollouts a second in the first and in the second half of the batches."""
    response_mean: float
    """Sampled tokens of a trained rollout."""
    responses_per_s: float
    """Sampled tokens that were trained, a second."""
    made_per_s: float
    """Tokens that the engines sampled, a second."""
    trained_per_s: float
    """Tokens of the trained batches, prompts included, a second."""
    trainer_busy: float
    """Share of the time in a training step."""
    trainer_waits: float
    """Share of the time in which the trainer waited for a batch."""
    engine_running: float | None
    """Requests being decoded, mean of the engines' reports."""
    staleness_mean: float
    staleness_max: float
    in_flight: float
    queued: float
    publish_lag: float
    """The three parts of the mean age, in versions."""
    dropped: int
    swaps: int
    commit_ms_p50: float | None
    commit_ms_max: float | None
    lag_ms_p50: float | None
    """From a version's publication to its commit."""
    lag_ms_p99: float | None
    rounding_mean: float | None
    """Distance of the two log-probabilities where both had the same weights, mean over versions."""
    rounding_p99: float | None
    """99th percentile of a version's, mean over versions."""
    rounding_max: float | None
    rounding_versions: int
    """Versions that had such samples."""
    sampler_error: float | None
    trainer_error: float | None
    """Greatest distance from float32 in the rollout where sampler and trainer are furthest apart, median over versions."""
    unexplained_at: tuple[int, ...]
    """Versions where the sampler's is more than `BEYOND_ROUNDING` times the trainer's."""
    diff_mean: float
    diff_max: float
    reward_first: float
    reward_last: float
    """Mean of the first and of the last 20 batches."""

    @property
    def first_half(self) -> float:
        """Rollouts a second."""
        return self.halves[0]

    @property
    def second_half(self) -> float:
        """Rollouts a second."""
        return self.halves[1]

    @property
    def unexplained(self) -> int:
        """How many versions rounding does not explain."""
        return len(self.unexplained_at)


def totals(run: Measured, *, skip: int = 0) -> Totals:
    """The numbers of a run.

    Args:
        run: whose.
        skip: batches at its beginning that are left out, while caches, kernels and queues fill. Fewer than it has.
    """
    learned = run.learned[skip:]
    ready, end = run.window
    begin = run.learned[skip - 1].time_s if skip else ready
    seconds = max(end - begin, 1e-9)
    waits = values(learned, "perf/wait_s")
    responses = sum(values(learned, "rollout/tokens_trained"))
    middle = len(learned) // 2
    swaps = [swap for swap in run.swaps if begin < swap.time_s <= end]  # without the version that an engine began with
    running = [one.running for one in run.made if begin <= one.time_s <= end]
    first, last = run.tokens_made([begin, end])
    rounding = values(learned, "train/same_weights_logprob_abs_diff")
    rewards = values(learned, "rollout/raw_reward")
    samples = sum(entry.num_samples for entry in learned)
    return Totals(
        startup_s=ready - run.began_s,
        ramp_s=begin - ready,
        ramp_batches=skip,
        batches=len(learned),
        samples=samples,
        seconds=seconds,
        batches_per_s=len(learned) / seconds,
        samples_per_s=samples / seconds,
        halves=(_rate(learned[:middle], begin), _rate(learned[middle:], learned[middle - 1].time_s if middle else begin)),
        response_mean=responses / max(1, samples),
        responses_per_s=responses / seconds,
        made_per_s=float(last - first) / seconds,
        trained_per_s=sum(entry.num_tokens for entry in learned) / seconds,
        trainer_busy=sum(values(learned, "perf/step_s")) / seconds,
        trainer_waits=(sum(waits) if skip else run.waited_s) / seconds,
        engine_running=_mean(running),
        staleness_mean=_mean(values(learned, "staleness/mean")) or 0.0,
        staleness_max=max(values(learned, "staleness/max"), default=0.0),
        in_flight=_mean(values(learned, "staleness/in_flight")) or 0.0,
        queued=_mean(values(learned, "staleness/queued")) or 0.0,
        publish_lag=_mean(values(learned, "staleness/publish_lag")) or 0.0,
        dropped=sum(max(1, len(drop.rollouts)) for entry in learned for drop in entry.drops),
        swaps=len(swaps),
        commit_ms_p50=_percentile([swap.commit_ms for swap in swaps], 50),
        commit_ms_max=_percentile([swap.commit_ms for swap in swaps], 100),
        lag_ms_p50=_percentile([1e3 * swap.lag_s for swap in swaps], 50),
        lag_ms_p99=_percentile([1e3 * swap.lag_s for swap in swaps], 99),
        rounding_mean=_mean(rounding),
        rounding_p99=_mean(values(learned, "train/same_weights_logprob_abs_diff_p99")),
        rounding_max=max(values(learned, "train/same_weights_logprob_abs_diff_max"), default=None),
        rounding_versions=len(rounding),
        sampler_error=_percentile(values(learned, SAMPLER_ERROR), 50),
        trainer_error=_percentile(values(learned, TRAINER_ERROR), 50),
        unexplained_at=tuple(entry.version.number for entry in learned if _beyond_rounding(entry)),
        diff_mean=_mean(values(learned, "train/train_rollout_logprob_abs_diff")) or 0.0,
        diff_max=max(values(learned, "train/train_rollout_logprob_abs_diff_max"), default=0.0),
        reward_first=_mean(rewards[:20]) or 0.0,
        reward_last=_mean(rewards[-20:]) or 0.0,
    )


def _rate(entries: list[LedgerEntry], begin: float) -> float:
    """Rollouts a second of batches that follow one another from `begin` on."""
    return sum(entry.num_samples for entry in entries) / max(entries[-1].time_s - begin, 1e-9) if entries else 0.0


def _beyond_rounding(entry: LedgerEntry) -> bool:
    both = [entry.metrics.get(name) for name in (SAMPLER_ERROR, TRAINER_ERROR)]
    return both[0] is not None and both[1] is not None and both[0] > BEYOND_ROUNDING * both[1]


def values(entries: list[LedgerEntry], name: str) -> list[float]:
    """A metric of the entries that have it."""
    return [entry.metrics[name] for entry in entries if name in entry.metrics]


def _mean(numbers: list[float]) -> float | None:
    return float(np.mean(numbers)) if numbers else None


def _percentile(numbers: list[float], q: float) -> float | None:
    return float(np.percentile(numbers, q)) if numbers else None
