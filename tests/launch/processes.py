"""Looking at real processes in tests."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be reaped does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return _stat(pid)[0] not in ("Z", "")


def parent(pid: int) -> int:
    """The process that started another; 0 once that one is gone."""
    return int(_stat(pid)[1])


def _stat(pid: int) -> tuple[str, str]:
    """State and parent as the kernel has them."""
    try:
        # The name of the program stands in parentheses and may hold spaces.
        state, number = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return "", "0"
    return state, number


async def until(condition: Callable[[], object], *, within_s: float = 20.0) -> None:
    """Return once `condition` holds; fails after a time that no healthy machine needs."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        await asyncio.sleep(0.01)


def read_pids(path: Path) -> list[int]:
    """Process ids that tiny workers have written, one a line."""
    return [int(line) for line in path.read_text().split()] if path.exists() else []
