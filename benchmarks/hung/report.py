"""Report and table of `bench hung`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from benchmarks.hung.spec import HUNG, UNDISTURBED, HungSpec
from benchmarks.raw import Raw, read
from benchmarks.report import Report, Table, Target, about, rows_of, write_report

LEAST = 0.9
_HEADER = ("a run in which", "samples/s trained (slowest - fastest round)", "groups/s", "of the undisturbed rate", "load")


def report_of(out: Path) -> Report:
    """Write report and table from the raw file; raises DataError when there is none."""
    report = build_report(read(out, "hung"))
    write_report(out, report)
    return report


def build_report(raw: Raw) -> Report:
    """Compute everything from the raw file."""
    spec = msgspec.convert(raw.header.spec, HungSpec)

    def quantities(values: Mapping[str, float]) -> dict[str, float]:
        return {
            "samples_per_s": values["samples"] / values["seconds"],
            "groups_per_s": values["batches"] * spec.batch_tasks / values["seconds"],
            "sample_s": values["seconds"] / values["samples"],
            "load": values["load"],
        }

    rows = rows_of(raw.rounds, quantities, {"share": (UNDISTURBED, "sample_s")})
    lines: list[list[str]] = []
    for row in rows:
        speed, share = row.values["samples_per_s"], row.values.get("share")
        said = f"{share.p50:.0%} ({share.low:.0%} - {share.high:.0%})" if share else "-"
        name = "nothing hangs" if row.contender == UNDISTURBED else f"{spec.hung:.0%} of rollouts hang"
        groups, load = row.values["groups_per_s"].p50, row.values["load"].p50
        lines.append([name, f"{speed.p50:.1f} ({speed.low:.1f} - {speed.high:.1f})", f"{groups:.2f}", said, f"{load:.1f}"])
    found = next((row.values["share"] for row in rows if row.contender == HUNG and "share" in row.values), None)
    target = Target(
        "rate with hung rollouts over the undisturbed one",
        f">= {LEAST:.0%}",
        "-" if found is None else f"{found.p50:.1%}",
        None if found is None else found.p50 >= LEAST,
    )
    return Report(
        **about(raw.header),
        rows=rows,
        shown=[
            Table(_HEADER, lines),
            f"Rollouts of {spec.rollout_s:g} s on an engine with {spec.slots} slots, which decides the rate; a hung one ends after "
            f"{spec.limit_s:g} s more (producer.idle_timeout_s). {spec.batch_tasks} groups of {spec.num_rollouts} a batch, "
            f"S = {spec.max_staleness}: {(spec.max_staleness + 1) * spec.batch_tasks} credits. Table engine and trainer under `up`. "
            "A hung rollout gives no sample though the engine worked for it, so the rate of samples falls by their share at least.",
        ],
        targets=[target],
    )
