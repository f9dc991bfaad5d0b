"""One NATS connection: requests, whose answers share one subscription, and sinks for what comes without being an answer.

A claimed task is delivered under its own subject, not under the subject that it was asked for with, so that deliveries can only
be told apart by subscription: each claim has a sink of its own, and so has each reader for what is stored from now on.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec
import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from streamrl.bus.address import BusAddress
from streamrl.bus.jetstream import options
from streamrl.bus.jetstream.client import DirectClient
from streamrl.bus.jetstream.transport import WideTransport
from streamrl.bus.jetstream.wire import nobody_leads, status_of
from streamrl.errors import BusError, BusUnavailable, Forbidden

logger = logging.getLogger(__name__)

Handler = Callable[[Msg], None]
ATTEMPT_S = 5.0
"""How long one attempt of a request waits for its answer."""
RETRY_S = 0.1
"""Pause before a request that found no responder is tried again."""
NO_RESPONDER_S = 3.0
"""How long a missing responder is taken for a server that is still starting; one of a cluster may wait for a stream's next leader."""
_DENIED = re.compile(r'permissions violation for (publish|subscription) to "([^"]+)"')


class Interrupted(BusError):
    """The connection broke while an answer was awaited; the caller decides whether to ask again."""


class NoResponder(BusError):
    """Nobody listens to the subject: no such stream or consumer, a server that is still starting, a cluster that chooses a leader."""


class Sink:
    """A subscription: `handler` gets every message that comes to `subject`, `failed` the error if the credentials do not allow it."""

    def __init__(self, subject: str, handler: Handler, failed: Callable[[Forbidden], None] | None) -> None:
        self.subject = subject
        self.handler = handler
        self.failed = failed
        self.subscription: Subscription | None = None

    def reply(self, request: int) -> str:
        """Reply subject of one request, where the sink has one of its own; a status comes back under it."""
        return f"{self.subject.removesuffix('*')}{request}"

    async def on_message(self, message: Msg) -> None:
        self.handler(message)


class Connection:
    """A connection that comes back by itself; lives on the event loop that opened it.

    Args:
        address: server and credentials.
        name: shown in the server's monitoring.
        patience_s: how long a request is retried while the server is away.
        unheard_s: how long one is retried, and a message sent again, while nobody listens to its subject.
        gather: see `streamrl.bus.connect`.
    """

    def __init__(
        self, address: BusAddress, *, name: str, patience_s: float, unheard_s: float = NO_RESPONDER_S, gather: bool = False
    ) -> None:
        self.address = address
        self.api = address.api
        """Subjects of JetStream's API begin with it."""
        self.patience_s = patience_s
        self.unheard_s = unheard_s
        self.generation = 0
        """Grows with every connect and reconnect; state held by the server for the old connection may be gone."""
        self.denial_listeners: list[Callable[[str, str], None]] = []
        """Called with the (lower-case) subject and a hint when the server says that a permission is missing."""
        self._name = name
        self._client = DirectClient()
        self._root = f"{address.inbox_prefix}.{secrets.token_hex(10)}"
        self._prefix = f"{self._root}.answer."
        self._sinks: set[Sink] = set()
        self._tokens = itertools.count()
        self._handlers: dict[str, Handler] = {}
        self._awaited = asyncio.Event()
        """Set while there are handlers of answers, and after a loss until it is back."""
        self._gather = gather
        self._waiting: dict[str, tuple[str, asyncio.Future[Any]]] = {}
        self._listeners: list[Callable[[bool], None]] = []
        self._up = asyncio.Event()
        self._away_since = time.monotonic()
        self._last_error: Exception | None = None
        self._refused: asyncio.Future[BusUnavailable] | None = None
        self._closing = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def connected(self) -> bool:
        return self._up.is_set()

    @property
    def away_s(self) -> float:
        """Seconds since the connection broke; 0.0 while it is up."""
        return 0.0 if self.connected else time.monotonic() - self._away_since

    @property
    def client(self) -> DirectClient:
        """The package's client; after a loss for good there is another one."""
        return self._client

    @property
    def max_payload(self) -> int:
        """Largest message, headers included, in bytes."""
        return self._client.max_payload

    async def open(self, patience_s: float | None = None) -> None:
        """Connect; raises BusUnavailable when refused, or when nobody answers in time."""
        await self._dial(self.patience_s if patience_s is None else patience_s)

    async def _dial(self, patience_s: float) -> None:
        """Make a client and connect it.

        The client retries for ever and tells of failures through its error callback only, so the attempt runs beside a future
        that the callback resolves when the failure is one that no retry mends.
        """
        client = DirectClient()
        client._transport = WideTransport(self._awaited, gather=self._gather)  # pyright: ignore[reportPrivateUsage]  # there is no option for it
        refused: asyncio.Future[BusUnavailable] = asyncio.get_running_loop().create_future()
        self._client, self._refused = client, refused
        attempt = asyncio.create_task(
            client.connect(
                **options.options(self.address, self._name),
                error_cb=self._on_error,
                disconnected_cb=partial(self._on_disconnected, client),
                reconnected_cb=partial(self._on_connected, client),
                closed_cb=partial(self._on_closed, client),
            )
        )
        try:
            await asyncio.wait({attempt, refused}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            if attempt.done() and not attempt.cancelled() and attempt.exception() is None:
                try:
                    await client.subscribe(self._prefix + "*", cb=self._on_message, pending_msgs_limit=0, pending_bytes_limit=0)
                    for sink in list(self._sinks):
                        await self._subscribe(sink)
                except (nats.errors.Error, Interrupted) as error:  # it has gone again
                    raise options.unreachable(self.address, patience_s, error) from error
                await self._on_connected(client)
                return
        finally:
            self._refused = None
            if not self.connected:
                attempt.cancel()
                await asyncio.gather(attempt, return_exceptions=True)
                self._client = DirectClient()
                await client.close()
        if refused.done():
            raise refused.result()
        cause = attempt.exception() if attempt.done() and not attempt.cancelled() else None
        raise options.unreachable(self.address, patience_s, self._last_error) from cause

    async def close(self) -> None:
        """Send what is buffered and close; answers still awaited fail."""
        self._closing = True
        self._lost()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._client.is_connected:
            with contextlib.suppress(nats.errors.Error, OSError):
                await self._client.flush(timeout=1)
        # While the server is away the client trips over its own lost transport: it writes what is pending to it, which asyncio of
        # Python 3.12 answers with a TypeError.
        with contextlib.suppress(nats.errors.Error, OSError, TypeError):
            await self._client.close()

    def listen(self, listener: Callable[[bool], None]) -> Callable[[], None]:
        """Call `listener(True)` after each connect and `listener(False)` after each loss; returns a function that stops it."""
        self._listeners.append(listener)
        return partial(self._listeners.remove, listener)

    def inbox(self, handler: Handler) -> str:
        """A new reply subject; `handler` is called with each message that arrives there, until `drop`."""
        token = str(next(self._tokens))
        self._handlers[token] = handler
        self._awaited.set()
        return self._prefix + token

    def drop(self, reply: str) -> None:
        """Forget a reply subject."""
        self._handlers.pop(reply[len(self._prefix) :], None)
        if self.connected and not self._handlers:
            self._awaited.clear()

    async def open_sink(self, handler: Handler, subject: str = "", failed: Callable[[Forbidden], None] | None = None) -> Sink:
        """Subscribe, to a new subject for deliveries unless one is given; it survives reconnects."""
        sink = Sink(subject or f"{self._root}.{next(self._tokens)}.*", handler, failed)
        self._sinks.add(sink)
        await self._subscribe(sink)
        return sink

    async def _subscribe(self, sink: Sink) -> None:
        try:
            sink.subscription = await self._client.subscribe(sink.subject, cb=sink.on_message, pending_msgs_limit=0, pending_bytes_limit=0)
        except nats.errors.Error as error:
            raise Interrupted(f"the client did not take a subscription: {error}") from error

    async def close_sink(self, sink: Sink) -> None:
        """Unsubscribe."""
        self._sinks.discard(sink)
        if sink.subscription is not None:
            with contextlib.suppress(nats.errors.Error):
                await sink.subscription.unsubscribe()

    async def ready(self, patience_s: float | None = None) -> None:
        """Wait until connected; raises BusUnavailable when the server has been away for longer than the patience."""
        if self._up.is_set():
            return
        if self._closing:
            raise BusUnavailable("the bus was closed", url=self.address.url)
        patience = self.patience_s if patience_s is None else patience_s
        try:
            await asyncio.wait_for(self._up.wait(), max(0.0, patience - self.away_s))
        except TimeoutError:
            raise options.unreachable(self.address, self.away_s, self._last_error) from None

    async def up(self) -> None:
        """Wait until connected, without a limit."""
        await self._up.wait()

    async def send(self, subject: str, payload: bytes, reply: str = "", headers: Mapping[str, str] | None = None) -> None:
        """Hand one message to the client; raises Interrupted when it cannot take it now."""
        if not self.connected:
            raise Interrupted(f"not connected while sending to {subject}")
        try:
            await self._client.publish(subject, payload, reply, headers=dict(headers) if headers else None)
        except (nats.errors.Error, OSError) as error:
            raise Interrupted(f"the client did not take a message to {subject}: {error}") from error

    async def ask(self, subject: str, payload: bytes, *, timeout_s: float = ATTEMPT_S) -> Msg:
        """One request, one answer; raises Interrupted when the connection breaks or the answer is late, and NoResponder."""
        [message] = await self._answers(subject, payload, timeout_s, lambda message: True)
        return message

    async def collect(self, subject: str, payload: bytes, *, timeout_s: float = ATTEMPT_S) -> list[Msg]:
        """One request, the stored messages that answer it and the status that ends them; raises as `ask` does, after silence."""
        return await self._answers(subject, payload, timeout_s, lambda message: bool(status_of(message.headers)))

    async def _answers(self, subject: str, payload: bytes, timeout_s: float, ends: Callable[[Msg], bool]) -> list[Msg]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        answers: list[Msg] = []
        heard_s = loop.time()

        def on_message(message: Msg) -> None:
            nonlocal heard_s
            heard_s = loop.time()
            answers.append(message)
            if ends(message) and not future.done():
                future.set_result(None)

        def look() -> None:
            nonlocal timer
            if future.done():
                return
            if loop.time() < heard_s + timeout_s:
                timer = loop.call_at(heard_s + timeout_s, look)
            else:
                future.set_exception(Interrupted(f"no answer from {subject} within {timeout_s} s"))

        reply = self.inbox(on_message)
        self._waiting[reply] = (subject, future)
        timer = loop.call_at(heard_s + timeout_s, look)
        try:
            await self.send(subject, payload, reply)
            await future
        finally:
            timer.cancel()
            self._waiting.pop(reply, None)
            self.drop(reply)
        if status_of(answers[-1].headers) == "503" or nobody_leads(answers[-1].data, answers[-1].headers):
            raise NoResponder(f"nobody answers to {subject}", hint="is JetStream enabled, and is the stream there?")
        return answers

    async def request(self, subject: str, payload: object | bytes = b"", *, timeout_s: float = ATTEMPT_S) -> Msg:
        """A request that may be repeated without harm, retried over reconnects; structs and mappings are sent as JSON.

        Raises:
            BusUnavailable: the server stayed away for longer than the patience.
            NoResponder: nobody has listened to the subject for `unheard_s`.
        """
        body = payload if isinstance(payload, bytes) else msgspec.json.encode(payload)
        deadline = time.monotonic() + self.patience_s
        unheard_since: float | None = None
        while True:
            await self.ready()
            try:
                return await self.ask(subject, body, timeout_s=timeout_s)
            except Interrupted as error:
                if time.monotonic() > deadline:
                    raise options.unreachable(self.address, self.patience_s, error) from error
            except NoResponder:
                unheard_since = unheard_since or time.monotonic()
                if time.monotonic() - unheard_since > self.unheard_s:
                    raise
                await asyncio.sleep(RETRY_S)

    def adopt(self, task: asyncio.Task[None]) -> None:
        """Keep a background task until it ends; it is cancelled when the connection is closed."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _on_message(self, message: Msg) -> None:
        handler = self._handlers.get(message.subject[len(self._prefix) :])
        if handler is not None:
            handler(message)

    async def _on_error(self, error: Exception) -> None:
        level = logging.DEBUG if type(error) is type(self._last_error) and str(error) == str(self._last_error) else logging.WARNING
        self._last_error = error
        denied = _DENIED.search(str(error).lower())
        if denied:
            self._deny(denied[1], denied[2])
            return
        if self._refused is not None and not self._refused.done() and (refusal := options.refusal(error, self.address)):
            self._refused.set_result(refusal)
            return
        if not self._closing:
            logger.log(level, "bus client error url=%s error=%s: %s", self.address.url, type(error).__name__, error)

    def _deny(self, what: str, subject: str) -> None:
        """A missing permission would else show as a timeout: fail the requests that wait for it."""
        who = f"user {self.address.user!r}" if self.address.user else "the user of these credentials"
        hint = f"{who} lacks this right: use the credentials of the role whose work it is, or grant it on a server of your own"
        logger.error("event=bus_permission_denied subject=%s what=%s user=%s", subject, what, self.address.user)
        for asked, future in self._waiting.values():
            # The client hands on what the server says in lower case.
            if asked.lower() == subject and not future.done():
                future.set_exception(Forbidden(f"the server forbids {what} to {asked}", hint=hint, subject=asked))
        for sink in list(self._sinks):
            if sink.subject.lower() == subject and sink.failed is not None:
                sink.failed(Forbidden(f"the server forbids {what} to {sink.subject}", hint=hint, subject=sink.subject))
        for listener in self.denial_listeners:
            listener(subject, hint)

    async def _on_connected(self, client: DirectClient) -> None:
        if client is not self._client:
            return
        self.generation += 1
        self._last_error = None
        if self.generation > 1:
            logger.warning("event=bus_reconnected url=%s away_s=%.2f", self.address.url, self.away_s)
        self._up.set()
        if not self._handlers:
            self._awaited.clear()
        for listener in list(self._listeners):
            listener(True)

    async def _on_disconnected(self, client: DirectClient) -> None:
        if client is self._client and self.connected:
            self._lost()
            if not self._closing:
                logger.warning("event=bus_disconnected url=%s", self.address.url)

    def _lost(self) -> None:
        self._up.clear()
        self._awaited.set()
        self._away_since = time.monotonic()
        for _, future in list(self._waiting.values()):
            if not future.done():
                future.set_exception(Interrupted("the connection broke before the answer came"))
        for listener in list(self._listeners):
            listener(False)

    async def _on_closed(self, client: DirectClient) -> None:
        """The client gives up for good on protocol errors and refused credentials; take a new one."""
        if client is not self._client or self._closing or self._refused is not None:
            return
        if self.connected:
            self._lost()
        self.adopt(asyncio.create_task(self._reopen()))

    async def _reopen(self) -> None:
        while not self._closing:
            try:
                await self._dial(self.patience_s)
                return
            except Exception as error:  # nobody awaits this: what ended it would leave the connection down, and say nothing
                self._last_error = error
                logger.error("event=bus_connection_refused url=%s error=%s: %s", self.address.url, type(error).__name__, error)
                await asyncio.sleep(1.0)
