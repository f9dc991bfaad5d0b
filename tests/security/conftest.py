from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from nats.aio.client import Client

from streamrl.bus import connect
from streamrl.bus.jetstream.bus import JetStreamBus
from streamrl.bus.jetstream.connection import Connection
from streamrl.bus.permissions import OPERATOR, ROLES, User, role_users
from streamrl.bus.server import NatsServer
from streamrl.config.tree import BusConfig

RUN = "run"
QUICK = BusConfig(patience_s=10.0)
As = Callable[[str], Awaitable[JetStreamBus]]


def wire_of(bus: JetStreamBus) -> Connection:
    """Return the connection by which the bus asks the server, for requests that the bus itself never makes."""
    return bus.connection


def client_of(bus: JetStreamBus) -> Client:
    """The client of nats-py below it."""
    return bus.connection.client


@pytest.fixture(scope="module")
def users() -> dict[str, User]:
    return {user.name: user for user in role_users(RUN, [(role, f"secret-of-{role}") for role in (OPERATOR, *ROLES)])}


@pytest.fixture(scope="module")
def role_server(tmp_path_factory: pytest.TempPathFactory, users: dict[str, User]) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path_factory.mktemp("roles") / "bus", users=list(users.values()))
    server.start()
    yield server
    server.stop()


@pytest_asyncio.fixture
async def as_role(role_server: NatsServer, users: dict[str, User]) -> AsyncIterator[As]:
    """`await as_role("producer")`: a connection with that role's credentials; the operator has made the streams, afresh."""
    opened = [await connect(role_server.address, RUN, QUICK)]

    async def connected(role: str) -> JetStreamBus:
        bus = opened[0] if role == OPERATOR else await connect(role_server.address_of(users[role]), RUN, QUICK, create=False)
        opened.append(bus)
        return bus

    yield connected
    await opened[0].remove()
    for bus in dict.fromkeys(opened):
        await bus.close()


@pytest.fixture
def repository() -> Path:
    return Path(__file__).parents[2]
