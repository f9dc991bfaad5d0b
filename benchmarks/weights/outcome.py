"""The end of a benchmark: table, picture and report beside the raw files, and on the screen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.weights.picture import write_timeline
from benchmarks.weights.raw import read_raw
from benchmarks.weights.report import Report, build_report
from benchmarks.weights.summary import render_summary, write_summary
from benchmarks.weights.table import render


def report_from(directories: Sequence[Path], *, as_json: bool, document: Path | None = None) -> int:
    """Write `report.json`, `table.md` and `timeline.png` from the raw files in each directory; print the tables or the JSON.

    Args:
        directories: one for each run.
        as_json: print JSON, a line for each run if there are several.
        document: put one table of all runs between its marks (`benchmarks.weights.summary`).

    Returns:
        1 if a check of correctness did not hold, else 0. A target that was missed is a measurement, not a failure.
    """
    reports = [_write_report(directory) for directory in directories]
    for report in reports:
        print(msgspec.json.encode(report).decode() if as_json else render(report))
    if document is not None:
        write_summary(document, render_summary(reports))
    return 0 if all(check.held for report in reports for check in report.checks) else 1


def _write_report(directory: Path) -> Report:
    raw = read_raw(directory)
    report = build_report(raw)
    encoded = msgspec.json.format(msgspec.json.encode(report), indent=1)
    (directory / "report.json").write_bytes(encoded + b"\n")
    (directory / "table.md").write_text(render(report), encoding="utf-8")
    write_timeline(raw, directory / "timeline.png")
    return report
