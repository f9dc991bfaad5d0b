"""Report, tables and picture of `bench bus`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.bus.plan import Cell, Transport
from benchmarks.machine import describe
from benchmarks.raw import Raw, read
from benchmarks.report import Middle, Report, Row, Table, Target, about, picture, plain, rows_of, short, write_report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LARGE, _MIDDLE = Cell(64, 2048).name, Cell(8, 2048).name
WANTED_TOKENS_PER_S = 10e6
WANTED_RATIO = 2.0
_HEADER = (
    "samples x tokens",
    "over",
    "samples/s",
    "million tokens/s (slowest - fastest round)",
    "ours / this",
    "CPU ns a token: producer + server + consumer",
    "bytes a token",
)
_PARTS = ("producer_ns", "server_ns", "consumer_ns")
_LOOKS = {
    Transport.STREAMRL: ("#1f6f8b", "streamrl (JetStream on disk, Arrow)"),
    Transport.REDIS_ORJSON: ("#d1495b", "Redis stream in memory, orjson"),
    Transport.REDIS_PICKLE: ("#edae49", "Redis stream in memory, pickle"),
    Transport.ZMQ_MSGPACK: ("#8d96a3", "ZMQ, MessagePack (nothing stored)"),
    Transport.RAY: ("#66a182", "Ray object store (nothing stored)"),
}


def report_of(out: Path) -> Report:
    """Write report, table and `bus.png` from the raw file; raises DataError when there is none."""
    report = build_report(read(out, "bus"))
    write_report(out, report)
    _draw(report, out / "bus.png")
    return report


def build_report(raw: Raw) -> Report:
    """Compute everything from the raw file."""
    # A ratio is ours over this one's tokens a second.
    rows = rows_of(raw.rounds, _quantities, {"ratio": (Transport.STREAMRL, "tokens_per_s")})
    rows.sort(key=lambda row: (Cell.named(row.cell).place, list(Transport).index(Transport(row.contender))))
    values = {(row.cell, row.contender): row.values for row in rows}
    notes = [f"Left out: {name}: {reason}" for name, reason in raw.named("left out").items()]
    rounds = len({one.round for one in raw.rounds})
    large, redis = values.get((_LARGE, Transport.STREAMRL)), values.get((_MIDDLE, Transport.REDIS_ORJSON))
    return Report(
        **about(raw.header),
        rows=rows,
        shown=[
            Table(_HEADER, [_cells(row) for row in rows]),
            f"{rounds} rounds with fresh servers and processes; in each, every shape goes over every transport in turn. Medians.",
            *notes,
        ],
        targets=[
            _target(f"tokens/s through one consumer at {_LARGE}", WANTED_TOKENS_PER_S, large, "tokens_per_s"),
            _target(f"tokens/s over those of redis-orjson at {_MIDDLE}", WANTED_RATIO, redis, "ratio"),
        ],
    )


def _quantities(values: Mapping[str, float]) -> dict[str, float]:
    tokens, wall_s = values["tokens"], values["wall_s"]
    return {
        "messages": values["messages"] / values["tasks"],
        "body_bytes": values["nbytes"] / tokens,
        "samples_per_s": values["samples"] / wall_s,
        "tokens_per_s": tokens / wall_s,
        "producer_ns": values["producer_s"] / tokens * 1e9,
        "server_ns": values["server_s"] / tokens * 1e9,
        "consumer_ns": values["consumer_s"] / tokens * 1e9,
    }


def _target(name: str, wanted: float, values: Mapping[str, Middle] | None, quantity: str) -> Target:
    got = values[quantity].p50 if values and quantity in values else None
    return Target(name, f">= {short(wanted)}", "-" if got is None else short(got), None if got is None else got >= wanted)


def _cells(row: Row) -> list[str]:
    values = row.values
    tokens, ratio = values["tokens_per_s"], values.get("ratio")
    parts = [values[part].p50 for part in _PARTS]
    return [
        row.cell,
        row.contender,
        f"{values['samples_per_s'].p50:,.0f}",
        f"{short(tokens.p50 / 1e6)} ({short(tokens.low / 1e6)} - {short(tokens.high / 1e6)})",
        f"{short(ratio.p50)} ({short(ratio.low)} - {short(ratio.high)})" if ratio and row.contender != Transport.STREAMRL else "",
        f"{' + '.join(map(short, parts))} = {short(sum(parts))}",
        f"{values['body_bytes'].p50:.1f}" if values["body_bytes"].p50 else "-",
    ]


def _draw(report: Report, path: Path) -> None:
    """Tokens a second above, CPU time a token below, a column for every shape."""
    rows: Sequence[Row] = report.rows
    cells = list(dict.fromkeys(row.cell for row in rows))
    used = [transport for transport in Transport if any(row.contender == transport for row in rows)]
    with picture(path, (max(6.0, 1.3 + 1.35 * len(cells)), 6.4)) as figure:
        from matplotlib.patches import Patch

        above, below = figure.subplots(2, 1)
        _bars(above, rows, cells, used, lambda row: [getattr(row.values["tokens_per_s"], name) / 1e6 for name in ("p50", "low", "high")])
        # In full only: the parts of a bar have no meaning on a scale of powers of ten.
        _bars(below, rows, cells, used, lambda row: [sum(row.values[part].p50 for part in _PARTS)] * 3)
        above.set_ylabel("million tokens/s")
        below.set_ylabel("CPU ns a token, all processes")
        below.set_xlabel("samples x tokens of a message")
        above.set_title("publish, read, decode: one producer, one consumer", loc="left", fontsize=11, fontweight="bold")
        above.set_title(describe(report.machine), loc="right", fontsize=4.5, color="#868e96")
        above.legend([Patch(color=_LOOKS[one][0]) for one in used], [_LOOKS[one][1] for one in used], frameon=False, fontsize=8, ncols=2)


def _bars(axes: Axes, rows: Sequence[Row], cells: list[str], used: list[Transport], heights: Callable[[Row], Sequence[float]]) -> None:
    """A bar for each row, and a line from its least to its greatest value."""
    width = 0.84 / len(used)
    for row in rows:
        transport = Transport(row.contender)
        x = cells.index(row.cell) + (used.index(transport) - (len(used) - 1) / 2) * width
        height, *ends = heights(row)
        axes.bar(x, height, width * 0.92, color=_LOOKS[transport][0])
        axes.plot([x, x], ends, color="#212529", linewidth=0.9)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(range(len(cells)), cells, fontsize=8)
    plain(axes, grid="y")
