from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest
import pytest_asyncio
from nats.aio.client import Client

from streamrl.bus import connect
from streamrl.bus.jetstream.bus import JetStreamBus
from streamrl.bus.jetstream.connection import Connection
from streamrl.bus.permissions import OPERATOR, ROLES, User, role_users
from streamrl.bus.server import NatsServer
from streamrl.config.tree import BusConfig
from streamrl.schemas.subjects import Subjects

RUN = "run"
TO = Subjects(RUN)
KEYS = ("granted", "latest/main", "fences/main", "positions/main", "run", "presence/engines/x", "pins/policy/0-4/holder")
QUICK = BusConfig(patience_s=60.0)
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


async def furnish(operator: JetStreamBus) -> None:
    """Store something wherever a run has something."""
    of_main = (TO.samples("main"), TO.ledger("main"), TO.tasks("main"), TO.grading("main"))
    for subject in (*of_main, TO.weights("policy"), TO.dead, TO.metrics("x"), TO.events("finished")):
        for number in range(3):
            await operator.publish(subject, b"there %d" % number)
    for key in (*KEYS, "checkpoints/1/0"):
        await operator.kv.put(key, b"there")
    for turn in ("1/0/0", "7/0/0"):
        await operator.turns.put(turn, b"there")
    for blobs in (operator.blobs, operator.sample_blobs):
        await blobs.put("old", b"bytes")
