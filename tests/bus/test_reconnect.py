"""What survives a nats-server that is killed and started again, and what is sent again, in the order in which it was first sent."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing

import nats.errors
import pytest
import pytest_asyncio
from nats.aio.client import Client
from nats.aio.msg import Msg

from streamrl.bus import Message, connect
from streamrl.bus.jetstream import admin, blobs, outbox
from streamrl.bus.jetstream.bus import JetStreamBus
from streamrl.bus.jetstream.connection import Connection, NoResponder
from streamrl.bus.jetstream.transport import WideTransport
from streamrl.bus.server import NatsServer
from streamrl.bus.topology import blobs_name
from streamrl.config.tree import BusConfig
from streamrl.errors import BusUnavailable
from streamrl.schemas.subjects import EVENTS, Subjects
from tests.support.errors import raises
from tests.support.processes import stopped, until

pytestmark = pytest.mark.nats

RUN = "run"
TO = Subjects(RUN)
CONFIG = BusConfig(patience_s=30.0, ack_wait_s=2.0)


@pytest_asyncio.fixture
async def bus(own_server: NatsServer) -> AsyncIterator[JetStreamBus]:
    bus = await connect(own_server.address, RUN, CONFIG)
    yield bus
    await bus.close()


async def restart(server: NatsServer, *, away_s: float = 0.3) -> None:
    """Kill -9 and start again on the same store."""
    server.kill()
    await asyncio.sleep(away_s)
    server.start()


async def test_acknowledged_messages_are_all_there_once_and_in_order_after_kills_under_load(
    own_server: NatsServer, bus: JetStreamBus
) -> None:
    acknowledged: dict[str, int] = {}
    stop = asyncio.Event()

    async def write(writer: int) -> None:
        count = 0
        while not stop.is_set():
            message_id = f"{writer}.{count}"
            receipt = await bus.publish(TO.samples("main"), f"{message_id} ".encode() + bytes(4000), id=message_id)
            acknowledged[message_id] = receipt.sequence
            count += 1
            await asyncio.sleep(0.002)

    read: list[Message] = []

    async def follow() -> None:
        async with aclosing(bus.read("samples", after=0)) as messages:
            async for message in messages:
                read.append(message)

    follower = asyncio.create_task(follow())
    writers = [asyncio.create_task(write(writer)) for writer in range(32)]
    for _ in range(2):
        known = len(acknowledged)
        await until(lambda: len(acknowledged) > known + 150)  # noqa: B023
        await restart(own_server)
    await until(lambda: len(acknowledged) > known + 300)
    stop.set()
    await asyncio.gather(*writers)
    last = (await bus.state("samples")).last
    await until(lambda: follower.done() or len(read) >= last)
    follower.cancel()
    await asyncio.gather(follower, return_exceptions=True)

    assert [message.sequence for message in read] == list(range(1, last + 1))
    stored = [message.body.split(b" ")[0].decode() for message in read]
    assert len(set(stored)) == len(stored)
    assert {message_id: acknowledged[message_id] for message_id in stored} == {name: index + 1 for index, name in enumerate(stored)}
    assert len(acknowledged) == last > 300
    for writer in range(32):
        own = [int(name.split(".")[1]) for name in stored if name.startswith(f"{writer}.")]
        assert own == list(range(len(own)))


async def test_large_reads_stay_over_a_reconnect(own_server: NatsServer, bus: JetStreamBus) -> None:
    sizes: list[int] = []

    class Counting(WideTransport):
        async def read(self, buffer_size: int) -> bytes:
            data = await super().read(buffer_size)
            sizes.append(len(data))
            return data

    transport = bus.connection.client._transport
    assert type(transport) is WideTransport
    transport.__class__ = Counting
    body = os.urandom(4 << 20)
    for number in range(1, 3):
        await bus.publish(TO.samples("main"), body)
        sizes.clear()
        assert (await bus.fetch("samples", number)).body == body
        assert max(sizes) > 64 << 10, "the client's own limit"
        await restart(own_server)
        await bus.state("samples")
        assert bus.connection.client._transport is transport


async def test_a_compare_and_set_chain_goes_through_kills(own_server: NatsServer, bus: JetStreamBus) -> None:
    async def chain() -> None:
        for index in range(400):
            receipt = await bus.publish(TO.tasks("main"), b"%d" % index, id=str(index), expect_last=index)
            assert receipt.sequence == index + 1
            await asyncio.sleep(0.003)

    work = asyncio.create_task(chain())
    for _ in range(2):
        await asyncio.sleep(0.3)
        await restart(own_server, away_s=0.1)
    await work
    assert (await bus.state("tasks")).last == 400


async def test_claims_and_leases_survive_a_kill(own_server: NatsServer, bus: JetStreamBus) -> None:
    for index in range(10):
        await bus.publish(TO.tasks("main"), b"%d" % index)
    leases = list(await bus.claim("main", max=4, wait_s=1.0))
    waiting = asyncio.create_task(bus.claim("other", max=1, wait_s=1.0))
    await restart(own_server)
    await waiting
    for lease in leases:
        await lease.done()
    done = {lease.sequence for lease in leases}
    async with asyncio.timeout(30):
        while (await bus.state("tasks")).messages:
            for lease in await bus.claim("main", max=4, wait_s=0.5):
                await lease.done()
                done.add(lease.sequence)
    assert done == set(range(1, 11))


async def test_a_watch_tells_of_keys_that_changed_and_went_while_it_was_away(own_server: NatsServer, bus: JetStreamBus) -> None:
    for key in ("presence/stays", "presence/goes", "presence/changes"):
        await bus.kv.put(key, b"1")
    async with asyncio.timeout(30), aclosing(bus.kv.watch("presence/")) as watch:
        assert {(await anext(watch)).key for _ in range(3)} == {"presence/stays", "presence/goes", "presence/changes"}
        following = asyncio.ensure_future(anext(watch))
        await restart(own_server)
        other = await connect(own_server.address, RUN, CONFIG)
        await other.kv.put("presence/changes", b"2")
        entry = await following
        assert (entry.key, entry.value) == ("presence/changes", b"2")
        await other.kv.delete("presence/goes")
        entry = await anext(watch)
        assert (entry.key, entry.value) == ("presence/goes", None)
        await other.close()


async def test_blobs_are_written_and_read_over_a_kill(own_server: NatsServer, bus: JetStreamBus) -> None:
    data = os.urandom(30_000_000)
    put = asyncio.create_task(bus.blobs.put("large", data))
    await asyncio.sleep(0.03)
    await restart(own_server)
    await put
    get = asyncio.create_task(bus.blobs.get("large"))
    await asyncio.sleep(0.01)
    await restart(own_server)
    assert await get == data


async def test_what_a_dead_writer_left_behind_is_no_blob(own_server: NatsServer, bus: JetStreamBus) -> None:
    whole = os.urandom(2_000_000)
    await bus.blobs.put("whole", whole)
    connection = Connection(own_server.address, name="test", patience_s=5.0)
    await connection.open()

    async def messages() -> int:
        return (await admin.info(connection, blobs_name(RUN))).state.messages

    before = await messages()
    put = asyncio.create_task(bus.blobs.put("half", bytes(100_000_000)))
    async with asyncio.timeout(60):
        while await messages() == before:
            await asyncio.sleep(0)
    put.cancel()
    await asyncio.gather(put, return_exceptions=True)
    assert await bus.blobs.names() == ["whole"]
    assert await messages() > before
    assert await bus.blobs.get("whole") == whole
    await connection.close()


async def test_what_a_dead_writer_left_behind_goes_with_a_later_upload(
    own_server: NatsServer, bus: JetStreamBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bus.blobs.put("whole", os.urandom(2_000_000))
    dead = f"{1:013x}{'0' * 16}"
    for index in range(3):
        await bus.outbox.publish(f"$O.{RUN}.C.{dead}", bytes(1000), id=f"{dead}.{index}")

    async def messages() -> int:
        return (await admin.info(bus.connection, blobs_name(RUN))).state.messages

    before = await messages()
    await asyncio.sleep(1.5)
    others = await connect(own_server.address, RUN, CONFIG)
    await others.blobs.put("b", b"x")
    assert await messages() == before + 2, "they are young: somebody may be about to add to them"
    monkeypatch.setattr(blobs, "ORPHAN_S", 1.0)
    await bus.blobs.put("c", b"x")
    assert await messages() == before + 4 - 3
    assert await bus.blobs.names() == ["b", "c", "whole"] and len(await bus.blobs.get("whole")) == 2_000_000
    await others.close()


async def test_a_connection_that_breaks_while_it_is_made_again_is_made_again(bus: JetStreamBus, monkeypatch: pytest.MonkeyPatch) -> None:
    subscribe, broken = Client.subscribe, [nats.errors.ConnectionClosedError(), OSError("a surprise"), ValueError("another")]

    async def breaks(client: Client, *given: object, **options: object) -> object:
        if broken:
            raise broken.pop(0)
        return await subscribe(client, *given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Client, "subscribe", breaks)
    await bus.connection.client.close()  # for good, as after a protocol error
    async with asyncio.timeout(60):
        assert (await bus.publish(TO.marks, b"x")).sequence == 1
    assert broken == []


async def test_a_bus_that_stays_away_is_a_named_error(own_server: NatsServer) -> None:
    bus = await connect(own_server.address, RUN, BusConfig(patience_s=0.5))
    reader = asyncio.ensure_future(anext(bus.read("samples", after=0)))
    await asyncio.sleep(0.1)
    own_server.kill()
    asked = [bus.publish(TO.marks, b"x"), bus.kv.put("key", b"x"), bus.kv.get("key"), bus.state("samples"), bus.blobs.put("blob", b"x")]
    results = await asyncio.gather(*asked, reader, return_exceptions=True)
    assert [type(result) for result in results] == [BusUnavailable] * len(results)
    assert all(result.hint for result in results if isinstance(result, BusUnavailable))
    with pytest.raises(BusUnavailable):
        await bus.claim("main", max=1, wait_s=0.0)
    await bus.close()


async def test_a_server_that_keeps_silent_is_a_named_error_and_its_messages_are_stored_once(own_server: NatsServer) -> None:
    bus = await connect(own_server.address, RUN, BusConfig(patience_s=1.0))
    pid = own_server.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: stopped(pid))  # some time after it was sent
    try:
        with pytest.raises(BusUnavailable, match="did not acknowledge") as caught:
            await bus.publish(TO.marks, b"x", id="x")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert "disk" in caught.value.hint
    assert (await bus.publish(TO.marks, b"x", id="x")).sequence == 1
    assert (await bus.publish(TO.marks, b"y", id="y")).sequence == 2
    await bus.close()


async def test_a_closed_bus_refuses_work_at_once_and_ends_its_readers(own_server: NatsServer) -> None:
    bus = await connect(own_server.address, RUN, CONFIG)
    reader = asyncio.ensure_future(anext(bus.read("samples", after=0)))
    await asyncio.sleep(0.1)
    await bus.close()
    await bus.close()
    async with asyncio.timeout(20):  # less than the patience
        results = await asyncio.gather(reader, bus.publish(TO.marks, b"x"), bus.state("samples"), bus.kv.get("a"), return_exceptions=True)
    assert [type(result) for result in results] == [BusUnavailable] * 4


async def test_a_message_that_a_cluster_is_still_storing_is_asked_about_again(own_server: NatsServer) -> None:
    """One server alone never says so; a cluster does between two leaders, to whoever sends a message again."""
    bus = await connect(own_server.address, "run", BusConfig(patience_s=30.0))
    asked = list[str]()

    async def answer(message: Msg) -> None:
        assert message.headers is not None
        asked.append(message.headers["Nats-Msg-Id"])
        refusal = b'{"error": {"code": 409, "err_code": 10158, "description": "duplicate message id is in process"}}'
        await message.respond(refusal if len(asked) < 3 else b'{"stream": "S", "seq": 7, "duplicate": true}')

    await bus.connection.client.subscribe("elsewhere", cb=answer)
    ack, attempts = await bus.outbox.publish("elsewhere", b"x", id="one")
    assert (ack.error, ack.seq, attempts, asked) == (None, 7, 3, ["one"] * 3)
    await bus.close()


async def test_a_request_waits_for_a_cluster_to_choose_a_leader(own_server: NatsServer) -> None:
    """A cluster without one answers with an error instead of keeping silent; a stored message may say the same words."""
    bus = await connect(own_server.address, "run", BusConfig(replicas=1))
    connection = bus.connection
    connection.unheard_s = 30.0
    refusal = b'{"type": "t", "error": {"code": 503, "err_code": 10008, "description": "JetStream system temporarily unavailable"}}'
    asked = 0

    async def answer(message: Msg) -> None:
        nonlocal asked
        asked += 1
        await message.respond(refusal if asked < 3 else b"{}")

    await connection.client.subscribe("elsewhere", cb=answer)
    assert (await connection.request("elsewhere")).data == b"{}" and asked == 3
    connection.unheard_s, asked = 0.0, -(10**6)
    with raises(NoResponder):
        await connection.request("elsewhere")
    receipt = await bus.publish(TO.events("x"), refusal)
    assert (await bus.fetch(EVENTS, receipt.sequence)).body == refusal
    await bus.close()


async def test_messages_of_which_some_were_sent_again_keep_their_order(own_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "RESEND_S", 2.0)
    bus = await connect(own_server.address, "run", BusConfig(patience_s=60.0))
    assert own_server.pid is not None
    os.kill(own_server.pid, signal.SIGSTOP)
    posts = [asyncio.ensure_future(bus.publish(TO.events("x"), b"%d" % number)) for number in range(5)]
    await asyncio.sleep(1.0)
    posts += [asyncio.ensure_future(bus.publish(TO.events("x"), b"%d" % number)) for number in range(5, 10)]
    async with asyncio.timeout(30):
        while {post.body: post.attempts for post in bus.outbox.sent.values()}.get(b"0", 0) < 2:
            await asyncio.sleep(0.01)
        own_server.kill()
        own_server.start()
        assert [receipt.sequence for receipt in await asyncio.gather(*posts)] == list(range(1, 11))
    await bus.close()
