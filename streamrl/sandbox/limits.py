"""What a program may use, and what became of it."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from streamrl.errors import SchemaError

Reason = Literal["ok", "error", "timeout", "memory", "output", "killed"]
"""Why it ended: exit code 0; another exit code; over its time or processor time; over its memory; more output than is taken; by a
signal, for too many processes or files, or because its caller left."""


class Limits(msgspec.Struct, frozen=True):
    """Of one program with all the processes that it starts.

    Raises:
        SchemaError: one of them is not a number above 0.
    """

    seconds: float = 10.0
    """Wall-clock time from its start."""
    cpu_seconds: float = 10.0
    """Processor time, summed over its processes."""
    memory_bytes: int = 512 << 20
    """Address space of each process, and memory that they hold together, which is looked at 50 times a second."""
    disk_bytes: int = 64 << 20
    """Size of its files together."""
    files: int = 1000
    """Files and directories that it may have."""
    processes: int = 32
    """Processes and threads at once."""
    output_bytes: int = 1 << 20
    """Of stdout, and as many of stderr."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            whole = name not in ("seconds", "cpu_seconds")
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not 0 < value < math.inf:
                raise SchemaError(
                    f"expected a {'whole ' if whole else ''}number above 0 for the sandbox's limit {name}, got {value!r}",
                    hint="leave it out for its default (docs/sandbox.md)",
                )


class Result(msgspec.Struct, frozen=True):
    """What became of a program."""

    stdout: str
    """As UTF-8; what is none is replaced by U+FFFD."""
    stderr: str
    exit_code: int
    """Minus the signal's number when a signal ended it; -9 when a limit did."""
    reason: Reason
    detail: str
    """The limit or the signal in words; empty for `ok` and `error`."""
    seconds: float
    """Wall-clock time from its start."""
