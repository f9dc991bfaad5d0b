"""Report and table of `bench eval`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from benchmarks.evaluation.spec import ALONE, EVALUATION, EvaluationSpec
from benchmarks.raw import Raw, read
from benchmarks.report import Check, Report, Table, Target, about, rows_of, write_report

LEAST = 0.95
_HEADER = ("samples asked for by", "tokens/s (slowest - fastest round)", "of the engine alone", "processor seconds", "load")


def report_of(out: Path) -> Report:
    """Write report and table from the raw file; raises DataError when there is none."""
    report = build_report(read(out, "eval"))
    write_report(out, report)
    return report


def build_report(raw: Raw) -> Report:
    """Compute everything from the raw file."""
    spec = msgspec.convert(raw.header.spec, EvaluationSpec)

    def quantities(values: Mapping[str, float]) -> dict[str, float]:
        return {
            "tokens_per_s": values["tokens"] / values["seconds"],
            "token_s": values["seconds"] / values["tokens"],
            "cpu_s": values["cpu_s"],
            "load": values["load"],
        }

    rows = rows_of(raw.rounds, quantities, {"share": (ALONE, "token_s")})
    lines: list[list[str]] = []
    for row in rows:
        speed, share = row.values["tokens_per_s"], row.values.get("share")
        said = f"{share.p50:.1%} ({share.low:.1%} - {share.high:.1%})" if share else "-"
        cpu, load = row.values["cpu_s"].p50, row.values["load"].p50
        lines.append([row.contender, f"{speed.p50:,.0f} ({speed.low:,.0f} - {speed.high:,.0f})", said, f"{cpu:.1f}", f"{load:.1f}"])
    found = next((row.values["share"] for row in rows if row.contender == EVALUATION and "share" in row.values), None)
    target = Target(
        "speed of an evaluation over that of the engine alone",
        f">= {LEAST:.0%}",
        "-" if found is None else f"{found.p50:.1%}",
        None if found is None else found.p50 >= LEAST,
    )
    all_there = all(one.values["tokens"] == spec.num_tokens for one in raw.rounds)
    what = {
        "table": f"the table engine with {spec.token_ms:g} ms a token",
        "local": "the local engine with a model of 0.5 M",
        "sglang": f"SGLang with {Path(spec.model).name}",
    }[spec.engine]
    beside = "in one process" if spec.engine != "sglang" else "with the server in processes of its own"
    return Report(
        **about(raw.header),
        rows=rows,
        shown=[
            Table(_HEADER, lines),
            f"{spec.problems:,} problems, {spec.n} samples of {spec.tokens} tokens each, on {what} and {spec.slots} slots, {beside}. "
            "An evaluation also decodes, scores and stores each answer and computes pass@k, maj@k and intervals, which is in its time.",
        ],
        targets=[target],
        checks=[Check("every sample was given", all_there)],
    )
