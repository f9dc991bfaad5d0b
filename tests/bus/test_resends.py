"""What is sent again: while a cluster has no leader or still stores, and after a loss, in the order in which it began."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from nats.aio.msg import Msg

from streamrl.bus import connect
from streamrl.bus.jetstream import outbox
from streamrl.bus.jetstream.connection import NoResponder
from streamrl.bus.server import NatsServer
from streamrl.config.tree import BusConfig
from streamrl.schemas.subjects import EVENTS, Subjects
from tests.support.errors import raises

pytestmark = pytest.mark.nats

TO = Subjects("run")


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
