"""The end of a benchmark: table, picture and report beside the raw files, and on the screen."""

from __future__ import annotations

from pathlib import Path

import msgspec

from streamrl.bench.picture import write_timeline
from streamrl.bench.raw import read_raw
from streamrl.bench.report import build_report
from streamrl.bench.table import render


def report_from(directory: Path, *, as_json: bool) -> int:
    """Write `report.json`, `table.md` and `timeline.png` from a directory's raw files; print the table or the JSON.

    Returns:
        1 if a check of correctness did not hold, else 0. A target that was missed is a measurement, not a failure.
    """
    raw = read_raw(directory)
    report = build_report(raw)
    encoded = msgspec.json.format(msgspec.json.encode(report), indent=1)
    (directory / "report.json").write_bytes(encoded + b"\n")
    (directory / "table.md").write_text(render(report), encoding="utf-8")
    write_timeline(raw, directory / "timeline.png")
    print(encoded.decode() if as_json else render(report), end="" if not as_json else "\n")
    return 0 if all(check.held for check in report.checks) else 1
