"""`compare`: reads both ledgers and prints the table."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from streamrl.history.compare import CompareReport, compare
from streamrl.history.source import read_entries


async def compare_runs(a: str, b: str, *, base: Path | str = "runs") -> CompareReport:
    """Compare what `a` and `b` name (`read_entries`), one after the other; raises ConfigError."""
    name_a, entries_a = await read_entries(a, base=base)
    name_b, entries_b = await read_entries(b, base=base)
    return compare(name_a, entries_a, name_b, entries_b)


def print_comparison(report: CompareReport) -> None:
    """The table, to stdout."""
    table = Table(box=None, padding=(0, 2))
    table.add_column("")
    for side in (report.a.name, report.b.name):
        table.add_column(f"{side}\nfirst 20", justify="right")
        table.add_column(f"{side}\nlast 20", justify="right")
    table.add_column("change", justify="right")
    for row in report.table:
        table.add_row(*row)
    Console().print(table)
    print(f"same batches up to version {report.same_batches_to}, same parameters up to version {report.same_digests_to}")
