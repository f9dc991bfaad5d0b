"""Reading a stream without a consumer on it: batched direct gets up to its end, and from there what the server repeats once it is stored.

So a reader has nothing to make on the server, and a new message reaches it without being asked for. A repeated message that was missed is
seen by its sequence and fetched; one with nothing behind it is found by looking at the stream every few seconds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque

import msgspec
from nats.aio.msg import Msg

from streamrl.bus.jetstream.connection import RETRY_S, Connection, Interrupted, NoResponder, Sink
from streamrl.bus.jetstream.wire import DESCRIPTION, PENDING, Stored, StoredMessageReply, decode, error_of, status_of, stored
from streamrl.bus.topology import stored_subject
from streamrl.errors import BusError

logger = logging.getLogger(__name__)

BATCH = 256
BATCH_BYTES = 16 << 20
"""Bytes of one request, and of what may wait to be read at the stream's end; both stay below what a server buffers for a client."""
WAITING = 4096
"""Messages that may wait there."""
LOOK_S = 5.0
"""How often the stream itself is looked at, should nothing have been heard of it."""


class Session:
    """A reader on one connection. It ends with Interrupted; the caller opens another one from where it stood.

    Args:
        connection: where to read.
        stream: the server's name of the stream.
        after: the first message has a greater sequence.
        subject: only messages of this subject, which may have wildcards.
        follow: wait for new messages; without it `next` returns None after the last one.
    """

    def __init__(self, connection: Connection, stream: str, *, after: int, subject: str | None, follow: bool) -> None:
        self._connection = connection
        self._stream = stream
        self._subject = subject
        self._follow = follow
        self.position = after
        """Sequence of what was returned last."""
        self._batch: deque[Stored] = deque()
        self._ahead: asyncio.Task[list[Msg]] | None = None
        """The batch behind `_batch`, already asked for."""
        self.repeated: deque[Stored] = deque()
        """Messages that were heard as they were stored, and are not returned yet."""
        self._repeated_bytes = 0
        self.sink: Sink | None = None
        """Where it hears what is stored; None while it does not listen."""
        self._overrun = False
        """Whether what was stored came faster than it was read: it is not listened to until the end is near again."""
        self._at_end = False
        """Whether the stream's end has been reached, and what is stored from then on is heard."""
        self._arrived = asyncio.Event()
        self._failure: BusError | None = None
        self._looking: asyncio.TimerHandle | None = None
        self._stop_listening = connection.listen(self._on_connection)

    @property
    def at_end(self) -> bool:
        """Whether `next` has returned all that was there; what comes now is new."""
        return self._at_end and not self._batch and not self.repeated

    async def open(self) -> None:
        """Ask for the first messages. Raises BusError, BusUnavailable, Interrupted."""
        await self._connection.ready()
        await self._turn()
        if self._follow:
            self.look()

    async def close(self) -> None:
        """Forget what was asked for."""
        self._stop_listening()
        if self._looking is not None:
            self._looking.cancel()
        if self._ahead is not None:
            self._ahead.cancel()
            await asyncio.gather(self._ahead, return_exceptions=True)
        if self.sink is not None:
            await self._connection.close_sink(self.sink)

    async def next(self, until_s: float | None = None) -> Stored | None:
        """The next message; None after the last one when not following, or at the time `until_s` of the loop's clock.

        Raises:
            Interrupted: the session is over.
            Forbidden: the credentials do not allow to hear what is stored.
        """
        while True:
            if self._batch:
                return self._passed(self._batch.popleft())
            while self.repeated and self.repeated[0].sequence <= self.position:
                self._drop_repeated()
            if self.repeated and self._is_next(self.repeated[0]):
                return self._passed(self._drop_repeated())
            if self._failure is not None:
                raise self._failure
            if self.repeated or not self._at_end:
                try:
                    await (self._fill_gap() if self.repeated else self._turn())
                except NoResponder as error:
                    raise Interrupted(error.message) from error
            elif not self._follow or not await self._arrival(until_s):
                return None

    def _passed(self, message: Stored) -> Stored:
        self.position = message.sequence
        return message

    def _is_next(self, message: Stored) -> bool:
        return message.sequence == self.position + 1 or (self._subject is not None and message.previous <= self.position)

    def _drop_repeated(self) -> Stored:
        message = self.repeated.popleft()
        self._repeated_bytes -= len(message.data)
        return message

    async def _turn(self) -> None:
        """Take the next batch. Whoever follows listens before the end is looked for, so that nothing falls between."""
        if self._follow and self.sink is None and not self._overrun:
            self.sink = await self._connection.open_sink(self._on_repeated, stored_subject(self._stream, self._subject or ">"), self._fail)
        ahead = self._ahead or asyncio.ensure_future(self._ask(self.position + 1))
        self._ahead = ahead
        answers = await ahead
        self._ahead = None
        headers = answers[-1].headers or {}
        status = status_of(headers)
        if status not in ("204", "404"):
            raise BusError(f"read {self._stream}: expected messages, got {status} {headers.get(DESCRIPTION, '')}", hint=_HINT)
        found = [message for answer in answers[:-1] if (message := stored(self._stream, answer.data, answer.headers)) is not None]
        # What was asked for ahead may have been heard, and read, in the meantime.
        self._batch.extend(message for message in found if message.sequence > self.position)
        if found and int(headers.get(PENDING, "0")):
            self._ahead = asyncio.ensure_future(self._ask(max(found[-1].sequence, self.position) + 1))
        else:
            self._at_end = not self._follow or self.sink is not None
            self._overrun = False

    async def _ask(self, first: int) -> list[Msg]:
        request: dict[str, object] = {"seq": first, "batch": BATCH, "max_bytes": BATCH_BYTES}
        if self._subject is not None:
            request["next_by_subj"] = self._subject
        return await self._connection.collect(f"{self._connection.api}.DIRECT.GET.{self._stream}", msgspec.json.encode(request))

    async def _fill_gap(self) -> None:
        """Fetch what lies before a repeated message; where the stream has nothing there, it was removed, and that message is the next."""
        await self._turn()
        if self._batch or not self.repeated:
            return
        # A replica that lags may have answered; the stream's leader knows.
        request = {"seq": self.position + 1, "next_by_subj": self._subject or ">"}
        answer = await self._connection.ask(f"{self._connection.api}.STREAM.MSG.GET.{self._stream}", msgspec.json.encode(request))
        reply = decode(answer.data, StoredMessageReply)
        if reply.error is not None and reply.error.code != 404:
            raise error_of(reply.error, doing=f"read {self._stream}")
        if reply.message is None or reply.message.seq >= self.repeated[0].sequence:
            self._batch.append(self._drop_repeated())
        else:
            await asyncio.sleep(RETRY_S)

    async def _arrival(self, until_s: float | None) -> bool:
        """Wait until there may be something new; False at `until_s`."""
        self._arrived.clear()
        loop = asyncio.get_running_loop()
        timer = loop.call_at(until_s, self._arrived.set) if until_s is not None else None
        await self._arrived.wait()
        if timer is not None:
            timer.cancel()
        return until_s is None or loop.time() < until_s

    def _on_repeated(self, answer: Msg) -> None:
        message = stored(self._stream, answer.data, answer.headers)
        if message is None or self.sink is None:
            return
        self.repeated.append(message)
        self._repeated_bytes += len(message.data)
        if self._repeated_bytes > BATCH_BYTES or len(self.repeated) > WAITING:
            sink, self.sink, self._overrun, self._at_end = self.sink, None, True, False
            self._connection.adopt(asyncio.ensure_future(self._connection.close_sink(sink)))
        self._arrived.set()

    def _fail(self, error: BusError) -> None:
        self._failure = self._failure or error
        self._arrived.set()

    def _on_connection(self, up: bool) -> None:
        self._fail(Interrupted(f"reading {self._stream} was interrupted: the connection broke"))

    def look(self) -> None:
        """See whether the stream has more, should nothing have been heard of it; at once, and every `LOOK_S` seconds from then on."""
        self._at_end = False
        self._arrived.set()
        self._looking = asyncio.get_running_loop().call_later(LOOK_S, self.look)


_HINT = "is this a NATS server of version 2.11 or later, and does the stream allow direct gets? `streamrl up` sees to that"


async def opened(connection: Connection, stream: str, *, after: int, subject: str | None = None, follow: bool = True) -> Session:
    """Open a session, again and again while the connection breaks or the server starts.

    Raises:
        BusUnavailable: the server stayed away for longer than the patience.
        BusError: the server refused, or has no such stream.
    """
    unheard_since: float | None = None
    while True:
        session = Session(connection, stream, after=after, subject=subject, follow=follow)
        try:
            await session.open()
            return session
        except Interrupted as error:
            await session.close()
            logger.debug("event=bus_read_interrupted stream=%s error=%s", stream, error)
        except NoResponder:
            await session.close()
            unheard_since = unheard_since or time.monotonic()
            if time.monotonic() - unheard_since > connection.unheard_s:
                raise
        except BaseException:
            await session.close()
            raise
        await asyncio.sleep(RETRY_S)
