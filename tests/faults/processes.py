"""The processes of a run, found from outside: by what the kernel says of their command lines."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from streamrl.runtime.rundir import RunDir
from tests.launch.processes import parent


def find(*words: str) -> list[int]:
    """Processes whose command line has all of these arguments; those that have ended and wait to be reaped have none."""
    wanted = {word.encode() for word in words}
    found: list[int] = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                if wanted <= set((path / "cmdline").read_bytes().split(b"\0")):
                    found.append(int(path.name))
            except OSError:
                continue
    return found


def children(*words: str) -> list[int]:
    """Those of `find` that this process has started itself: another test's are none of ours."""
    return [pid for pid in find(*words) if parent(pid) == os.getpid()]


def worker_pid(run: RunDir, kind: str, index: int = 0) -> int | None:
    """A worker that runs under a supervisor or by hand."""
    pids = find("worker", kind, "--run", str(run.path), "--index", str(index))
    return pids[0] if pids else None


def server_pid(run: RunDir) -> int | None:
    """The embedded nats-server."""
    pids = find(str(run.bus_store / "nats-server.conf"))
    return pids[0] if pids else None


def send(pid: int, number: signal.Signals) -> bool:
    """Send a signal; False when the process has ended by itself before."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
