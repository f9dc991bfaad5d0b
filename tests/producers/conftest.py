from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from streamrl.bus.protocol import Bus
from streamrl.config.tree import BusConfig
from streamrl.producers import repeats
from tests.support.producing import PRODUCERS, Loop, make_loop


@pytest_asyncio.fixture
async def loop(tmp_path: Path, run_id: str, make_bus: Callable[[BusConfig], Awaitable[Bus]]) -> Loop:
    """A run on both buses."""
    return await make_loop(tmp_path, run_id, make_bus)


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    """A file of producer functions."""
    path = tmp_path / "functions.py"
    path.write_text(PRODUCERS)
    return path


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rollouts that an engine's error has ended begin again without a pause."""
    monkeypatch.setattr(repeats, "pause_s", lambda *_, **__: 0.0)
