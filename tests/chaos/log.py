"""Lines of a chaos log, one JSON object each, told apart by `type`."""

from __future__ import annotations

from pathlib import Path

import msgspec


class SessionLine(msgspec.Struct, frozen=True, tag="session"):
    """The first line of a log."""

    hardware: str
    command: str
    date: str
    python: str


class FaultLine(msgspec.Struct, frozen=True, tag="fault"):
    """One strike."""

    run: int
    shape: str
    part: str
    fault: str
    moment: str
    version: int
    """Entries in the ledger when it was struck."""
    held_s: float
    """How long the process was stopped or cut off; part of the recovery if the run cannot do without it."""
    recovery_s: float
    """Until the next ledger entry; -1: none came."""
    verdict: str


class RunLine(msgspec.Struct, frozen=True, tag="run"):
    """The end of a run, and what was found of it."""

    run: int
    shape: str
    problems: list[str]
    counts: dict[str, int]
    wall_s: float


Line = SessionLine | FaultLine | RunLine


def read(path: Path) -> list[Line]:
    """All lines of a log."""
    return [msgspec.json.decode(line, type=Line) for line in path.read_text().splitlines()]
