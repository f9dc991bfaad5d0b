"""Publishing: one ordered queue, many messages under way, each stored once.

A message waits in `_queue`, is sent and moves to `sent`, and leaves when the server has acknowledged it. When the connection
breaks, all of `sent` goes back into the queue in its order, and is sent again with the same ids: what the server
had already stored it recognises. What an answer never came for is sent again after a while too.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import Mapping
from functools import partial

from nats.aio.msg import Msg

from streamrl.bus.jetstream.connection import Connection, Interrupted
from streamrl.bus.jetstream.options import unreachable
from streamrl.bus.jetstream.wire import HEADER_ID, STATUS, PubAck, asked_too_early, decode
from streamrl.bus.topology import check_size, message_bytes
from streamrl.errors import BusError, BusUnavailable, Forbidden

logger = logging.getLogger(__name__)

WINDOW_MESSAGES = 1024
WINDOW_BYTES = 32 << 20
"""Bytes under way at most: below the 64 MiB that a server buffers for a client by default."""
RESEND_S = 10.0
SWEEP_S = 0.5


class _Post:
    """One message on its way."""

    __slots__ = ("attempts", "body", "deadline", "future", "headers", "number", "reply", "sent_s", "size", "subject", "unheard_s")

    def __init__(self, number: int, subject: str, body: bytes, headers: dict[str, str], size: int, deadline: float) -> None:
        self.number = number
        self.subject = subject
        self.body = body
        self.headers = headers
        self.size = size
        self.deadline = deadline
        self.future: asyncio.Future[PubAck] = asyncio.get_running_loop().create_future()
        self.reply = ""
        self.attempts = 0
        self.sent_s = 0.0
        self.unheard_s = 0.0


class Outbox:
    """The only way out for messages that are to be stored. Bounded: callers beyond the window wait for acknowledgements.

    Args:
        connection: an open connection.
        patience_s: how long a message is tried while the server is away or silent.
    """

    def __init__(self, connection: Connection, patience_s: float) -> None:
        self._connection = connection
        self._patience_s = patience_s
        self._prefix = secrets.token_hex(6)
        self._made = 0
        self._numbers = itertools.count()
        self._queue: deque[_Post] = deque()
        self.sent: dict[str, _Post] = {}
        """Messages that are not acknowledged yet, in the order of sending, by where the answer goes."""
        self._sent_bytes = 0
        self._closed = False
        self._wake = asyncio.Event()
        self._stop_listening = connection.listen(self._on_connection)
        connection.denial_listeners.append(self._on_denied)
        self._tasks = [asyncio.create_task(self._sender()), asyncio.create_task(self._sweeper())]

    async def publish(self, subject: str, body: bytes, *, id: str, headers: Mapping[str, str] | None = None) -> tuple[PubAck, int]:
        """Store a message; returns the server's answer, which may hold a refusal, and the number of attempts.

        `id` is what the server recognises a message by when it is sent again because its acknowledgement was lost.

        Raises:
            BusError: the message is larger than the server takes, or no stream listens to the subject.
            Forbidden: the credentials lack the right.
            BusUnavailable: the server was away or silent for longer than the patience.
        """
        if self._closed:
            raise BusUnavailable(f"the bus was closed before a message to {subject} was sent", subject=subject)
        own = dict(headers) if headers else {}
        own[HEADER_ID] = id
        size = message_bytes(body, own)
        check_size(subject, size, self._connection.max_payload)
        post = _Post(next(self._numbers), subject, body, own, size, time.monotonic() + self._patience_s)
        post.reply = self._connection.inbox(partial(self._on_answer, post))
        self._queue.append(post)
        self._wake.set()
        try:
            ack = await post.future
        finally:
            self._forget(post)
        return ack, post.attempts

    def new_id(self) -> str:
        """A message id that nobody else uses."""
        self._made += 1
        return f"{self._prefix}.{self._made}"

    async def close(self) -> None:
        """Stop; messages still on their way fail with BusUnavailable."""
        if self._closed:
            return
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._stop_listening()
        self._connection.denial_listeners.remove(self._on_denied)
        for post in [*self.sent.values(), *self._queue]:
            _settle(post, BusUnavailable(f"the bus was closed before {post.subject} was acknowledged"))

    def _forget(self, post: _Post) -> None:
        self._connection.drop(post.reply)
        if self.sent.pop(post.reply, None) is not None:
            self._sent_bytes -= post.size
            self._wake.set()

    def _on_answer(self, post: _Post, message: Msg) -> None:
        if post.future.done():
            return
        if message.headers and message.headers.get(STATUS) == "503":
            self._on_no_stream(post)
            return
        try:
            ack = decode(message.data, PubAck)
        except BusError as error:
            post.future.set_exception(error)
            return
        if asked_too_early(ack.error):
            # The sweeper asks again at its next turn.
            post.sent_s = 0.0
            return
        post.future.set_result(ack)

    def _on_no_stream(self, post: _Post) -> None:
        post.unheard_s = post.unheard_s or time.monotonic()
        if time.monotonic() - post.unheard_s < self._connection.unheard_s:
            # The sweeper sends it again at its next turn.
            post.sent_s = 0.0
            return
        _settle(
            post,
            BusError(
                f"no stream stores {post.subject}",
                hint="were the run's streams made, and is JetStream enabled on the server? A full disk disables it",
                subject=post.subject,
            ),
        )

    def _on_denied(self, subject: str, hint: str) -> None:
        for post in self.sent.values():
            if post.subject.lower() == subject:
                _settle(post, Forbidden(f"the server forbids publish to {post.subject}", hint=hint, subject=post.subject))

    def _on_connection(self, up: bool) -> None:
        if not up:
            self._take_back(list(self.sent.values()))
        self._wake.set()

    def _take_back(self, posts: list[_Post]) -> None:
        """Put sent messages back into the queue, in the order in which all began: some of them may have been sent again, others not."""
        for post in posts:
            if self.sent.pop(post.reply, None) is not None:
                self._sent_bytes -= post.size
        waiting = [post for post in posts if not post.future.done()]
        self._queue = deque(sorted([*waiting, *self._queue], key=lambda post: post.number))

    def _room(self) -> bool:
        size = self._queue[0].size
        return not self.sent or (len(self.sent) < WINDOW_MESSAGES and self._sent_bytes + size <= WINDOW_BYTES)

    async def _sender(self) -> None:
        while True:
            self._wake.clear()
            while self._queue and self._connection.connected and self._room():
                post = self._queue.popleft()
                if post.future.done():
                    continue
                self.sent[post.reply] = post
                self._sent_bytes += post.size
                post.attempts += 1
                post.sent_s = time.monotonic()
                try:
                    await self._connection.send(post.subject, post.body, post.reply, post.headers)
                except Interrupted as error:
                    logger.debug("event=bus_publish_interrupted subject=%s error=%s", post.subject, error)
                    self._take_back([post])
                    break
            await self._wake.wait()

    async def _sweeper(self) -> None:
        """Send again what was not answered, and give up what has waited for too long."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now = time.monotonic()
            for post in [*self.sent.values(), *self._queue]:
                if now > post.deadline:
                    _settle(post, self._given_up(post))
            late = [post for post in self.sent.values() if now - post.sent_s > RESEND_S and not post.future.done()]
            if silent := [post for post in late if post.sent_s]:
                logger.warning(
                    "event=bus_publish_unanswered messages=%d subject=%s hint=is_the_servers_disk_full?", len(silent), silent[0].subject
                )
            self._take_back(late)
            if self._queue:
                self._wake.set()

    def _given_up(self, post: _Post) -> BusUnavailable:
        if not self._connection.connected:
            return unreachable(self._connection.address, self._patience_s, None)
        return BusUnavailable(
            f"the server at {self._connection.address.url} did not acknowledge a message to {post.subject} within {self._patience_s:.1f} s",
            hint="a server whose disk is full keeps silent: see nats-server.log, free space and start the run again",
            subject=post.subject,
        )


def _settle(post: _Post, error: BusError) -> None:
    if not post.future.done():
        post.future.set_exception(error)
