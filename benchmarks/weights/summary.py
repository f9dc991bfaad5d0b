"""One table for the reports of several runs, and its place in a document."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.output import marks, write_between
from benchmarks.weights.plan import Mode
from benchmarks.weights.report import Report, Row
from benchmarks.weights.table import interval_text, ms_text, table, three_text, title_text

BEGIN, END = marks("weights", "DIR ...")


def render_summary(reports: Sequence[Report]) -> str:
    """A line for every kind of window of every run."""
    header = [
        "model",
        "window",
        "publish -> commit ms p50 / p99",
        "commit ms max",
        "gap ms p50 / p99 / max",
        "gap p99 / steady (95 %)",
        "tokens/s",
        "/ steady (95 %)",
        "client gap ms p50 / p99 / max",
    ]
    return table(header, [_cells(report, row) for report in reports for row in _ordered(report)])


def write_summary(document: Path, text: str) -> None:
    """Put the text between the two marks in a document.

    Raises:
        DataError: the document does not have them, in this order.
    """
    write_between(document, (BEGIN, END), text)


def _ordered(report: Report) -> list[Row]:
    """Steady first, then ours, then stock."""
    order = list(Mode)
    return sorted(report.rows, key=lambda row: order.index(Mode(row.mode)))


def _cells(report: Report, row: Row) -> list[str]:
    run = report.run
    model = run.shape + (f", TP {run.tensor_parallel}" if run.tensor_parallel > 1 else "") + f", {run.streams} streams"
    return [
        model,
        title_text(row),
        f"{ms_text(row.publish_to_commit.p50)} / {ms_text(row.publish_to_commit.p99)}" if row.updates else "-",
        ms_text(row.commit.max),
        three_text(row.gap),
        interval_text(row.gap_p99_ratio),
        f"{row.tokens_per_s:,.0f}",
        interval_text(row.tokens_ratio),
        three_text(row.client_gap),
    ]
