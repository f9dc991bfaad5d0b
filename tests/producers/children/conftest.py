from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tests.support.policies import make_model, script, start_engine
from tests.support.user_code import Workshop


@pytest_asyncio.fixture
async def workshop(tmp_path: Path) -> AsyncIterator[Workshop]:
    """With an engine that answers every prompt with `7`."""
    tokenizer = make_model(tmp_path / "model")
    engine = await start_engine(tmp_path / "model", script(tokenizer, {(0, "<|assistant|>"): "7"}))
    yield Workshop(tmp_path, engine)
    await engine.stop()
