"""The engine contract on the real SGLang, weights through the plugin; the tests are those of tests/contracts/test_engine.py."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from streamrl.engines.http import HttpEngine
from streamrl.engines.server import serve
from streamrl.engines.sglang.engine import SglangEngine
from tests.contracts.test_engine import *  # noqa: F403
from tests.contracts.test_engine import Site


@pytest.fixture(params=["sglang", "http-sglang"])
async def bare(request: pytest.FixtureRequest, sglang_engine: SglangEngine, epochs: Iterator[int]) -> AsyncIterator[Site]:
    """A site that serves no weights yet."""
    assert sglang_engine.detail["swap"] == "flip"
    # Seeds need --enable-deterministic-inference, which SGLang has for GPUs only.
    values = {"host": sglang_engine, "kind": "sglang", "seeded": False, "first_epoch": next(epochs), "chunk_by_token": False}
    if request.param == "sglang":
        yield Site(engine=sglang_engine, **values)
        return
    server = await serve(sglang_engine)
    client = HttpEngine(server.address)
    try:
        yield Site(engine=client, **values)
    finally:
        await client.close()
        await server.stop()
