"""The report of `bench engine`: a pure function of its raw file, and its table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from benchmarks.engine.records import Failure, Raw, Timing
from benchmarks.machine import Machine, describe
from benchmarks.weights.table import table

OURS, BASELINE = "streamrl", "generate"
TARGET = 1.0
"""Least ratio to the baseline, at every batch size."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One contender at one batch size, over all rounds."""

    model: str
    batch: int
    contender: str
    rounds: int
    tokens_per_s: float
    """Median over rounds."""
    low: float
    high: float
    """Slowest and fastest round."""
    cpu_us_per_token: float
    """Microseconds of processor time, median over rounds."""
    ratio: float | None
    """Tokens a second over the baseline's of the same round, median over rounds; None without the baseline."""
    cpu_ratio: float | None
    """The same in processor time, the baseline's over this one's: above 1, this one needs less."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What the table shows."""

    machine: Machine
    parameters: dict[str, int]
    rows: list[Row]
    failures: list[Failure]
    logprob_distances: dict[str, float]
    missed: list[str]
    """Where ours is slower than the baseline."""
    prompt_tokens: int
    new_tokens: int
    threads: int


def build_report(raw: Raw) -> Report:
    """Compute everything from the raw file."""
    cells = dict.fromkeys((timing.model, timing.batch, timing.contender) for timing in raw.timings)
    rows = [_row(raw.timings, *cell) for cell in cells]
    missed = [f"{row.model}, batch {row.batch}" for row in rows if row.contender == OURS and row.ratio is not None and row.ratio < TARGET]
    return Report(
        machine=raw.machine,
        parameters=raw.parameters,
        rows=rows,
        failures=raw.failures,
        logprob_distances=raw.logprob_distances,
        missed=missed,
        prompt_tokens=raw.spec.prompt_tokens,
        new_tokens=raw.spec.new_tokens,
        threads=raw.spec.threads,
    )


def render(report: Report) -> str:
    """The whole report, ending in a line break."""
    header = ["model", "batch", "generates", "tokens/s (slowest - fastest round)", "CPU us a token", "/ generate", "CPU: generate /"]
    lines = [table(header, [_cells(row) for row in report.rows])]
    models = ", ".join(f"{name} {count / 1e6:.2f} M parameters" for name, count in report.parameters.items())
    distance = max(report.logprob_distances.values(), default=0.0)
    lines.append(
        f"{models}; float32, {report.threads} thread(s), prompts of {report.prompt_tokens} tokens, {report.new_tokens} new ones each, "
        "temperature 1. Medians over rounds; every round runs all contenders, one after the other. All sequences are equally long, the "
        f"best case of generate. Ours returns each token's log-prob and version (at most {distance:.1e} off transformers); "
        "the others are not asked for log-probs."
    )
    lines += [f"{failure.contender} does not run here ({failure.model}): {failure.reason}" for failure in report.failures]
    verdict = f"MISSED at {'; '.join(report.missed)}" if report.missed else "met"
    lines.append(f"Target, at least generate at every batch size: {verdict}.")
    lines.append(describe(report.machine))
    return "\n\n".join(lines) + "\n"


def _row(timings: Sequence[Timing], model: str, batch: int, contender: str) -> Row:
    def of(name: str) -> dict[int, Timing]:
        return {one.round: one for one in timings if (one.model, one.batch, one.contender) == (model, batch, name)}

    own, base = of(contender), of(BASELINE)
    speeds = [one.tokens / one.wall_s for one in own.values()]
    both = [(own[number], base[number]) for number in own if number in base]
    return Row(
        model=model,
        batch=batch,
        contender=contender,
        rounds=len(own),
        tokens_per_s=statistics.median(speeds),
        low=min(speeds),
        high=max(speeds),
        cpu_us_per_token=statistics.median(one.cpu_s / one.tokens * 1e6 for one in own.values()),
        ratio=statistics.median(a.tokens / a.wall_s / (b.tokens / b.wall_s) for a, b in both) if both else None,
        cpu_ratio=statistics.median(b.cpu_s / b.tokens / (a.cpu_s / a.tokens) for a, b in both) if both else None,
    )


def _cells(row: Row) -> list[str]:
    return [
        row.model,
        str(row.batch),
        row.contender,
        f"{row.tokens_per_s:,.0f} ({row.low:,.0f} - {row.high:,.0f})",
        f"{row.cpu_us_per_token:,.0f}",
        "-" if row.ratio is None else f"{row.ratio:.2f}",
        "-" if row.cpu_ratio is None else f"{row.cpu_ratio:.2f}",
    ]
