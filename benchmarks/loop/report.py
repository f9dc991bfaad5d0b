"""The report of `bench loop`: a pure function of its raw numbers, and its tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import msgspec

from benchmarks.loop.records import LoopRaw, LoopRun
from benchmarks.loop.ways import TITLES, LoopSpec, Way
from benchmarks.machine import Machine, describe
from benchmarks.weights.table import table

ASYNCHRONOUS, LOCKSTEP = "asynchronous", "lockstep"
OVERHEAD, TAIL = "overhead", "tail"
MOST_OVERHEAD = 0.25
LEAST_GAIN = 2.0
LEAST_ROUNDS = 3
"""Fewer say nothing about a target: another process may have slowed one of the two runs."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One contender over all rounds; medians."""

    label: str
    rounds: int
    batches_per_s: float
    low: float
    high: float
    """Slowest and fastest round."""
    samples_per_s: float
    tokens_per_s: float
    """Trained, prompts included."""
    tokens: float
    """A batch, mean."""
    cpu_ms: float
    """Processor time of a batch, all processes."""
    cpu_by_process_ms: dict[str, float]
    staleness: float
    """Of trained tokens, mean, in versions."""
    wait_ms: float
    step_ms: float
    """The trainer's wait for a batch, and its step."""


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """Two contenders, round by round."""

    label: str
    against: str
    time: float
    """Seconds a batch of `label` over those of `against`, median of the rounds' ratios."""
    low: float
    high: float
    cpu: float
    """The same for processor time."""
    rounds: int


class LoopReport(msgspec.Struct, frozen=True, kw_only=True):
    """What tables and picture show."""

    spec: LoopSpec
    machine: Machine
    overhead: list[Row]
    overheads: list[Ratio]
    """The stream against every way without a server."""
    tail: list[Row]
    gain: Ratio | None
    """Lockstep against asynchronous: how many times faster the latter is."""


def build_report(raw: LoopRaw) -> LoopReport:
    """Compute everything from the raw numbers."""
    parts = {part: [run for run in raw.runs if run.part == part] for part in (OVERHEAD, TAIL)}
    rows = {part: [_row(runs, label) for label in dict.fromkeys(run.label for run in runs)] for part, runs in parts.items()}
    others = [row.label for row in rows[OVERHEAD] if row.label != Way.STREAM]
    found = [_ratio(parts[OVERHEAD], Way.STREAM, other) for other in others]
    return LoopReport(
        spec=raw.spec,
        machine=raw.machine,
        overhead=rows[OVERHEAD],
        overheads=[ratio for ratio in found if ratio is not None],
        tail=rows[TAIL],
        gain=_ratio(parts[TAIL], LOCKSTEP, ASYNCHRONOUS),
    )


def render(report: LoopReport) -> str:
    """The whole report, ending in a line break."""
    spec = report.spec
    parts = [
        table(_header("the quickstart's loop"), [_cells(row, TITLES[Way(row.label)]) for row in report.overhead]),
        table(
            ["stream against", "time of a batch (rounds)", "CPU of a batch"],
            [[TITLES[Way(one.against)], _ratio_text(one), f"{one.cpu - 1:+.0%}"] for one in report.overheads],
        ),
        _verdict(report),
        f"CPU ms of a batch of the stream by process: {_by_process(report.overhead)}.",
    ]
    if report.tail:
        parts.append(table(_header("heavy tail"), [_cells(row, row.label) for row in report.tail]))
    if report.gain is not None:
        met = _verdict_of(report.gain, report.gain.time >= LEAST_GAIN)
        parts.append(
            f"Asynchronous (S = {spec.tail_staleness}) is {report.gain.time:.2f} times as fast as lockstep (S = 0), rounds "
            f"{report.gain.low:.2f} to {report.gain.high:.2f}; target >= {LEAST_GAIN:g}: {met}. Table engine and trainer under `up`, "
            f"16 tasks x 4 rollouts of 8 tokens, a completion's pace log-normal: {spec.tail_delay_s * 1e3:g} ms a token on average, "
            f"sigma {spec.tail_sigma:g}."
        )
    parts.append(describe(report.machine))
    return "\n\n".join(parts) + "\n"


def _verdict(report: LoopReport) -> str:
    queues = next((one for one in report.overheads if one.against == Way.QUEUES), None)
    if queues is None:
        return "The overhead's target is against queues in one process, which was not measured."
    met = _verdict_of(queues, queues.time - 1 <= MOST_OVERHEAD)
    return f"Target, the stream costs at most {MOST_OVERHEAD:.0%} of the time of queues in one process: {queues.time - 1:+.0%}, {met}."


def _verdict_of(ratio: Ratio, met: bool) -> str:
    if ratio.rounds < LEAST_ROUNDS:
        return f"not decided, {LEAST_ROUNDS} rounds are needed"
    return "met" if met else "MISSED"


def _header(title: str) -> list[str]:
    return [title, "batches/s (slowest - fastest round)", "samples/s", "tokens/s trained", "CPU ms a batch", "staleness", "waits / step ms"]


def _cells(row: Row, title: str) -> list[str]:
    return [
        title,
        f"{row.batches_per_s:.2f} ({row.low:.2f} - {row.high:.2f})",
        f"{row.samples_per_s:,.0f}",
        f"{row.tokens_per_s:,.0f}",
        f"{row.cpu_ms:.0f}",
        f"{row.staleness:.2f}",
        f"{row.wait_ms:.0f} / {row.step_ms:.0f}",
    ]


def _ratio_text(ratio: Ratio) -> str:
    return f"{ratio.time - 1:+.0%} ({ratio.low - 1:+.0%} to {ratio.high - 1:+.0%})"


def _by_process(rows: Sequence[Row]) -> str:
    parts = next((row.cpu_by_process_ms for row in rows if row.label == Way.STREAM), {})
    return ", ".join(f"{name} {ms:.0f}" for name, ms in sorted(parts.items(), key=lambda part: -part[1])) or "not measured"


def _row(runs: Sequence[LoopRun], label: str) -> Row:
    own = [run for run in runs if run.label == label]

    def median(of: Callable[[LoopRun], float]) -> float:
        return statistics.median(of(run) for run in own)

    def mean(field: str) -> float:
        return median(lambda run: statistics.fmean(getattr(batch, field) for batch in run.batches))

    speeds = [len(run.batches) / run.seconds for run in own]
    kinds = sorted({kind for run in own for kind in run.cpu_s})
    return Row(
        label=label,
        rounds=len(own),
        batches_per_s=statistics.median(speeds),
        low=min(speeds),
        high=max(speeds),
        samples_per_s=median(lambda run: sum(batch.samples for batch in run.batches) / run.seconds),
        tokens_per_s=median(lambda run: sum(batch.tokens for batch in run.batches) / run.seconds),
        tokens=mean("tokens"),
        cpu_ms=median(_cpu_ms),
        cpu_by_process_ms={kind: median(lambda run, kind=kind: run.cpu_s.get(kind, 0.0) / len(run.batches) * 1e3) for kind in kinds},
        staleness=mean("staleness"),
        wait_ms=mean("wait_s") * 1e3,
        step_ms=mean("step_s") * 1e3,
    )


def _ratio(runs: Sequence[LoopRun], label: str, against: str) -> Ratio | None:
    by = {(run.label, run.round): run for run in runs}
    both = [(run, by[against, run.round]) for run in runs if run.label == label and (against, run.round) in by]
    if not both:
        return None
    times = [(one.seconds / len(one.batches)) / (other.seconds / len(other.batches)) for one, other in both]
    loads = [_cpu_ms(one) / _cpu_ms(other) for one, other in both if _cpu_ms(other)]
    return Ratio(
        label=label,
        against=against,
        time=statistics.median(times),
        low=min(times),
        high=max(times),
        cpu=statistics.median(loads) if loads else float("nan"),
        rounds=len(both),
    )


def _cpu_ms(run: LoopRun) -> float:
    return sum(run.cpu_s.values()) / len(run.batches) * 1e3
