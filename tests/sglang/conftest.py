"""A real SGLang on this machine's CPU, one server for all tests of this folder: it takes half a minute to start.

It needs an environment of its own: `make sglang-cpu` makes `.venv-sglang`; SGLANG_PYTHON names another one's interpreter.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from streamrl.config.engines import EngineConfig
from streamrl.engines.sglang.engine import SglangEngine
from streamrl.engines.sglang.server import SglangServer
from tests.sglang.cpu import MAX_LEN, cpu_config, write_model
from tests.support import needs
from tests.support.needs import need


@pytest.fixture(scope="session")
def sglang_python() -> str:
    need("sglang")
    return str(needs.sglang_python())


@pytest.fixture(scope="session")
def sglang_config(sglang_python: str) -> EngineConfig:
    return cpu_config(sglang_python)


@pytest.fixture(scope="session")
def shared_server(sglang_config: EngineConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    """A running server with a tiny Qwen3, tied to no event loop. It serves what the test before left: use higher epochs."""
    folder = tmp_path_factory.mktemp("sglang")
    server = SglangServer(sglang_config, write_model("qwen3", folder), name="tests", max_len=MAX_LEN, dtype="float32")

    async def start() -> None:
        await server.start()
        await server.detach()

    asyncio.run(start())
    try:
        yield server
    finally:
        asyncio.run(server.stop())


@pytest.fixture(scope="session")
def epochs() -> Iterator[int]:
    """Epochs that nobody has used on the shared server; the next one is `next(epochs)`."""
    return itertools.count(0, 100)


@pytest_asyncio.fixture
async def sglang_server(shared_server: SglangServer) -> AsyncIterator[SglangServer]:
    """The shared server, watched by the test's event loop."""
    shared_server.attach()
    try:
        yield shared_server
    finally:
        await shared_server.detach()


@asynccontextmanager
async def engine_over(server: SglangServer, config: EngineConfig, **options: Any) -> AsyncIterator[SglangEngine]:
    """A new engine over a server that goes on afterwards."""
    engine = SglangEngine(config, server.model_dir, server, engine_id="engine-0", policy="policy", max_len=MAX_LEN, owned=False, **options)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


@pytest_asyncio.fixture
async def sglang_engine(sglang_server: SglangServer, sglang_config: EngineConfig) -> AsyncIterator[SglangEngine]:
    """A new engine over the shared server; it serves nothing yet."""
    async with engine_over(sglang_server, sglang_config) as engine:
        yield engine
