"""Programs that the tests of Ray start, and what becomes of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

Start = Callable[..., Awaitable[asyncio.subprocess.Process]]
ROOT = Path(__file__).parents[2]


async def up(start: Start, address: str, *values: str) -> asyncio.subprocess.Process:
    """`streamrl up run.toml --json` on Ray, with `--set` for each value."""
    words = [word for value in (f"ray.address={address}", *values) for word in ("--set", value)]
    return await start("-m", "streamrl", "up", "run.toml", "--json", *words)


async def two_nodes(start: Start, gpus: int = 0) -> tuple[asyncio.subprocess.Process, str]:
    """A cluster of `two_nodes.py`, and its address."""
    cluster = await start(str(ROOT / "tests" / "ray" / "two_nodes.py"), str(gpus))
    assert cluster.stdout is not None
    return cluster, (await asyncio.wait_for(cluster.stdout.readline(), 90)).decode().strip()


async def said(process: asyncio.subprocess.Process, within_s: float = 120) -> tuple[int | None, str, str]:
    """Exit code, standard output and standard error, once it has ended."""
    out, err = await asyncio.wait_for(process.communicate(), within_s)
    return process.returncode, out.decode(), err.decode()
