from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from streamrl.bus.protocol import Bus
from streamrl.config.tree import BusConfig
from streamrl.data.tokenizer import Tokenizer
from streamrl.engines.table.engine import TableEngine
from streamrl.producers import repeats
from tests.support.policies import make_model, script, start_engine
from tests.support.producing import Loop, make_loop


@pytest_asyncio.fixture
async def loop(tmp_path: Path, run_id: str, make_bus: Callable[[BusConfig], Awaitable[Bus]]) -> Loop:
    """A run on both buses."""
    return await make_loop(tmp_path, run_id, make_bus)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return make_model(tmp_path / "model")


@pytest_asyncio.fixture
async def engine(request: pytest.FixtureRequest, tmp_path: Path, tokenizer: Tokenizer) -> AsyncIterator[TableEngine]:
    """An engine that answers as the test file's `ANSWERS` say."""
    engine = await start_engine(tmp_path / "model", script(tokenizer, request.module.ANSWERS))
    yield engine
    await engine.stop()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rollouts that an engine's error has ended begin again without a pause."""
    monkeypatch.setattr(repeats, "pause_s", lambda *_, **__: 0.0)
