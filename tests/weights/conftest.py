from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from streamrl.bus import Bus, connect
from streamrl.bus.memory import MemoryBus
from streamrl.bus.server import NatsServer


@pytest.fixture
def memory_bus() -> MemoryBus:
    """The bus of a run called `r`."""
    return MemoryBus("r")


@pytest.fixture
async def nats_bus(own_server: NatsServer) -> AsyncIterator[Bus]:
    """The bus of a run called `r` on a server of its own."""
    bus = await connect(own_server.address, "r")
    yield bus
    await bus.close()
