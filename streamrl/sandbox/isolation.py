"""How a program is kept apart from the host: the seam, and what its two kinds share.

Three processes take part: the *supervisor*, the *init* that it forks and that waits for the program, and the program. `prepare` and `clean`
are called in the first, `enter` in the second, `become` and `confine` in the third, in this order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from streamrl.sandbox import kernel
from streamrl.sandbox.messages import Program

SYSTEM = (
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/usr/bin",
    "/usr/sbin",
    "/usr/lib",
    "/usr/lib32",
    "/usr/lib64",
    "/usr/libexec",
    "/usr/local/bin",
    "/usr/local/lib",
    "/usr/share/zoneinfo",
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/nix/store",
)
"""What programs of the system need. Not all of /usr: images like to work in /usr/src."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


class Isolation(Protocol):
    """One program's."""

    missing: tuple[str, ...]
    """What does not hold, in words."""

    def prepare(self, program: Program) -> None:
        """Raises OSError when the host does not allow it."""
        ...

    def enter(self, program: Program) -> str:
        """The program's directory, which is empty; raises OSError."""
        ...

    def become(self) -> None:
        """Take the program's user; raises OSError."""
        ...

    def confine(self, program: Program) -> None:
        """Give up what is left; the program is executed next. Raises OSError."""
        ...

    def processes(self) -> list[int]:
        """Of the program, as init sees them."""
        ...

    def num_beside(self) -> int:
        """Processes and threads that its user has besides the program's, as far as a limit of processes counts them."""
        ...

    def excess(self, program: Program) -> str:
        """What of its files is too much, in words, where nothing but this limits them."""
        ...

    def clean(self) -> None:
        """The init has ended: end what may be left of the program's processes, then remove its directory."""
        ...


def readable(program: Program) -> Iterator[str]:
    """What a program may read and execute, as far as it is there; nothing that lies in another."""
    found: set[str] = set()
    for path in sorted({*SYSTEM, *program.readable}):
        if os.path.exists(path) and found.isdisjoint(map(str, Path(path).parents)):
            found.add(path)
            yield path


def spare_id() -> int:
    """A number of a user and group that nobody has, one for each process that asks: a limit of processes is one of its user.

    From the end of the largest range that this user namespace has.
    """
    ranges = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()]
    first, _, length = max(ranges, key=lambda one: one[2])
    length = min(length, 2_000_000_000 - first)
    return first + length - 2 - os.getpid() % max(1, min(1 << 22, length // 2))


def forever_without_rights() -> None:
    """No exec gives this process rights, by a file's owner or its capabilities; what follows asks for this."""
    kernel.prctl("PR_SET_NO_NEW_PRIVS", kernel.PR_SET_NO_NEW_PRIVS, 1)
