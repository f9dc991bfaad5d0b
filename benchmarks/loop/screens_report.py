"""Report and table of `bench loop --screens`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.loop.report import CPU, LEAST_ROUNDS
from benchmarks.loop.screens import SCREENS, Screen
from benchmarks.raw import Raw, read
from benchmarks.report import Middle, Report, Row, Table, Target, about, rows_of, write_report

MOST_FILE, MOST_SCREENS, MOST_MB = 0.01, 0.03, 100.0
_OWN = ("trainer", "engine", "producer", "feeder", "evaluator", "nats-server")
"""The run itself; every other process looks at it. The supervisor counts among those, though it keeps the workers as well."""
_SHARE, _MS_PER_S, _BEFORE, _MB = "share/", "ms_per_s/", "before/", "mb/"
_SAID = {
    Screen.FILE: "file alone",
    Screen.PAGE: "page and a browser",
    Screen.PAGE_TOP: "page, a browser and top",
    Screen.TENSORBOARD: "TensorBoard",
    Screen.WANDB: "W&B, offline",
    Screen.TRACKIO: "trackio",
    Screen.PROMETHEUS: "Prometheus",
}


def report_of(out: Path) -> Report:
    """Write report and table from the raw file; raises DataError when there is none."""
    report = build_report(read(out, SCREENS))
    write_report(out, report)
    return report


def build_report(raw: Raw) -> Report:
    """Compute everything from the raw file."""
    rows = rows_of(raw.rounds, _quantities, {"against": (Screen.FILE, "per_cpu_s")})
    by_name = {row.contender: row for row in rows}
    runs = _runs_of(raw)
    return Report(
        **about(raw.header),
        rows=rows,
        shown=[
            Table(
                (
                    "looks at the run",
                    "runs",
                    "slices",
                    "batches/s",
                    "CPU ms a batch",
                    "against the file alone",
                    "what looks, of the run's own CPU",
                ),
                _screens(rows, runs),
            ),
            Table(("meanwhile", "process", "CPU ms a second", "of the run's own CPU", "CPU s before", "MB"), _processes(rows)),
            f"The run's own CPU is that of {', '.join(_OWN[:-2])} and nats-server. The supervisor writes the file and keeps the "
            "workers; both are counted. CPU s before: until the measured batches began, the start included. MB: resident at most while it "
            "trains (the end, with its plot, is left out), what processes share counted in each; the most of all runs. All else are "
            "medians over the slices of all runs, least and greatest.",
        ],
        targets=[
            _target("CPU of the file (supervisor as a whole)", MOST_FILE, by_name.get(Screen.FILE), runs),
            _target("CPU of file, page and top", MOST_SCREENS, by_name.get(Screen.PAGE_TOP), runs),
            _memory(by_name.get(Screen.PAGE_TOP), runs),
        ],
    )


def _quantities(values: Mapping[str, float]) -> dict[str, float]:
    cpu = {name.removeprefix(CPU): used for name, used in values.items() if name.startswith(CPU)}
    own = sum(cpu.get(kind, 0.0) for kind in _OWN)
    total = sum(cpu.values())
    found = {
        "batches_per_s": values["batches"] / values["seconds"],
        "cpu_ms": total / values["batches"] * 1e3,
        "per_cpu_s": values["batches"] / total if total else 0.0,
        "share": (total - own) / own if own else 0.0,
    }
    for kind in (kind for kind in cpu if kind not in _OWN):
        found[_SHARE + kind] = cpu[kind] / own if own else 0.0
        found[_MS_PER_S + kind] = cpu[kind] / values["seconds"] * 1e3
        found[_BEFORE + kind] = values.get(f"before/{kind}", 0.0)
        found[_MB + kind] = values.get(f"bytes/{kind}", 0.0) / 1e6
    return found


def _runs_of(raw: Raw) -> dict[str, int]:
    """How often each was run; a round in the raw file is a slice of a run, which earlier files know nothing of."""
    slices = raw.header.spec.get("slices", 1)
    return Counter(contender for contender, _ in {(one.contender, one.round // slices) for one in raw.rounds})


def _screens(rows: Sequence[Row], runs: Mapping[str, int]) -> list[list[str]]:
    lines: list[list[str]] = []
    for row in rows:
        speed, against = row.values["batches_per_s"], row.values.get("against")
        more = f"{against.p50 - 1:+.1%} ({against.low - 1:+.1%} to {against.high - 1:+.1%})" if against else "-"
        speeds = f"{speed.p50:.2f} ({speed.low:.2f} - {speed.high:.2f})"
        counts, cpu_ms = [str(runs[row.contender]), str(row.rounds)], f"{row.values['cpu_ms'].p50:.0f}"
        lines.append([_SAID[Screen(row.contender)], *counts, speeds, cpu_ms, more, _spread(row.values["share"])])
    return lines


def _processes(rows: Sequence[Row]) -> list[list[str]]:
    lines: list[list[str]] = []
    for row in rows:
        for kind in (name.removeprefix(_SHARE) for name, used in row.values.items() if name.startswith(_SHARE) and used.high):
            ms, before = (row.values[what + kind].p50 for what in (_MS_PER_S, _BEFORE))
            size, share = row.values[_MB + kind].high, _spread(row.values[_SHARE + kind])
            lines.append([_SAID[Screen(row.contender)], kind, f"{ms:.1f}", share, f"{before:.1f}", f"{size:.0f}"])
    return lines


def _spread(share: Middle) -> str:
    return f"{share.p50:.2%} ({share.low:.2%} - {share.high:.2%})"


def _target(name: str, most: float, row: Row | None, runs: Mapping[str, int]) -> Target:
    if row is None:
        return Target(name, f"<= {most:.0%}", "-", None)
    return _judged(Target(name, f"<= {most:.0%}", _spread(row.values["share"]), row.values["share"].p50 <= most), runs[row.contender])


def _memory(row: Row | None, runs: Mapping[str, int]) -> Target:
    found = {} if row is None else {kind: row.values[_MB + kind].high for kind in ("supervisor", "page", "top") if _MB + kind in row.values}
    name, wanted = "memory of supervisor, page and top", f"<= {MOST_MB:.0f} MB"
    if row is None or len(found) < 3:
        return Target(name, wanted, "-", None)
    got = ", ".join(f"{kind} {size:.0f} MB" for kind, size in found.items())
    return _judged(Target(name, wanted, got, max(found.values()) <= MOST_MB), runs[row.contender])


def _judged(target: Target, runs: int) -> Target:
    """Few runs say nothing, in however many slices."""
    if runs >= LEAST_ROUNDS:
        return target
    return Target(target.name, target.wanted, f"{target.got}; {LEAST_ROUNDS} runs are needed", None)
