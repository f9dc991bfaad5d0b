from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from streamrl.bus import Bus, connect
from streamrl.bus.memory.bus import MemoryBus
from streamrl.bus.server import NatsServer


@pytest.fixture
def memory_bus() -> MemoryBus:
    """The bus of a run called `r`."""
    return MemoryBus("r")


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path / "nats")
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def nats_bus(nats: NatsServer) -> AsyncIterator[Bus]:
    """The bus of a run called `r` on a server of its own."""
    bus = await connect(nats.address, "r")
    yield bus
    await bus.close()
