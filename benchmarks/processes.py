"""Processes of a benchmark: how they are started, and the CPU time of any, from /proc."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

ROOT = Path(__file__).resolve().parents[1]
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Command(TypedDict):
    """What `subprocess.Popen` takes."""

    args: list[str]
    env: dict[str, str]


def child(module: str, *arguments: object, env: Mapping[str, str] | None = None) -> Command:
    """How to start a module of the benchmarks, which are on no path of an installed interpreter.

    The working directory is not on its path either (`-P`): many a repository has a folder of that name.

    Args:
        module: such as `benchmarks.bus.worker`.
        arguments: of its command line.
        env: more of its environment.
    """
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    return Command(args=[sys.executable, "-P", "-m", module, *map(str, arguments)], env={**os.environ, **(env or {}), "PYTHONPATH": path})


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far, all threads; 0.0 once it is gone."""
    facts = _facts(pid)
    return 0.0 if facts is None else facts[1]


def cpu_of_tree(root: int = 0) -> float:
    """CPU time so far of all living descendants of a process (0: this one), itself left out."""
    root = root or os.getpid()
    return sum(seconds for pid, seconds in cpu_by_process(root).items() if pid != root)


def cpu_by_process(root: int) -> dict[int, float]:
    """CPU seconds so far of a process and its living descendants, all threads, by process id."""
    known = {int(entry.name): facts for entry in Path("/proc").iterdir() if entry.name.isdigit() and (facts := _facts(int(entry.name)))}
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in known.items():
        children.setdefault(parent, []).append(pid)
    found: dict[int, float] = {}
    left = [root]
    while left:
        pid = left.pop()
        left += children.get(pid, ())
        if pid in known:
            found[pid] = known[pid][1]
    return found


def _facts(pid: int) -> tuple[int, float] | None:
    """Parent and CPU seconds."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name of the program stands in parentheses and may hold spaces.
    fields = text.rpartition(")")[2].split()
    return int(fields[1]), (int(fields[11]) + int(fields[12])) * _TICK_S
