"""The end of a bus benchmark: raw file, report, table and picture in a directory, and tables for documents."""

from __future__ import annotations

from pathlib import Path

import msgspec

from benchmarks.bus.measure import run
from benchmarks.bus.picture import write_picture
from benchmarks.bus.plan import BusOptions
from benchmarks.bus.records import BusRun
from benchmarks.bus.report import BusReport, build_report, render
from benchmarks.output import RAW, marks, new_directory, write_between, write_report
from streamrl.errors import DataError

BEGIN, END = marks("bus")


def measure_into(options: BusOptions) -> BusReport:
    """Measure and write `raw.json`, `report.json`, `table.md` and `bus.png`.

    Raises:
        ConfigError: the directory has the files of another run, or no transport is there.
    """
    out = new_directory(Path(options.out))
    (out / RAW).write_bytes(msgspec.json.encode(run(options)) + b"\n")
    return report_from(out)


def report_from(out: Path) -> BusReport:
    """Make report, table and picture again from the raw file; raises DataError when there is none."""
    try:
        raw = msgspec.json.decode((out / RAW).read_bytes(), type=BusRun)
    except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
        raise DataError(f"expected the raw file of a bus benchmark in {out}: {error}", hint="measure with --out first") from error
    report = build_report(raw)
    write_report(out, report, render(report))
    write_picture(report, out / "bus.png")
    return report


def write_docs(document: Path, report: BusReport) -> None:
    """Put the tables between the two marks in a document; raises DataError when it does not have them."""
    write_between(document, (BEGIN, END), render(report))
