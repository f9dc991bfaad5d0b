"""Reading through a throw-away consumer that needs no acknowledgements, with requests for the next messages kept in flight."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec
from nats.aio.msg import Msg

from streamrl.bus.jetstream.connection import NO_RESPONDER_S, RETRY_S, Connection, Interrupted, NoResponder, Sink
from streamrl.bus.jetstream.wire import DESCRIPTION, STATUS, ConsumerReply, Delivery, decode, delivery, error_of

logger = logging.getLogger(__name__)

BATCH = 256
BATCH_BYTES = 16 << 20
"""Bytes of one request: two of them stay below the 64 MiB that a server buffers for a client by default."""
EXPIRES_S = 30.0
HEARTBEAT_S = 5.0
IDLE_CONSUMER_S = 60.0
"""After this long without requests the server forgets the consumer (a reader that died)."""
_NANOSECONDS = 1_000_000_000


class Session:
    """One consumer on one connection. It ends with Interrupted; the caller opens another one from where it stood.

    Args:
        connection: where to read.
        stream: the server's name of the stream.
        config: what to deliver: `deliver_policy`, `opt_start_seq`, `filter_subject`.
        follow: wait for new messages; without it `next` returns None after the last one.
    """

    def __init__(self, connection: Connection, stream: str, config: Mapping[str, Any], *, follow: bool = True) -> None:
        self._connection = connection
        self._stream = stream
        self._name = secrets.token_hex(8)
        self._config = dict(config)
        self._follow = follow
        self._buffer: deque[tuple[Msg, Delivery]] = deque()
        self._buffered_bytes = 0
        self._sink: Sink | None = None
        self._requests = 0
        self._promised = 0
        self._arrived = asyncio.Event()
        self._broken: str | None = None
        self._exhausted = False
        self._next_consumer_sequence = 1
        self._heard_s = time.monotonic()
        self._watchdog: asyncio.TimerHandle | None = None
        self._stop_listening = connection.listen(self._on_connection)

    async def open(self) -> int:
        """Make the consumer; returns how many messages it will deliver at first. Raises BusError, BusUnavailable, Interrupted."""
        await self._connection.ready()
        config = {
            "name": self._name,
            "ack_policy": "none",
            "max_deliver": 1,
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": int(IDLE_CONSUMER_S * _NANOSECONDS),
            **self._config,
        }
        subject = f"$JS.API.CONSUMER.CREATE.{self._stream}.{self._name}"
        if "filter_subject" in self._config:
            subject += f".{self._config['filter_subject']}"
        answer = await self._connection.ask(subject, msgspec.json.encode({"stream_name": self._stream, "config": config}))
        reply = decode(answer.data, ConsumerReply)
        if reply.error is not None:
            raise error_of(reply.error, doing=f"read {self._stream}")
        self._sink = await self._connection.open_sink(self._on_message)
        self._watch()
        return reply.num_pending

    async def close(self) -> None:
        """Forget the requests and the consumer."""
        self._stop_listening()
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self._sink is not None:
            await self._connection.close_sink(self._sink)
        with contextlib.suppress(Interrupted):
            await self._connection.send(f"$JS.API.CONSUMER.DELETE.{self._stream}.{self._name}", b"")

    async def next(self) -> tuple[Msg, Delivery] | None:
        """The next message; None after the last one when not following. Raises Interrupted when the session is over."""
        while not self._buffer:
            if self._broken is not None:
                raise Interrupted(f"reading {self._stream} was interrupted: {self._broken}")
            if self._exhausted:
                return None
            self._arrived.clear()
            await self._refill()
            if not self._buffer and self._broken is None:
                await self._arrived.wait()
        message, facts = self._buffer.popleft()
        self._buffered_bytes -= len(message.data)
        if self._follow and len(self._buffer) <= BATCH // 2 and self._buffered_bytes <= BATCH_BYTES // 2:
            await self._refill()
        return message, facts

    async def _refill(self) -> None:
        """Ask for more before the server has run out of what it was asked for; without following, only afterwards."""
        if self._promised > (BATCH // 2 if self._follow else 0) or self._broken is not None or self._sink is None:
            return
        body: dict[str, Any] = {"batch": BATCH, "max_bytes": BATCH_BYTES}
        if self._follow:
            body |= {"expires": int(EXPIRES_S * _NANOSECONDS), "idle_heartbeat": int(HEARTBEAT_S * _NANOSECONDS)}
        else:
            body["no_wait"] = True
        self._promised += BATCH
        self._requests += 1
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._name}"
        try:
            await self._connection.send(subject, msgspec.json.encode(body), self._sink.reply(self._requests))
        except Interrupted as error:
            self._break(error.message)

    def _on_message(self, message: Msg) -> None:
        self._heard_s = time.monotonic()
        if not message.reply:
            self._on_status(message.headers or {})
            return
        facts = delivery(message.reply)
        if facts.consumer_sequence != self._next_consumer_sequence:
            self._break(f"expected delivery {self._next_consumer_sequence}, got {facts.consumer_sequence}")
            return
        self._next_consumer_sequence += 1
        self._buffer.append((message, facts))
        self._buffered_bytes += len(message.data)
        self._promised -= 1
        self._arrived.set()

    def _on_status(self, headers: Mapping[str, str]) -> None:
        """100: heartbeat; 404 and 408: nothing (more) there; 409 is several things, most of which end the consumer."""
        status, description = headers.get(STATUS, ""), headers.get(DESCRIPTION, "")
        if status == "100":
            return
        unserved = headers.get("Nats-Pending-Messages", "")
        self._promised = max(0, self._promised - int(unserved)) if unserved.isdigit() else 0
        if status == "404" and not self._follow:
            self._exhausted = True
        elif status not in ("404", "408") and "maxbytes" not in description.lower():
            self._break(f"{status} {description}")
        self._arrived.set()

    def _break(self, reason: str) -> None:
        if self._broken is None:
            self._broken = reason
        self._arrived.set()

    def _on_connection(self, up: bool) -> None:
        self._break("the connection broke")

    def _watch(self) -> None:
        """End a session whose requests the server has silently forgotten: it sends heartbeats while it holds one."""
        if self._promised <= 0:
            self._heard_s = time.monotonic()
        elif time.monotonic() - self._heard_s > 3 * HEARTBEAT_S:
            self._break("no heartbeat from the server")
            return
        self._watchdog = asyncio.get_running_loop().call_later(HEARTBEAT_S, self._watch)


async def opened(connection: Connection, stream: str, config: Mapping[str, Any], *, follow: bool = True) -> tuple[Session, int]:
    """Open a session, again and again while the connection breaks or the server starts; returns it and its first count.

    Raises:
        BusUnavailable: the server stayed away for longer than the patience.
        BusError: the server refused, or has no such stream.
    """
    unheard_since: float | None = None
    while True:
        session = Session(connection, stream, config, follow=follow)
        try:
            return session, await session.open()
        except Interrupted as error:
            await session.close()
            logger.debug("event=bus_read_interrupted stream=%s error=%s", stream, error)
        except NoResponder:
            await session.close()
            unheard_since = unheard_since or time.monotonic()
            if time.monotonic() - unheard_since > NO_RESPONDER_S:
                raise
        except BaseException:
            await session.close()
            raise
        await asyncio.sleep(RETRY_S)
