from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from streamrl.bus.server import NatsServer
from tests.kill.nursery import Nursery, nursery


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path / "nats")
    server.start()
    yield server
    server.stop()


@pytest_asyncio.fixture
async def children(tmp_path: Path) -> AsyncIterator[Nursery]:
    async with nursery(tmp_path / "children.log") as found:
        yield found
