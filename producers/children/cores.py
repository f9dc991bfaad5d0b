"""Read what a process has had of the machine's cores, and if it waits for one: time that a busy machine takes is no call's own."""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

_SECOND = 2
_READ_BYTES = 1024


class Had(NamedTuple):
    """The thread that runs user code and the one beside it."""

    ran_s: float = 0.0
    """Time on a core."""
    queued_s: float = 0.0
    """Time without one though it could have run, up to when it had one last."""
    runnable: bool = False
    """Say if it has a core now or waits for one."""


class Cores:
    """Reads what Linux counts for each thread; where the kernel counts nothing, all is 0.

    Args:
        pid: of a process that has been started. Its threads are found at the second look, which comes after its first call has begun.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._looks = 0
        self._counts: list[int] = []
        self._states: list[int] = []
        self._had = Had()

    def look(self, *, state: bool = False) -> Had:
        """Return what it has had until now, or at the look before if it is gone.

        Args:
            state: whether `runnable` is asked for.
        """
        self._looks += 1
        if self._looks == _SECOND:
            with contextlib.suppress(OSError):
                self._open()
        if self._counts:
            with contextlib.suppress(OSError, ValueError, IndexError):
                counts = [os.pread(file, _READ_BYTES, 0).split() for file in self._counts]
                self._had = Had(
                    sum(int(count[0]) for count in counts) / 1e9,
                    sum(int(count[1]) for count in counts) / 1e9,
                    state and any(os.pread(file, _READ_BYTES, 0).rpartition(b")")[2].split()[0] == b"R" for file in self._states),
                )
        return self._had

    def close(self) -> None:
        """Free the files."""
        for file in (*self._counts, *self._states):
            os.close(file)
        self._counts.clear()
        self._states.clear()

    def _open(self) -> None:
        folder = f"/proc/{self._pid}/task"
        others = sorted(thread for thread in map(int, os.listdir(folder)) if thread != self._pid)
        for thread in (self._pid, *others[:1]):
            self._states.append(os.open(f"{folder}/{thread}/stat", os.O_RDONLY))
            self._counts.append(os.open(f"{folder}/{thread}/schedstat", os.O_RDONLY))
