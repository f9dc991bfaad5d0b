"""Lines of a chaos log, one JSON object each, told apart by `type`."""

from pathlib import Path

import msgspec


class SessionLine(msgspec.Struct, frozen=True, tag="session"):
    """The first line of a log."""

    hardware: str
    command: str
    date: str
    python: str


class FaultLine(msgspec.Struct, frozen=True, tag="fault"):
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
    """Until the next ledger entry; -1: none came. Of a whole run from the command that starts it again."""
    verdict: str
    attach_s: float = -1.0
    """From the command that attaches a producer again to its first samples on the server; -1: not measured."""
    engine_s: float = -1.0
    """From the death of the engine until a producer has an answer of the next one; -1: not measured."""


class RunLine(msgspec.Struct, frozen=True, tag="run"):
    run: int
    shape: str
    problems: list[str]
    counts: dict[str, int]
    wall_s: float


class SpeedLine(msgspec.Struct, frozen=True, tag="speed"):
    """What an undisturbed run trained between its first and its last entry in the ledger that were seen."""

    shape: str
    samples: int
    wall_s: float
    processor_s: float
    """Of all its processes together: supervisor, workers, children with user code, nats-server."""


Line = SessionLine | FaultLine | RunLine | SpeedLine


def read(path: Path) -> list[Line]:
    return [msgspec.json.decode(line, type=Line) for line in path.read_text().splitlines()]
