"""Report and table of `bench engine`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.engine.spec import GENERATE, OURS
from benchmarks.raw import Raw, read
from benchmarks.report import Report, Row, Table, Target, about, rows_of, write_report

WANTED_RATIO = 1.0
"""Least tokens a second over the baseline's, at every batch size."""
_HEADER = ("model", "batch", "generates", "tokens/s (slowest - fastest round)", "CPU us a token", "/ generate", "CPU: generate /")


def report_of(out: Path) -> Report:
    """Write report and table from the raw file; raises DataError when there is none."""
    report = build_report(read(out, "engine"))
    write_report(out, report)
    return report


def build_report(raw: Raw) -> Report:
    """Compute everything from the raw file."""
    # Both ratios are above 1 where this one is better than generate: the other's seconds over its own.
    rows = rows_of(raw.rounds, _quantities, {"ratio": (GENERATE, "token_s"), "cpu_ratio": (GENERATE, "cpu_us")})
    spec = raw.header.spec
    models = ", ".join(f"{name} {count / 1e6:.2f} M parameters" for name, count in raw.named("parameters").items())
    distance = max(raw.named("log-prob distance").values(), default=0.0)
    ours = {row.cell: row.values["ratio"].p50 for row in rows if row.contender == OURS and "ratio" in row.values}
    missed = [f"{cell} ({ratio:.2f})" for cell, ratio in ours.items() if ratio < WANTED_RATIO]
    worst = f"missed at {'; '.join(missed)}" if missed else f"{min(ours.values()):.2f} and more" if ours else "-"
    return Report(
        **about(raw.header),
        rows=rows,
        shown=[
            Table(_HEADER, [_cells(row) for row in rows]),
            f"{models}; float32, {spec['threads']} thread(s), prompts of {spec['prompt_tokens']} tokens, {spec['new_tokens']} new ones "
            "each, temperature 1. Medians over rounds; every round runs all contenders, one after the other. All sequences are equally "
            f"long, the best case of generate. Ours returns each token's log-prob and version (at most {distance:.1e} off transformers); "
            "the others are not asked for log-probs.",
            *(f"{contender} does not run here: {reason}" for contender, reason in raw.named("left out").items()),
        ],
        targets=[Target("tokens/s over those of generate, every batch size", f">= {WANTED_RATIO:g}", worst, not missed if ours else None)],
    )


def _quantities(values: Mapping[str, float]) -> dict[str, float]:
    tokens = values["tokens"]
    return {
        "tokens_per_s": tokens / values["wall_s"],
        "token_s": values["wall_s"] / tokens,
        "cpu_us": values["cpu_s"] / tokens * 1e6,
    }


def _cells(row: Row) -> list[str]:
    values, (model, _, batch) = row.values, row.cell.partition(", ")
    speed = values["tokens_per_s"]
    return [
        model,
        batch,
        row.contender,
        f"{speed.p50:,.0f} ({speed.low:,.0f} - {speed.high:,.0f})",
        f"{values['cpu_us'].p50:,.0f}",
        *(f"{values[name].p50:.2f}" if name in values else "-" for name in ("ratio", "cpu_ratio")),
    ]
