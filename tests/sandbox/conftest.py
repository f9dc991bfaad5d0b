"""A sandbox of each isolation, and what is left of its programs."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from streamrl.sandbox import Limits, Result, Sandbox
from streamrl.sandbox.python import MAIN, interpreter, packages_and_library
from tests.support.needs import need


class Attacker:
    """Runs Python in a sandbox under a mark by which its processes are found."""

    def __init__(self, sandbox: Sandbox, isolation: str) -> None:
        self.sandbox = sandbox
        self.isolation = isolation
        self.mark = f"attack-{uuid.uuid4().hex}"

    async def run(self, code: str, *, files: Mapping[str, str | bytes] | None = None, **limits: Any) -> Result:
        argv = (interpreter(), "-s", "-B", MAIN, self.mark)
        given = {"seconds": 20.0, **limits}
        return await self.sandbox.run(argv, files={**(files or {}), MAIN: code}, limits=Limits(**given), readable=packages_and_library())

    def processes(self) -> list[int]:
        return marked(self.mark)


def marked(mark: str) -> list[int]:
    """Processes of this host that have `mark` among their arguments."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    if mark.encode() in file.read().split(b"\0"):
                        found.append(int(name))
            except OSError:
                continue
    return found


def wait_for(holds: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.02)


@pytest.fixture(scope="session", params=["namespaces", "landlock"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[tuple[Sandbox, str]]:
    need(request.param)
    sandbox = Sandbox(isolation=request.param)
    yield sandbox, request.param
    sandbox.close()


@pytest.fixture
def attacker(sandbox: tuple[Sandbox, str]) -> Iterator[Attacker]:
    attacker = Attacker(*sandbox)
    yield attacker
    assert attacker.processes() == []
