"""Functions that look at real processes from outside, through the kernel."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from streamrl.runtime.rundir import RunDir


def alive(pid: int) -> bool:
    """Check if a process runs; one that has ended and waits to be reaped does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return _stat(pid)[0] not in ("Z", "")


def stopped(pid: int) -> bool:
    return _stat(pid)[0] == "T"


def parent(pid: int) -> int:
    return int(_stat(pid)[1])


def group_of(pid: int) -> set[int]:
    """Processes of a group that still live."""
    found = set()
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                text = (path / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(text[2]) == pid and text[0] != "Z":
                found.add(int(path.name))
    return found


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def _stat(pid: int) -> tuple[str, str]:
    try:
        # The name of the program stands in parentheses and may hold spaces.
        state, number = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return "", "0"
    return state, number


async def until(condition: Callable[[], object], *, within_s: float = 60.0) -> None:
    """Wait until `condition` holds; fail after a time that no healthy machine needs."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        await asyncio.sleep(0.01)


def descendants(pid: int) -> list[int]:
    of: dict[int, list[int]] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            of.setdefault(parent(int(path.name)), []).append(int(path.name))
    found = [pid]
    for each in found:
        found += of.get(each, [])
    return found[1:]


def grader_pid(run: RunDir) -> int | None:
    """Find the newest child of a run's producer that runs user code: with a built-in producer, one of its graders."""
    producer = worker_pid(run, "producer")
    own = [pid for pid in find("streamrl.producers.children") if parent(pid) == producer] if producer else []
    return max(own, default=None)


def processor_s(pids: Iterable[int]) -> float:
    total = 0
    for pid in pids:
        try:
            total += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
        except OSError:
            continue
    return total / os.sysconf("SC_CLK_TCK")


def read_pids(path: Path) -> list[int]:
    """Read the process ids that tiny workers have written, one a line."""
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def find(*words: str) -> list[int]:
    """Find the processes whose command line has all of these arguments; one that has ended and waits to be reaped has none."""
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
    return [pid for pid in find(*words) if parent(pid) == os.getpid()]


def worker_pid(run: RunDir, kind: str, index: int = 0) -> int | None:
    pids = find("worker", kind, "--run", str(run.path), "--index", str(index))
    return pids[0] if pids else None


def server_pid(run: RunDir) -> int | None:
    pids = find(str(run.bus_store / "nats-server.conf"))
    return pids[0] if pids else None


def send(pid: int, number: signal.Signals) -> bool:
    """Send a signal; return False if the process has already ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
