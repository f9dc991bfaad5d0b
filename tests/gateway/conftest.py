from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest_asyncio

from streamrl.bus.protocol import Bus
from streamrl.config.tree import BusConfig
from tests.support.producing import Loop, make_loop, memory_loop


@pytest_asyncio.fixture
async def loop(tmp_path: Path, run_id: str) -> AsyncIterator[Loop]:
    """A run on the in-process bus."""
    made = await memory_loop(tmp_path, run_id)
    yield made
    await made.bus.close()


@pytest_asyncio.fixture
async def on_both_buses(tmp_path: Path, run_id: str, make_bus: Callable[[BusConfig], Awaitable[Bus]]) -> Loop:
    return await make_loop(tmp_path, run_id, make_bus)
