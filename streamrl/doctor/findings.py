"""What a check of the machine has found, and how it is shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from rich.table import Table
from rich.text import Text

State = Literal["ok", "warn", "fail"]
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


class Check(msgspec.Struct, frozen=True):
    """One finding. `warn`: a run may work; `fail`: it will not."""

    name: str
    state: State
    found: str
    hint: str = ""
    """What to do; not empty unless the state is ok."""


def print_checks(checks: Sequence[Check], *, as_json: bool) -> None:
    """To stdout."""
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(checks), indent=2).decode())
        return
    table = Table(box=None, padding=(0, 2))
    for title in ("check", "state", "found"):
        table.add_column(title)
    for check in checks:
        hint = f"\nhint: {check.hint}" if check.hint else ""
        table.add_row(check.name, Text(check.state, style=_COLOURS[check.state]), Text(check.found + hint))
    from rich.console import Console  # a start that finds nothing need not load it

    console = Console()
    console.print(table)
    console.print(summary(checks), highlight=False)


def summary(checks: Sequence[Check]) -> str:
    """One line: whether a run can be started."""
    failed = [check.name for check in checks if check.state == "fail"]
    warned = [check.name for check in checks if check.state == "warn"]
    if failed:
        return f"not ready: {', '.join(failed)}"
    return f"ready, but look at {', '.join(warned)}" if warned else "ready"
