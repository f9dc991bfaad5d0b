"""Processes that another one wrote down: a process id alone may be somebody else's by now, with its start time it is not."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

_STARTTIME = 18
"""Of the fields of /proc/<pid>/stat that follow the name in brackets and the state: field 22, in clock ticks since the machine began."""
_ENDED = ("Z", "X")
"""States of a process of which only its exit code is left."""


def started(pid: int) -> str:
    """When process `pid` began, as a text that no other process of this id has; empty where there is none."""
    if pid <= 0:
        return ""
    try:
        # The name may hold anything, brackets and spaces too: what follows the last bracket is numbers.
        state, *facts = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return "" if state in _ENDED else facts[_STARTTIME]
    except (OSError, IndexError, ValueError):
        return "" if Path("/proc/self/stat").exists() else _started_by_ps(pid)


def signal_process(pid: int, began: str, number: int) -> bool:
    """Send a signal to the process that `started` described as `began`; False where it is gone, whoever has its id now.

    Raises:
        ValueError: ids up to 1 name no single process of ours, but groups, everybody or init.
        PermissionError: it belongs to another user.
    """
    if pid <= 1:
        raise ValueError(f"expected the id of a process, got {pid}")
    try:
        held = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
    except ProcessLookupError:
        return False
    except OSError:  # a kernel without them, or no room for one more descriptor
        held = None
    try:
        if not began or started(pid) != began:
            return False
        if held is None:
            os.kill(pid, number)
        else:
            signal.pidfd_send_signal(held, number)
    except ProcessLookupError:
        return False
    finally:
        if held is not None:
            os.close(held)
    return True


def _started_by_ps(pid: int) -> str:
    """Where there is no /proc: macOS and the BSDs."""
    try:
        found = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip()
