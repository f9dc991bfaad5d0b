"""Programs that a test starts. The fixture `start` (tests/conftest.py) leaves none of them running."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.support.processes import stopped

Start = Callable[..., Awaitable[asyncio.subprocess.Process]]
ROOT = Path(__file__).resolve().parents[2]
PIPE = asyncio.subprocess.PIPE
STREAMRL = ("-m", "streamrl")


def surroundings(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a program that imports this checkout wherever it runs; PYTHONPATH is kept, since packages may lie there."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0", **(more or {})}


@asynccontextmanager
async def programs(place: Path, *, patience_s: float = 20.0) -> AsyncIterator[Start]:
    """Yield `start`: `await start(*words)` starts a Python program in `place`."""
    started: list[asyncio.subprocess.Process] = []

    async def start(*words: str, env: Mapping[str, str] | None = None, **streams: Any) -> asyncio.subprocess.Process:
        options = {"cwd": place, "env": surroundings(env), "stdout": PIPE, "stderr": PIPE} | streams
        process = await asyncio.create_subprocess_exec(sys.executable, *words, **options)
        started.append(process)
        return process

    try:
        yield start
    finally:
        for process in reversed(started):
            if process.returncode is None:
                await _end(process, patience_s)
            await process.communicate()


async def _end(process: asyncio.subprocess.Process, patience_s: float) -> None:
    if process.stdin is not None:
        process.stdin.close()
    elif not stopped(process.pid):
        for number in (signal.SIGINT, signal.SIGTERM):  # two of one kind may arrive as one
            process.send_signal(number)
    else:
        patience_s = 0.0
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.communicate(), patience_s)
    if process.returncode is None:
        process.kill()


async def said(process: asyncio.subprocess.Process, within_s: float = 120) -> tuple[int, str, str]:
    out, err = await asyncio.wait_for(process.communicate(), within_s)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def answer(process: asyncio.subprocess.Process) -> Any:
    """Return the JSON that a command prints, which must succeed."""
    code, out, err = await said(process)
    assert code == 0, err
    return json.loads(out)
