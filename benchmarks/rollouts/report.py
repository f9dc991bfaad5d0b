"""Report and table of `bench rollouts`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.raw import Raw, read
from benchmarks.report import Check, Report, Row, Table, Target, about, rows_of, write_report
from benchmarks.rollouts.flags import CONFIGURED, FLAG_SETS, SWEEP, gain, speeds_of, toml_lines
from benchmarks.rollouts.spec import BEST, LEFT_OUT, PLAIN, SLOTS, STACK, TOGETHER

LEAST = 0.95
_BUSY = 0.9
"""The share of a core above which a process is at its limit."""
_FULL = 0.9
"""The share of slots in use above which free slots do not explain a low speed."""
_HEADER = ("answers", "asked by", "rollouts/s", "tokens/s (slowest - fastest round)", "of plain", "of groups", "slots in use", "waiting")
_FLAGS_HEADER = ("flags", "answers", "tokens/s", "of the configured", "start", "what it may help with")


def report_of(out: Path) -> Report:
    """Write report and table from the raw file; raises DataError when there is none."""
    report = build_report(read(out, "rollouts"))
    write_report(out, report)
    return report


def build_report(raw: Raw) -> Report:
    """Compute everything from the raw file."""
    slots = float(raw.named(SLOTS).get("all engines", 0))
    rows = rows_of(raw.rounds, _quantities, {"of_plain": (PLAIN, "token_s"), "of_groups": (TOGETHER, "token_s")})
    shown: list[Table | str] = []
    if flags := [row for row in rows if row.cell.startswith(SWEEP)]:
        shown += _sweep(raw, flags)
    measured = [row for row in rows if not row.cell.startswith(SWEEP)]
    shown.append(Table(_HEADER, [_cells(row, slots) for row in measured]))
    stacks = [row for row in measured if row.contender == STACK]
    shown += [said for row in stacks if (said := where_it_goes(row, slots))]
    shares = {row.cell: share for row in stacks if (share := share_of(row)) is not None}
    got = "; ".join(f"{cell}: {share:.1%}" for cell, share in shares.items())
    return Report(
        **about(raw.header),
        rows=rows,
        shown=shown,
        targets=[
            Target(
                "tokens/s of the whole stack over those of the faster plain client of the same servers",
                f">= {LEAST:.0%}",
                got or "-",
                all(share >= LEAST for share in shares.values()) if shares else None,
            )
        ],
        checks=[Check("every rollout gave a sample", all(not one.values["failed"] for one in raw.rounds))],
    )


def share_of(row: Row) -> float | None:
    """The stack's speed over that of the faster plain client; None where there is none."""
    return min((row.values[name].p50 for name in ("of_plain", "of_groups") if name in row.values), default=None)


def where_it_goes(row: Row, slots: float) -> str:
    """Say what is known of the time that the stack needs beyond a plain client; empty where it is as fast, or nobody else was asked."""
    values = {name: middle.p50 for name, middle in row.values.items()}
    share = share_of(row)
    if share is None or share >= LEAST:
        return ""
    shares = sorted(((spent, name.removeprefix("cpu/")) for name, spent in values.items() if name.startswith("cpu/")), reverse=True)
    busy = [name for spent, name in shares if spent >= _BUSY]
    parts = [f"{name} {spent:.0%}" for spent, name in shares if spent >= 0.05]
    text = f"{row.cell}, the stack: processors' time by process, of a core each: {', '.join(parts)}."
    if slots and values.get("running", 0.0) < _FULL * slots:
        where = "requests wait at the server all the same" if values.get("waiting", 0.0) >= 1 else "and no request waited at the server"
        text += f" Of {slots:g} slots {values.get('running', 0.0):.0f} were in use, {where}."
        if values.get("waiting", 0.0) < 1:
            text += " The requests came too slowly: raise producer.concurrency, or look at what is busy."
    if busy:
        text += f" At its limit: {', '.join(busy)}."
    return text


def _sweep(raw: Raw, flags: Sequence[Row]) -> list[Table | str]:
    speeds = {speed.name: speed for speed in speeds_of(raw.rounds)}
    lines: list[list[str]] = []
    for row in flags:
        speed, base = speeds[row.contender], speeds.get(CONFIGURED)
        tokens = row.cell.removeprefix(SWEEP)
        of_base = "-" if base is None else f"{gain(speed, base):.2f} over all lengths"
        why = FLAG_SETS[row.contender].why if row.contender in FLAG_SETS else "the changes of all sets that were faster"
        start = f"{row.values['start_s'].p50:.0f} s"
        lines.append([row.contender, tokens, f"{row.values['tokens_per_s'].p50:,.0f}", of_base, start, why])
    shown: list[Table | str] = [Table(_FLAGS_HEADER, lines)]
    shown += [f"{name} was left out: {reason}" for name, reason in raw.named(LEFT_OUT).items()]
    best: Mapping[str, Any] = raw.named(BEST)
    for name, chosen in best.items():
        shown.append(f"The best set is {name!r}, which the stack below has:\n\n```toml\n{toml_lines(chosen)}\n```")
    return shown


def _quantities(values: Mapping[str, float]) -> dict[str, float]:
    found = {
        "rollouts_per_s": values["rollouts"] / values["seconds"],
        "tokens_per_s": values["tokens"] / values["seconds"],
        "token_s": values["seconds"] / max(1.0, values["tokens"]),
    }
    return found | {name: value for name, value in values.items() if name.startswith("cpu/") or name in ("running", "waiting", "start_s")}


def _cells(row: Row, slots: float) -> list[str]:
    values = row.values
    speed = values["tokens_per_s"]
    used = f"{values['running'].p50 / slots:.0%}" if slots and "running" in values else "-"
    return [
        row.cell,
        row.contender,
        f"{values['rollouts_per_s'].p50:,.1f}",
        f"{speed.p50:,.0f} ({speed.low:,.0f} - {speed.high:,.0f})",
        *(f"{values[name].p50:.1%}" if name in values else "-" for name in ("of_plain", "of_groups")),
        used,
        f"{values['waiting'].p50:,.0f}" if "waiting" in values else "-",
    ]
