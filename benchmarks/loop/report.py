"""Report, tables and picture of `bench loop`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.loop.ways import ASYNCHRONOUS, LOCKSTEP, OVERHEAD, TAIL, TITLES, Way
from benchmarks.raw import Raw, read
from benchmarks.report import Middle, Report, Row, Table, Target, about, bars, picture, rows_of, stacks, write_report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_OVERHEAD = 0.25
LEAST_GAIN = 2.0
LEAST_ROUNDS = 3
"""Fewer say nothing about a target: another process may have slowed one of the two runs."""
CPU = "cpu/"
"""Prefix of the processor time of a kind of process."""
_HEADER = ("batches/s (slowest - fastest round)", "samples/s", "tokens/s trained", "CPU ms a batch", "staleness", "waits / step ms")
_COLORS: dict[str, str] = {
    Way.STREAM: "#1f6f8b",
    Way.QUEUES: "#adb5bd",
    Way.PIPES: "#ced4da",
    Way.MEMORY: "#8fb8c7",
    ASYNCHRONOUS: "#1f6f8b",
    LOCKSTEP: "#d1495b",
}
_PARTS = ("#1f6f8b", "#2a9d8f", "#edae49", "#d1495b", "#8d99ae", "#40798c", "#adb5bd")


def report_of(out: Path) -> Report:
    """Write report, table and `loop.png` from the raw file; raises DataError when there is none."""
    report = build_report(read(out, "loop"))
    write_report(out, report)
    _draw(report, out / "loop.png")
    return report


def build_report(raw: Raw) -> Report:
    """Compute everything from the raw file."""
    # The stream's time and processor time of a batch over this way's; lockstep's time over that of the asynchronous run.
    against = {"overhead": (Way.STREAM, "batch_s"), "cpu_overhead": (Way.STREAM, "cpu_ms"), "gain": (LOCKSTEP, "batch_s")}
    rows = rows_of(raw.rounds, _quantities, against)
    overhead, tail = ([row for row in rows if row.cell == cell] for cell in (OVERHEAD, TAIL))
    spec = raw.header.spec
    shown: list[Table | str] = [
        Table(("the quickstart's loop", *_HEADER), [_cells(row, TITLES[Way(row.contender)]) for row in overhead]),
        Table(("stream against", "time of a batch (rounds)", "CPU of a batch"), [_against(row) for row in overhead if _compared(row)]),
        f"CPU ms of a batch of the stream by process: {_by_process(overhead)}.",
    ]
    if tail:
        shown += [
            Table(("heavy tail", *_HEADER), [_cells(row, row.contender) for row in tail]),
            "Table engine and trainer under `up`, 16 tasks x 4 rollouts of 8 tokens, a completion's pace log-normal: "
            f"{spec['tail_delay_s'] * 1e3:g} ms a token on average, sigma {spec['tail_sigma']:g}. Asynchronous: "
            f"S = {spec['tail_staleness']}; lockstep: S = 0.",
        ]
    by_name = {row.contender: row for row in rows}
    targets = [
        _target("time of the stream over queues in one process", "overhead", by_name.get(Way.QUEUES), most=1 + MOST_OVERHEAD),
        _target("speed of asynchronous over lockstep", "gain", by_name.get(ASYNCHRONOUS), least=LEAST_GAIN),
    ]
    return Report(**about(raw.header), rows=rows, shown=shown, targets=targets)


def _quantities(values: Mapping[str, float]) -> dict[str, float]:
    seconds, batches = values["seconds"], values["batches"]
    cpu = {name: used / batches * 1e3 for name, used in values.items() if name.startswith(CPU)}
    return {
        "batches_per_s": batches / seconds,
        "batch_s": seconds / batches,
        "samples_per_s": values["samples"] / seconds,
        "tokens_per_s": values["tokens"] / seconds,
        "cpu_ms": sum(cpu.values()),
        "staleness": values["staleness"],
        "wait_ms": values["wait_s"] / batches * 1e3,
        "step_ms": values["step_s"] / batches * 1e3,
        **cpu,
    }


def _target(name: str, quantity: str, row: Row | None, *, most: float = 0.0, least: float = 0.0) -> Target:
    wanted = f"<= {most:.2f}" if most else f">= {least:.2f}"
    ratio = row.values.get(quantity) if row else None
    if row is None or ratio is None:
        return Target(name, wanted, "-", None)
    got = f"{ratio.p50:.2f} ({ratio.low:.2f} - {ratio.high:.2f})"
    if row.rounds < LEAST_ROUNDS:
        return Target(name, wanted, f"{got}; {LEAST_ROUNDS} rounds are needed", None)
    return Target(name, wanted, got, ratio.p50 <= most if most else ratio.p50 >= least)


def _compared(row: Row) -> bool:
    return row.contender != Way.STREAM and "overhead" in row.values


def _against(row: Row) -> list[str]:
    time, cpu = row.values["overhead"], row.values.get("cpu_overhead")
    spread = f"{time.p50 - 1:+.0%} ({time.low - 1:+.0%} to {time.high - 1:+.0%})"
    return [TITLES[Way(row.contender)], spread, f"{cpu.p50 - 1:+.0%}" if cpu else "-"]


def _cells(row: Row, title: str) -> list[str]:
    speed = row.values["batches_per_s"]
    middle = {name: value.p50 for name, value in row.values.items()}
    return [
        title,
        f"{speed.p50:.2f} ({speed.low:.2f} - {speed.high:.2f})",
        f"{middle['samples_per_s']:,.0f}",
        f"{middle['tokens_per_s']:,.0f}",
        f"{middle['cpu_ms']:.0f}",
        f"{middle['staleness']:.2f}",
        f"{middle['wait_ms']:.0f} / {middle['step_ms']:.0f}",
    ]


def _by_process(rows: Sequence[Row]) -> str:
    parts = next((_cpu(row) for row in rows if row.contender == Way.STREAM), {})
    return ", ".join(f"{name} {ms:.0f}" for name, ms in sorted(parts.items(), key=lambda part: -part[1])) or "not measured"


def _cpu(row: Row) -> dict[str, float]:
    """CPU milliseconds of a batch by kind of process."""
    return {name.removeprefix(CPU): value.p50 for name, value in row.values.items() if name.startswith(CPU)}


def _draw(report: Report, path: Path) -> None:
    """Batches a second, where the processor time goes, and what asynchrony gives."""
    overhead, tail = ([row for row in report.rows if row.cell == cell] for cell in (OVERHEAD, TAIL))
    with picture(path, (12, 3.8)) as figure:
        left, mid, right = figure.subplots(1, 3, width_ratios=(1.0, 1.3, 0.8))
        _bars(left, overhead, [TITLES[Way(row.contender)].replace(": ", ":\n") for row in overhead], "batches/s, the quickstart's loop")
        _stacks(mid, overhead)
        _bars(right, tail, [row.contender for row in tail], "batches/s, heavy tail of lengths")
        gains: list[Middle] = [row.values["gain"] for row in tail if row.contender == ASYNCHRONOUS and "gain" in row.values]
        for gain in gains:
            right.set_xlabel(f"{gain.p50:.1f} times as fast")


def _bars(axes: Axes, rows: Sequence[Row], names: Sequence[str], title: str) -> None:
    bars(axes, names, [row.values["batches_per_s"] for row in rows], [_COLORS.get(row.contender, "#8d99ae") for row in rows], title)


def _stacks(axes: Axes, rows: Sequence[Row]) -> None:
    used = [_cpu(row) for row in rows]
    kinds = list(dict.fromkeys(kind for parts in used for kind in parts))
    colors = dict(zip(kinds, _PARTS * (1 + len(kinds) // len(_PARTS)), strict=False))
    stacks(axes, [""] * len(rows), used, colors, "CPU ms of a batch, by process")
