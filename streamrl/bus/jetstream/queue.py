"""The task queue: one durable consumer for each source, explicit acknowledgements."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from nats.aio.msg import Msg

from streamrl.bus.accounts import PULL_S
from streamrl.bus.jetstream import admin
from streamrl.bus.jetstream.connection import Connection, Interrupted, NoResponder, Sink
from streamrl.bus.jetstream.options import unreachable
from streamrl.bus.jetstream.wire import STATUS, Simple, decode, delivery, error_of
from streamrl.errors import Forbidden

logger = logging.getLogger(__name__)

LATE_S = 2.0
"""How much longer than the server's own limit an answer is waited for."""
ACK_ATTEMPTS = 3
ACK_S = 1.5
"""How long the answer to one acknowledgement is waited for."""
GONE = (10037, 10043, 10057)
"""Codes with which the server says that a message is not there."""
_NANOSECONDS = 1_000_000_000


class JetStreamLease:
    """One claimed task.

    A server that was killed may have forgotten the delivery, not the task: it then leaves acknowledgements unanswered and delivers
    the task again. `done` notices and removes the task itself, where the credentials allow it; else the task is done once more, which
    the fold drops.
    """

    def __init__(self, connection: Connection, stream: str, message: Msg) -> None:
        facts = delivery(message.reply)
        self._connection = connection
        self._stream = stream
        self.reply = message.reply
        self._body = message.data
        self._sequence = facts.stream_sequence
        self._deliveries = facts.deliveries
        self._stored_s = facts.stored_s

    @property
    def body(self) -> bytes:
        return self._body

    @property
    def sequence(self) -> int:
        return self._sequence

    @property
    def deliveries(self) -> int:
        return self._deliveries

    @property
    def stored_s(self) -> float:
        return self._stored_s

    async def keep(self) -> None:
        await self._connection.ready()
        with contextlib.suppress(Interrupted):
            await self._connection.send(self.reply, b"+WPI")

    async def done(self) -> None:
        if await self._confirmed(b"+ACK"):
            return
        try:
            answer = await self._connection.request(f"{self._connection.api}.STREAM.MSG.DELETE.{self._stream}", {"seq": self._sequence})
        except Forbidden:
            logger.warning("event=bus_task_left stream=%s seq=%d reason=the_server_forgot_its_delivery", self._stream, self._sequence)
            return
        reply = decode(answer.data, Simple)
        if reply.error is not None and reply.error.err_code not in GONE:
            raise error_of(reply.error, doing=f"finish task {self._sequence} of {self._stream}")
        logger.warning("event=bus_task_removed stream=%s seq=%d reason=the_server_forgot_its_delivery", self._stream, self._sequence)

    async def retry(self, delay_s: float = 0.0) -> None:
        delay = b' {"delay": %d}' % int(delay_s * _NANOSECONDS) if delay_s > 0 else b""
        await self._confirmed(b"-NAK" + delay)

    async def _confirmed(self, word: bytes) -> bool:
        """Send an acknowledgement; whether the server confirmed it. Raises BusUnavailable when the bus stays away."""
        for _ in range(ACK_ATTEMPTS):
            await self._connection.ready()
            try:
                await self._connection.ask(self.reply, word, timeout_s=ACK_S)
            except (Interrupted, NoResponder) as error:
                logger.debug("event=bus_acknowledgement_unanswered stream=%s seq=%d error=%s", self._stream, self._sequence, error)
                continue
            return True
        return False


class TaskQueue:
    """Claims from the work queue of a run.

    Args:
        connection: an open connection.
        stream: the server's name of the task stream.
        ack_wait_s: a claimed task that is not kept alive for this long is delivered again.
    """

    def __init__(self, connection: Connection, stream: str, ack_wait_s: float) -> None:
        self._connection = connection
        self._stream = stream
        self._ack_wait_s = ack_wait_s
        self._consumers: set[str] = set()
        self._idle: list[Sink] = []
        self._requests = 0

    async def claim(self, subject: str, source: str, *, max: int, wait_s: float) -> Sequence[JetStreamLease]:
        """Up to `max` tasks of `subject`; see `Bus.claim`.

        First what is there, without waiting; if there is nothing, wait for one task and then take what has come with it. A
        waiting request for several could go on collecting tasks that nobody works on.
        """
        deadline = time.monotonic() + wait_s
        if not await self._up(wait_s):
            return []
        await self._ensure(subject, source)
        leases: list[JetStreamLease] = []
        try:
            if max > 1 or wait_s <= 0:
                await self._pull(source, {"batch": max, "no_wait": True}, LATE_S, leases)
            while not leases and (left := deadline - time.monotonic()) > 0.001 and self._connection.connected:
                await self._ensure(subject, source)
                waits = min(left, PULL_S)
                await self._pull(source, {"batch": 1, "expires": int(waits * _NANOSECONDS)}, waits + LATE_S, leases)
                if leases and max > 1:
                    await self._pull(source, {"batch": max - 1, "no_wait": True}, LATE_S, leases)
        except asyncio.CancelledError:
            self._give_back(leases)
            raise
        return leases

    async def _up(self, wait_s: float) -> bool:
        """Whether the bus is there within `wait_s`; raises BusUnavailable once it has been away for longer than the patience."""
        if self._connection.connected:
            return True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._connection.up(), wait_s)
            return True
        if self._connection.away_s > self._connection.patience_s:
            raise unreachable(self._connection.address, self._connection.away_s, None)
        return False

    async def _ensure(self, subject: str, source: str) -> None:
        """Make the source's consumer, or bring its ack wait up to date; once per connection and source."""
        if source not in self._consumers:
            await admin.ensure_consumer(self._connection, self._stream, source, subject, self._ack_wait_s)
            self._consumers.add(source)

    async def _pull(self, source: str, request: Mapping[str, Any], limit_s: float, leases: list[JetStreamLease]) -> None:
        """Ask for tasks and append the leases; returns when the server has no more to give, or the connection breaks."""
        finished: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        wanted = len(leases) + request["batch"]
        sink = self._idle.pop() if self._idle else await self._connection.open_sink(self._return)
        self._requests += 1
        reply = sink.reply(self._requests)
        consumer = f".{self._stream}.{source}."

        def on_message(message: Msg) -> None:
            if not message.reply:
                status = (message.headers or {}).get(STATUS, "")
                if message.subject == reply:
                    _finish(finished, int(status) if status.isdigit() else 0)
            elif len(leases) < wanted and consumer in message.reply:
                leases.append(JetStreamLease(self._connection, self._stream, message))
                if len(leases) == wanted:
                    _finish(finished, 0)
            else:
                self._return(message)

        sink.handler = on_message
        stop_listening = self._connection.listen(lambda up: _finish(finished, 0))
        timer = asyncio.get_running_loop().call_later(limit_s, _finish, finished, 0)
        try:
            await self._connection.send(
                f"{self._connection.api}.CONSUMER.MSG.NEXT.{self._stream}.{source}", msgspec.json.encode(request), reply
            )
            status = await finished
        except Interrupted:
            return
        finally:
            timer.cancel()
            stop_listening()
            sink.handler = self._return
            self._idle.append(sink)
        if status in (409, 503):
            # The consumer is gone or moved (somebody deleted it, or the server restarts): look again at the next claim.
            logger.warning("event=bus_claim_refused source=%s status=%d", source, status)
            self._consumers.discard(source)
            await asyncio.sleep(0.1)

    def _return(self, message: Msg) -> None:
        """Give back at once what was delivered for a claim that has gone; otherwise it would rest for the whole ack wait."""
        if message.reply:
            self._give_back([JetStreamLease(self._connection, self._stream, message)])

    def _give_back(self, leases: Sequence[JetStreamLease]) -> None:
        """Return tasks that nobody works on."""
        for lease in leases:
            task = asyncio.get_running_loop().create_task(_quietly(lease.retry()))
            self._connection.adopt(task)


async def _quietly(work: Any) -> None:
    with contextlib.suppress(Interrupted):
        await work


def _finish(future: asyncio.Future[int], status: int) -> None:
    if not future.done():
        future.set_result(status)
