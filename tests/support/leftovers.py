"""Nothing of the tests stays in shared memory: what is new there at the end of a session, and nobody's, fails the session."""

from __future__ import annotations

import hashlib
import os
import re
import time
from pathlib import Path

import pytest

SHARED_MEMORY = Path("/dev/shm")
KILLED_SGLANG = re.compile(r"sem\.mp-|sgl_shm_mq_")
"""What SGLang's processes leave when they are killed before our server has noted it: bytes of a semaphore, a queue."""
FAILED = 9
"""Exit status of a session that leaves something behind; pytest's own end at 5."""
GRACE_S = 10.0
"""Processes that have just been ended may take as long to let go."""


class Leftovers:
    """A plugin for the process that leads a session.

    Args:
        place: a folder of shared memory.
        grace_s: how long a name may lie there unused.
    """

    def __init__(self, place: Path = SHARED_MEMORY, grace_s: float = GRACE_S) -> None:
        self._place = place
        self._grace_s = grace_s
        self._before = names(place)
        self.left: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """After the workers' ends."""
        base: Path = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        self.left = sorted(name for name in self.abandoned() if not of_another_session(name, base) and not KILLED_SGLANG.match(name))
        if self.left and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            session.exitstatus = FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Name them."""
        if self.left:
            terminalreporter.section(f"left in {self._place}", red=True)
            for name in self.left:
                terminalreporter.line(describe(self._place / name))

    def abandoned(self) -> set[str]:
        """New names that no living process has open or mapped, again and again until the time is over: another program's come and go."""
        deadline = time.monotonic() + self._grace_s
        left = names(self._place) - self._before
        while left := (left & names(self._place)) - held(self._place):
            if time.monotonic() >= deadline:
                break
            time.sleep(0.2)
        return left


def names(place: Path) -> set[str]:
    """What lies in a folder."""
    return {path.name for path in place.iterdir()} if place.is_dir() else set()


def held(place: Path) -> set[str]:
    """Names in a folder that are, or below which there is, an open or mapped file or the current directory of a process."""
    used: set[str] = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                used.update(line.split(maxsplit=5)[5] for line in (process / "maps").read_text().splitlines() if str(place) in line)
                used.update(os.readlink(link) for link in (*(process / "fd").iterdir(), process / "cwd"))
            except OSError:
                continue  # it has ended, or is another user's
    return {Path(path).relative_to(place).parts[0] for path in used if path.startswith(f"{place}/")}


def of_another_session(name: str, base: Path) -> bool:
    """Whether a name is that of a run's versions (`weights_directory`), and no run below `base` has it."""
    found = re.fullmatch(rf"streamrl-{os.getuid()}-(.+)-([0-9a-f]{{8}})", name)
    if found is None:
        return False
    runs = (Path(parent) / found[1] for parent, folders, _ in os.walk(base) if found[1] in folders)
    return not any(hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:8] == found[2] for run in runs)


def describe(path: Path) -> str:
    """One line: its size, and what is in it."""
    inside = sorted(one.name for one in path.iterdir()) if path.is_dir() else []
    try:
        return f"{path.name}: {', '.join(inside[:5])}" if inside else f"{path.name}: {path.stat().st_size} bytes"
    except FileNotFoundError:
        return path.name
