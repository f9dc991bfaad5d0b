"""What the NATS client of the bus does otherwise than the package's: how it reads headers, calls who subscribed, and gathers."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
from nats.aio.client import Client

from streamrl.bus import BusAddress, connect
from streamrl.bus.jetstream import transport
from streamrl.bus.jetstream.bus import JetStreamBus
from streamrl.bus.jetstream.client import DirectClient
from streamrl.bus.jetstream.connection import Connection
from streamrl.bus.jetstream.transport import GATHER_S, WideTransport
from streamrl.bus.protocol import Message
from streamrl.bus.server import NatsServer
from streamrl.config.tree import BusConfig
from streamrl.schemas.subjects import EVENTS, Subjects

TO = Subjects("run")


def test_headers_are_read_as_the_client_reads_them() -> None:
    theirs: Callable[[bytes], dict[str, str]] | None = getattr(Client, "_parse_header_lines", None)
    if theirs is None:
        pytest.skip("this version of the client reads them otherwise")
    ours: Callable[[bytes], dict[str, str]] = DirectClient._parse_header_lines
    assert ours(b"A: 1\r\nB:2\r\nA:\t3 \r\nnone\r\nc d: 4\r\n\r\n") == {"A": "3", "B": "2"}
    draw = random.Random(0)
    pieces = [b"Nats-Sequence", b"a", b":", b": ", b" ", b"\t", b"\r\n", b"\r", b"\n", b"\x0b", b"\x1c", b"\x85", b"\xff", b"\xc3"]
    pieces.append("é:\xa0".encode())
    blocks = (b"".join(draw.choices(pieces, k=draw.randrange(24))) for _ in range(5_000))
    for block in blocks:
        wanted = {name: value for name, value in theirs(block).items() if name}
        assert ours(block) == wanted, block


@pytest_asyncio.fixture
async def gathering(own_server: NatsServer) -> AsyncIterator[JetStreamBus]:
    bus = await connect(own_server.address, "run", BusConfig(patience_s=60.0), gather=True)
    yield bus
    await bus.close()


async def heard(bus: JetStreamBus, count: int) -> list[Message]:
    found: list[Message] = []
    async with asyncio.timeout(30):
        async for message in bus.read(EVENTS, after=0):
            found.append(message)
            if len(found) == count:
                break
    return found


async def test_a_login_that_came_too_late_is_tried_again() -> None:
    answers = [b"-ERR 'Authentication Timeout'\r\n", b"PONG\r\n"]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_name": "busy", "auth_required": true, "max_payload": 1024}\r\n')
        await reader.readuntil(b"PING\r\n")
        writer.write(answers.pop(0))
        if not answers:
            await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = BusAddress(url=f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}", user="streamrl", password="secret")
    connection = Connection(address, name="late", patience_s=60.0)
    async with server:
        await connection.open()
        assert connection.connected and not answers
        await connection.close()


@pytest.mark.nats
async def test_what_fails_in_a_callback_ends_nothing(own_server: NatsServer) -> None:
    bus = await connect(own_server.address, "run", BusConfig(patience_s=60.0))
    errors: list[Exception] = []

    async def note(error: Exception) -> None:
        errors.append(error)

    def fail(message: object) -> None:
        raise ValueError("a handler")

    try:
        bus.connection.client._error_cb = note
        sink = await bus.connection.open_sink(fail, "elsewhere")
        await bus.connection.send("elsewhere", b"")
        await bus.publish(TO.events("x"), b"1")
        assert [message.body for message in await heard(bus, 1)] == [b"1"]
        assert [str(error) for error in errors] == ["a handler"]
        await bus.connection.close_sink(sink)
    finally:
        await bus.close()


@pytest.mark.nats
async def test_a_socket_that_gathers_wakes_a_few_times_for_many_messages(own_server: NatsServer, gathering: JetStreamBus) -> None:
    reads = 0

    class Counting(WideTransport):
        async def read(self, buffer_size: int) -> bytes:
            nonlocal reads
            reads += 1
            return await super().read(buffer_size)

    count = 60
    hearing = asyncio.create_task(heard(gathering, count))
    other = await connect(own_server.address, "run", BusConfig(patience_s=60.0))
    try:
        await other.publish(TO.events("x"), b"0")
        transport_of: Any = gathering.connection.client._transport
        transport_of.__class__ = Counting
        start_s = time.monotonic()
        for number in range(1, count):
            await asyncio.sleep(0.02)
            await other.publish(TO.events("x"), b"%d" % number)
        assert [message.body for message in await hearing] == [b"%d" % number for number in range(count)]
        # A look at the stream, every 5 s, asks once.
        seconds = time.monotonic() - start_s
        assert reads <= seconds / GATHER_S + 2 * seconds / 5.0 + 4
    finally:
        hearing.cancel()
        await other.close()


@pytest.mark.nats
async def test_answers_are_not_gathered(own_server: NatsServer, gathering: JetStreamBus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "GATHER_S", 3600.0)
    async with asyncio.timeout(30):
        for number in range(1, 4):
            assert (await gathering.publish(TO.events("x"), b"1")).sequence == number
            await gathering.kv.put("one", b"1")
            assert (await gathering.state(EVENTS)).last == number
        assert (await gathering.fetch(EVENTS, 2)).body == b"1"
        await asyncio.gather(*(gathering.publish(TO.events("x"), b"2") for _ in range(50)))
        assert len(await heard(gathering, 53)) == 53
        own_server.kill()
        own_server.start()
        assert (await gathering.state(EVENTS)).last == 53
