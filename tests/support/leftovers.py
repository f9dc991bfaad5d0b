"""A session fails if it leaves something in shared memory that no living process uses."""

import hashlib
import os
import re
import time
from pathlib import Path

import pytest

SHARED_MEMORY = Path("/dev/shm")
KILLED_SGLANG = re.compile(r"sem\.mp-|sgl_shm_mq_")
"""SGLang's processes leave a semaphore and a queue when they are killed before our server has noted them."""
FAILED = 9
"""The exit status of a session that leaves something behind; pytest itself uses 0 to 5."""
GRACE_S = 10.0
"""A process that has just been ended may hold its memory for this long."""


class Leftovers:
    """A plugin for the process that leads a session."""

    def __init__(self, place: Path = SHARED_MEMORY, grace_s: float = GRACE_S) -> None:
        self._place = place
        self._grace_s = grace_s
        self._before = names(place)
        self.left: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        base: Path = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        self.left = sorted(name for name in self.abandoned() if not of_another_session(name, base) and not KILLED_SGLANG.match(name))
        if self.left and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            session.exitstatus = FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.left:
            terminalreporter.section(f"left in {self._place}", red=True)
            for name in self.left:
                terminalreporter.line(describe(self._place / name))

    def abandoned(self) -> set[str]:
        """Return the new names that no living process uses; look again until the time is over: other programs' come and go."""
        deadline = time.monotonic() + self._grace_s
        left = names(self._place) - self._before
        while left := (left & names(self._place)) - held(self._place):
            if time.monotonic() >= deadline:
                break
            time.sleep(0.2)
        return left


def names(place: Path) -> set[str]:
    return {path.name for path in place.iterdir()} if place.is_dir() else set()


def held(place: Path) -> set[str]:
    """Name the entries of a folder that a process uses: an open or mapped file, or its current directory, is there or below."""
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
    """Check if a name is that of a run's versions (`weights_directory`) and no run below `base` has it."""
    found = re.fullmatch(rf"streamrl-{os.getuid()}-(.+)-([0-9a-f]{{8}})", name)
    if found is None:
        return False
    runs = (Path(parent) / found[1] for parent, folders, _ in os.walk(base) if found[1] in folders)
    return not any(hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:8] == found[2] for run in runs)


def describe(path: Path) -> str:
    """Return one line with what is in a folder, or the size of a file."""
    inside = sorted(one.name for one in path.iterdir()) if path.is_dir() else []
    try:
        return f"{path.name}: {', '.join(inside[:5])}" if inside else f"{path.name}: {path.stat().st_size} bytes"
    except FileNotFoundError:
        return path.name
