"""The engine contract on the real SGLang behind our server; the tests are those of tests/contracts/test_engine.py."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from streamrl.engines.channel import ChannelEngine
from streamrl.engines.server import serve
from streamrl.engines.sglang.engine import SglangEngine
from tests.contracts.test_engine import *  # noqa: F403
from tests.contracts.test_engine import Site

test_equal_seeds_give_equal_tokens_and_other_seeds_others = None
"""No test here: seeds need --enable-deterministic-inference, which SGLang has for GPUs only."""


@pytest.fixture
async def bare(sglang_engine: SglangEngine, epochs: Iterator[int]) -> AsyncIterator[Site]:
    """A site that serves no weights yet, asked over a channel as producers do."""
    assert sglang_engine.detail["swap"] == "flip"
    server = await serve(sglang_engine)
    client = ChannelEngine(server.address)
    try:
        yield Site(client, sglang_engine, "sglang", seeded=False, first_epoch=next(epochs), chunk_by_token=False)
    finally:
        await client.close()
        await server.stop()
