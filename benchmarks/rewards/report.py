"""Report and tables of `bench rewards`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from benchmarks.raw import Raw, read
from benchmarks.report import Report, Table, Target, about, rows_of, write_report
from benchmarks.rewards.spec import HUNG, LOOP, PLAIN, POOL, UNDISTURBED, RewardsSpec
from streamrl.producers.children.graders import Scoring

MOST_S, LEAST = 4.0, 0.98


def report_of(out: Path) -> Report:
    """Write report and tables from the raw file; raises DataError when there is none."""
    report = build_report(read(out, "rewards"))
    write_report(out, report)
    return report


def build_report(raw: Raw) -> Report:
    """Compute everything from the raw file."""
    spec, scoring = msgspec.convert(raw.header.spec, RewardsSpec), Scoring()

    def quantities(values: Mapping[str, float]) -> dict[str, float]:
        if "cold_s" in values:
            return dict(values)
        return {
            "tokens_per_s": values["tokens"] / values["seconds"],
            "batches_per_s": values["batches"] / values["seconds"],
            "token_s": values["seconds"] / values["tokens"],
            "load": values["load"],
        }

    rows = rows_of(raw.rounds, quantities, {"share": (UNDISTURBED, "token_s")})
    pool: list[list[str]] = []
    loop: list[list[str]] = []
    for row in rows:
        load = f"{row.values['load'].p50:.1f}"
        if row.cell == POOL:
            times = [f"{found.p50:.2f} ({found.low:.2f} - {found.high:.2f})" for found in (row.values["seconds"], row.values["cold_s"])]
            pool.append([row.contender, *times, load])
        else:
            speed, share = row.values["tokens_per_s"], row.values.get("share")
            said = f"{share.p50:.1%} ({share.low:.1%} - {share.high:.1%})" if share else "-"
            name = UNDISTURBED if row.contender == UNDISTURBED else f"{spec.hung:.0%} of graders hang"
            batches = f"{row.values['batches_per_s'].p50:.2f}"
            loop.append([name, f"{speed.p50:.0f} ({speed.low:.0f} - {speed.high:.0f})", batches, said, load])
    took = next((row.values["seconds"].p50 for row in rows if (row.cell, row.contender) == (POOL, PLAIN)), None)
    kept = next((row.values["share"].p50 for row in rows if row.cell == LOOP and row.contender == HUNG and "share" in row.values), None)
    targets = [
        Target(
            f"{spec.graders} plain graders of {1000 * spec.sleep_s:.0f} ms on {spec.children} processes",
            f"<= {MOST_S:g} s",
            "-" if took is None else f"{took:.2f} s",
            None if took is None else took <= MOST_S,
        ),
        Target(
            "trained tokens/s with hung graders over those without",
            f">= {LEAST:.0%}",
            "-" if kept is None else f"{kept:.1%}",
            None if kept is None else kept >= LEAST,
        ),
    ]
    return Report(
        **about(raw.header),
        rows=rows,
        shown=[
            Table((f"{spec.graders} graders, as", "s (fastest - slowest round)", "s, the processes started meanwhile", "load"), pool),
            f"Each takes {1000 * spec.sleep_s:.0f} ms; {spec.children} processes, one call of a plain function at a time in each: at least "
            f"{spec.graders * spec.sleep_s / spec.children:.2f} s. Async ones: {scoring.concurrency} at once.",
            Table(
                ("the quickstart where", "tokens/s trained (slowest - fastest round)", "batches/s", "of the undisturbed rate", "load"), loop
            ),
            "A plain grader, that sleeps for ever in a fixed choice of rollouts; "
            f"reward.timeout_s = {scoring.timeout_s:g}, reward.max_hung = {scoring.max_hung}, S = 1, and everything else as it comes. "
            "A rollout whose grader hangs gives no sample.",
        ],
        targets=targets,
    )
