"""Programs that the tests of Ray start, and what becomes of them."""

import asyncio
from pathlib import Path

from tests.support.programs import PIPE, Start, said

START_S = 240.0
"""Longest that a cluster, or all workers of a run on it, may take to start: each of some ten processes imports Ray."""


async def up(start: Start, address: str, *values: str) -> asyncio.subprocess.Process:
    """`streamrl up run.toml --json` on Ray, with `--set` for each value."""
    words = [word for value in (f"ray.address={address}", *values) for word in ("--set", value)]
    return await start("-m", "streamrl", "up", "run.toml", "--json", *words)


async def ended(process: asyncio.subprocess.Process, within_s: float = 120, *, code: int = 0) -> tuple[str, str]:
    """Return what a program that ends with this code has written to stdout and stderr."""
    found, out, err = await said(process, within_s)
    assert found == code, err
    return out, err


async def two_nodes(start: Start, gpus: int = 0) -> tuple[asyncio.subprocess.Process, str]:
    """A cluster of `two_nodes.py`, and its address."""
    cluster = await start(str(Path(__file__).with_name("two_nodes.py")), str(gpus), stdin=PIPE)
    assert cluster.stdout is not None
    return cluster, (await asyncio.wait_for(cluster.stdout.readline(), START_S)).decode().strip()
