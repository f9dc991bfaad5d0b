"""A run that Ray can place: rows, a configuration with the table, and a way to start programs beside them."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from streamrl.runtime.rundir import RunDir
from tests.launch.digits import TABLE, write_digits
from tests.ray.running import ROOT, Start

TOML = f"""{TABLE}
[supervise]
backoff_s = 0.1
[ray.trainer]
cpus = 0.5
[ray.engine]
cpus = 0.5
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_digits(tmp_path, TOML)
    return tmp_path


@pytest.fixture
def run(place: Path) -> RunDir:
    return RunDir(place / "runs" / "digits")


@pytest.fixture
async def start(place: Path) -> AsyncIterator[Start]:
    """Starts a Python program in `place`; it is asked to end at the end, and killed where it does not."""
    started: list[asyncio.subprocess.Process] = []

    async def one(*words: str) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        # Packages may lie in folders that only PYTHONPATH names.
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"}
        process = await asyncio.create_subprocess_exec(
            sys.executable, *words, cwd=place, env=environment, stdin=pipe, stdout=pipe, stderr=pipe
        )
        started.append(process)
        return process

    yield one
    for process in reversed(started):
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.communicate(), 20)
        except TimeoutError:
            process.kill()
            await process.communicate()
