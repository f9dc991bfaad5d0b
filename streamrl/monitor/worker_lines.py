"""Workers as people see them."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from streamrl.monitor.numbers import WorkerLine


def worker_lines(
    own: Mapping[str, WorkerLine], supervised: Mapping[str, WorkerLine], held: Mapping[str, float], failed: Mapping[str, int]
) -> tuple[WorkerLine, ...]:
    """All workers by name.

    Args:
        own: what workers say of themselves.
        supervised: what the supervisor knows: whether a process runs; what one does that runs, it says itself.
        held: tasks in hand by producer: one that holds none waits for one.
        failed: rollouts that have failed lately, by producer.
    """
    lines = {**own, **{name: _told(line, own.get(name)) for name, line in supervised.items()}}
    return tuple(replace(_doing(line, held.get(name, 1.0)), failed_rollouts=failed.get(name, 0)) for name, line in sorted(lines.items()))


def _told(line: WorkerLine, own: WorkerLine | None) -> WorkerLine:
    if line.state == "running" and own is not None and own.pid == line.pid:
        return replace(line, state=own.state, since_s=own.since_s)
    return line


def _doing(line: WorkerLine, held: float) -> WorkerLine:
    return replace(line, state="waits for tasks", since_s=0.0) if line.state == "running" and held == 0 else line
