"""The report of `bench bus`: a pure function of its raw file, and its tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import msgspec

from benchmarks.bus.plan import Cell, Transport
from benchmarks.bus.records import BusRun, Measured
from benchmarks.machine import Machine, describe
from benchmarks.weights.table import table

_MILLION = 1e6
_LARGE, _MIDDLE = Cell(64, 2048), Cell(8, 2048)
WANTED_TOKENS_PER_S = 10e6
WANTED_RATIO = 2.0


class Middle(msgspec.Struct, frozen=True):
    """Median over rounds, least and greatest."""

    p50: float
    low: float
    high: float


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One shape over one transport, over all rounds."""

    transport: Transport
    cell: Cell
    rounds: int
    messages: float
    """Messages a task."""
    body_bytes: float
    """Bytes of bodies a token; 0 where they are not seen."""
    samples_per_s: Middle
    tokens_per_s: Middle
    producer_ns: float
    """CPU nanoseconds a token, median over rounds."""
    server_ns: float
    consumer_ns: float
    ratio: Middle | None
    """Our tokens a second over this transport's in the same round; None for ours, and without it."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Something promised; `met` is None where it was not measured."""

    name: str
    wanted: float
    got: float | None
    met: bool | None


class BusReport(msgspec.Struct, frozen=True, kw_only=True):
    """What tables and picture show."""

    machine: Machine
    rounds: int
    left_out: dict[str, str]
    rows: list[Row]
    targets: list[Target]


def build_report(run: BusRun) -> BusReport:
    """Compute everything from the raw file."""
    found: dict[tuple[Cell, Transport], list[Measured]] = {}
    for one in run.measured:
        found.setdefault((one.cell, one.transport), []).append(one)
    rows = [_row(measured, found.get((cell, Transport.STREAMRL), [])) for (cell, _), measured in sorted(found.items(), key=_order)]
    by_key = {(row.cell, row.transport): row for row in rows}
    large, redis = by_key.get((_LARGE, Transport.STREAMRL)), by_key.get((_MIDDLE, Transport.REDIS_ORJSON))
    ratio = redis.ratio if redis is not None else None
    targets = [
        _target(f"tokens/s through one consumer at {_LARGE.name}", WANTED_TOKENS_PER_S, large and large.tokens_per_s.p50),
        _target(f"tokens/s over those of redis-orjson at {_MIDDLE.name}", WANTED_RATIO, ratio and ratio.p50),
    ]
    return BusReport(machine=run.machine, rounds=run.rounds, left_out=run.left_out, rows=rows, targets=targets)


def _order(item: tuple[tuple[Cell, Transport], list[Measured]]) -> tuple[int, int, int]:
    (cell, transport), _ = item
    return cell.tokens, cell.samples, list(Transport).index(transport)


def _row(measured: Sequence[Measured], ours: Sequence[Measured]) -> Row:
    first = measured[0]
    speeds = {one.round: one.tokens / one.wall_s for one in ours}
    ratios = [speeds[one.round] / (one.tokens / one.wall_s) for one in measured if one.round in speeds]
    return Row(
        transport=first.transport,
        cell=first.cell,
        rounds=len(measured),
        messages=statistics.median(one.messages / one.tasks for one in measured),
        body_bytes=statistics.median(one.nbytes / one.tokens for one in measured),
        samples_per_s=_middle([one.samples / one.wall_s for one in measured]),
        tokens_per_s=_middle([one.tokens / one.wall_s for one in measured]),
        producer_ns=_ns(measured, lambda one: one.producer_s),
        server_ns=_ns(measured, lambda one: one.server_s),
        consumer_ns=_ns(measured, lambda one: one.consumer_s),
        ratio=_middle(ratios) if ratios and first.transport is not Transport.STREAMRL else None,
    )


def _ns(measured: Sequence[Measured], seconds: Callable[[Measured], float]) -> float:
    return statistics.median(seconds(one) / one.tokens * 1e9 for one in measured)


def _middle(values: Sequence[float]) -> Middle:
    return Middle(statistics.median(values), min(values), max(values))


def _target(name: str, wanted: float, got: float | None) -> Target:
    return Target(name=name, wanted=wanted, got=got, met=None if got is None else got >= wanted)


def render(report: BusReport) -> str:
    """The whole report, ending in a line break."""
    header = [
        "samples x tokens",
        "over",
        "samples/s",
        "million tokens/s (slowest - fastest round)",
        "ours / this",
        "CPU ns a token: producer + server + consumer",
        "bytes a token",
    ]
    lines = [
        table(header, [_cells(row) for row in report.rows]),
        table(["target", "wanted", "got", "met"], [_target_cells(target) for target in report.targets]),
        f"{report.rounds} rounds with fresh servers and processes; in each, every shape goes over every transport in turn. Medians.",
        describe(report.machine) + ".",
        *(f"Left out: {name}: {reason}" for name, reason in report.left_out.items()),
    ]
    return "\n\n".join(lines) + "\n"


def _cells(row: Row) -> list[str]:
    tokens, ratio = row.tokens_per_s, row.ratio
    parts = (row.producer_ns, row.server_ns, row.consumer_ns)
    return [
        row.cell.name,
        row.transport,
        f"{row.samples_per_s.p50:,.0f}",
        " ".join((_short(tokens.p50 / _MILLION), f"({_short(tokens.low / _MILLION)} - {_short(tokens.high / _MILLION)})")),
        f"{_short(ratio.p50)} ({_short(ratio.low)} - {_short(ratio.high)})" if ratio else "",
        f"{' + '.join(_short(part) for part in parts)} = {_short(sum(parts))}",
        f"{row.body_bytes:.1f}" if row.body_bytes else "-",
    ]


def _target_cells(target: Target) -> list[str]:
    met = "not measured" if target.met is None else "yes" if target.met else "NO"
    return [target.name, f">= {_short(target.wanted)}", "-" if target.got is None else _short(target.got), met]


def _short(value: float) -> str:
    """Three digits or so."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
