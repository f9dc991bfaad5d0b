"""What became of the flags of a script, for people and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from streamrl.bridges.slime.bash.values import Place

Outcome = Literal["approximated", "refused", "left out", "assumed"]


class Finding(msgspec.Struct, frozen=True):
    """One thing that is not as in the script."""

    outcome: Outcome
    subject: str
    """The flag, or the words that are not known."""
    says: str
    nearest: str = ""
    """What to do instead."""
    file: str = ""
    line: int = 0
    """0: it is not given in the script."""

    @property
    def place(self) -> str:
        """File and line; empty where there is none."""
        return f"{self.file}:{self.line}" if self.line else ""


class Report(msgspec.Struct, frozen=True):
    """All of them, in the order of the lines."""

    command: str
    """Where the training command is."""
    findings: tuple[Finding, ...]
    num_flags: int

    @property
    def refused(self) -> list[Finding]:
        """What keeps the configuration from being written."""
        return [finding for finding in self.findings if finding.outcome == "refused"]


def finding(outcome: Outcome, subject: str, says: str, nearest: str = "", place: Place | None = None) -> Finding:
    """A finding at a place."""
    return Finding(outcome, subject, says, nearest, place.file if place else "", place.line if place else 0)


def text_of(report: Report) -> str:
    """For people, a heading and a line or two for each."""
    lines = [f"{report.num_flags} flags of the command at {report.command}"]
    headings: Sequence[tuple[Outcome, str]] = (
        ("refused", "refused"),
        ("left out", "left out, as you said"),
        ("approximated", "approximated"),
        ("assumed", "assumed"),
    )
    for outcome, heading in headings:
        found = [one for one in report.findings if one.outcome == outcome]
        lines += [f"\n{heading}:"] if found else []
        for one in found:
            lines.append(f"  {one.place + '  ' if one.place else ''}{one.subject}: {one.says}")
            lines += [f"      nearest: {one.nearest}"] if one.nearest else []
    return "\n".join(lines)
