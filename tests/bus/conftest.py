from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrl.bus.server import NatsServer


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A started nats-server that the test may kill and start again."""
    server = NatsServer(tmp_path / "bus")
    server.start()
    yield server
    server.stop()
