"""CPU time of other processes, from /proc."""

from __future__ import annotations

import os
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far, all threads; 0.0 once it is gone."""
    facts = _facts(pid)
    return 0.0 if facts is None else facts[1]


def cpu_of_tree(root: int = 0) -> float:
    """CPU time so far of all living descendants of a process (0: this one), itself left out."""
    root = root or os.getpid()
    known = {int(entry.name): facts for entry in Path("/proc").iterdir() if entry.name.isdigit() and (facts := _facts(int(entry.name)))}
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in known.items():
        children.setdefault(parent, []).append(pid)
    total_s, left = 0.0, list(children.get(root, ()))
    while left:
        pid = left.pop()
        total_s += known[pid][1]
        left += children.get(pid, ())
    return total_s


def _facts(pid: int) -> tuple[int, float] | None:
    """Parent and CPU seconds."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name of the program stands in parentheses and may hold spaces.
    fields = text.rpartition(")")[2].split()
    return int(fields[1]), (int(fields[11]) + int(fields[12])) * _TICK_S
