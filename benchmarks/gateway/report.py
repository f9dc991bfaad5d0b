"""Report and table of `bench gateway`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.gateway.spec import ENGINE, GATEWAY, GatewaySpec
from benchmarks.raw import Raw, read
from benchmarks.report import Report, Row, Table, Target, about, rows_of, write_report

MOST_MS = 3.0
MIB = 1 << 20
_HEADER = ("calls", "calls/s", "ms at p50 (fastest - slowest round)", "ms at p99", "processor ms a call", "load")


def report_of(out: Path) -> Report:
    """Write report and table from the raw file; raises DataError when there is none."""
    report = build_report(read(out, "gateway"))
    write_report(out, report)
    return report


def build_report(raw: Raw) -> Report:
    """Compute everything from the raw file."""
    spec = msgspec.convert(raw.header.spec, GatewaySpec)

    def quantities(values: Mapping[str, float]) -> dict[str, float]:
        cpu_ms = 1e3 * values["cpu_s"] / values["calls"]
        return {"p50_ms": 1e3 * values["p50_s"], "p99_ms": 1e3 * values["p99_s"], "cpu_ms": cpu_ms, "load": values["load"]}

    rows = rows_of(raw.rounds, quantities, {})
    added = _added(raw)
    memory, opened_s = raw.named("memory"), raw.named("sessions").get("opened_s", 0.0)
    turns = raw.named("turns").get("stored", 0)
    grown = (memory["used"] - memory["open"]) / max(1, turns)
    got, met = ("-", None) if added is None else (f"{added:.2f} ms", added <= MOST_MS)
    target = Target("what the gateway adds at p50", f"<= {MOST_MS:g} ms", got, met)
    return Report(
        **about(raw.header),
        rows=rows,
        shown=[
            Table(_HEADER, [_line(row, spec) for row in rows]),
            f"{spec.sessions} sessions are open (started in {opened_s:.1f} s); calls of {spec.tokens} tokens go round among them, at their "
            "time whether those before are answered or not. Prompts as long go to the engine itself over the gateway's channel. "
            "A whole run under `up`: nats-server with an account a role, table engine and trainer, feeder, gateway. What is added is the "
            "difference of a round's two medians, its median over rounds.",
            f"Memory of the gateway: {memory['idle'] / MIB:.0f} MiB before, {memory['open'] / MIB:.0f} MiB with the sessions, "
            f"{memory['used'] / MIB:.0f} MiB after {turns} turns ({grown / 1024:.1f} KiB a turn).",
        ],
        targets=[target],
    )


def _added(raw: Raw) -> float | None:
    """Milliseconds between the two medians of a round, its median over rounds."""
    medians = {(one.contender, one.round): one.values["p50_s"] for one in raw.rounds}
    both = [medians[GATEWAY, number] - at for (name, number), at in medians.items() if name == ENGINE and (GATEWAY, number) in medians]
    return 1e3 * float(np.median(both)) if both else None


def _line(row: Row, spec: GatewaySpec) -> list[str]:
    p50, values = row.values["p50_ms"], row.values
    cpu = f"{values['cpu_ms'].p50:.2f}" if row.contender == GATEWAY else "-"
    between = f"{p50.p50:.2f} ({p50.low:.2f} - {p50.high:.2f})"
    return [row.contender, f"{spec.rate:g}", between, f"{values['p99_ms'].p50:.1f}", cpu, f"{values['load'].p50:.1f}"]
