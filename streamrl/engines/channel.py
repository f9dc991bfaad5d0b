"""All requests of one producer to one of our engine servers over one WebSocket: what `http` does for any server, for less.

```text
client -> server   [Ask(number, request) | Leave(number) | Abort(request id), ...]
server -> client   [Answer(number, chunks, last | error), ...]
```

A frame is a MessagePack list of whatever has come up since the last one was written, so that many small requests share one write, one
read and one wake-up. A group is one `Ask`: its prompt goes over once, with a seed for each completion.

Both ends name the protocol they speak when the WebSocket is opened (`Sec-WebSocket-Protocol`); ends of two protocols refuse each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import msgspec

from streamrl.engines.extras import restore
from streamrl.engines.http import HttpEngine
from streamrl.engines.protocol import Chunk, GenerateRequest
from streamrl.engines.wire import ErrorDetail
from streamrl.errors import EngineError, EngineUnavailable

PATH = "/channel"
PROTOCOL = "streamrl.channel.3"
"""Another number whenever a frame is read another way than before; 1 had no field names and was never said, 2 would have drawn without
what a request asks for with later fields of `Sampling`."""
UPGRADE_REQUIRED = 426
"""Status for a client that does not offer the protocol; the answer's `Sec-WebSocket-Protocol` says which one it is."""
FRAME_BYTES = 4 << 20
"""A frame that has so much takes no more items."""
MAX_FRAME_BYTES = 256 << 20
CLOSE_S = 1.0
"""How long a client that leaves waits for the server's goodbye."""


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Run a request; its answers carry the number."""

    number: int
    request: msgspec.Raw
    """A `GenerateRequest`: read by itself, so that one that cannot be read fails alone."""


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """Nobody waits for these answers any more: abort what is unfinished."""

    number: int


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """See `Engine.abort`."""

    request_id: str


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """Chunks of one request, or why it failed."""

    number: int
    chunks: tuple[Chunk, ...] = ()
    last: bool = False
    """Nothing more comes."""
    error: ErrorDetail | None = None
    unavailable: bool = False
    """The engine is going away: another one may serve the request."""


Call = Ask | Leave | Abort
encode = msgspec.msgpack.Encoder(enc_hook=list).encode
"""A range of seeds goes as a list."""
decode_calls = msgspec.msgpack.Decoder(list[Call]).decode
decode_request = msgspec.msgpack.Decoder(GenerateRequest).decode
decode_answers = msgspec.msgpack.Decoder(list[Answer]).decode


class Outgoing:
    """Items on their way out through `send`, in order; those that come up while one frame is written share the next."""

    def __init__(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        self._send = send
        self._items: deque[msgspec.Raw] = deque()
        self._wake = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    def put(self, item: Call | Answer) -> None:
        """Send it soon. Whoever holds the connection learns elsewhere that it broke.

        Raises:
            TypeError: there is something in it that MessagePack has no form for.
        """
        self._items.append(msgspec.Raw(encode(item)))
        self._wake.set()

    async def close(self) -> None:
        """Write what is left while the connection is there, and end."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._flush()

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._flush()

    async def _flush(self) -> None:
        while self._items:
            frame, size = [], 0
            while self._items and size < FRAME_BYTES:
                frame.append(self._items.popleft())
                size += len(memoryview(frame[-1]))
            with contextlib.suppress(OSError):  # the reader of the same connection sees its end
                await self._send(encode(frame))


class _Line:
    """One open connection and who waits for answers on it."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self.outgoing = Outgoing(socket.send_bytes)
        self.waiting: dict[int, asyncio.Queue[Answer | None]] = {}
        self.reason = "the connection was closed"
        self.over = False

    async def read(self) -> None:
        """Hand answers on until the connection ends; then everybody who waits gets None."""
        try:
            async for message in self.socket:
                if message.type is aiohttp.WSMsgType.BINARY:
                    for answer in decode_answers(message.data):
                        if (queue := self.waiting.get(answer.number)) is not None:
                            queue.put_nowait(answer)
            if (error := self.socket.exception()) is not None:
                self.reason = repr(error)
        except msgspec.DecodeError as error:
            self.reason = f"it sent what is no answer: {error}"
        finally:
            await self.end()

    async def end(self) -> None:
        """Tell who waits, and close the connection."""
        if not self.over:
            self.over = True
            for queue in self.waiting.values():
                queue.put_nowait(None)
            await self.outgoing.close()
            await self.socket.close()


class ChannelEngine(HttpEngine):
    """`Engine` over one WebSocket to a server of ours, opened with the first request and again after it broke.

    The server is pinged while it is open; all requests fail once it has been silent for `silence_s`. Other arguments are `HttpEngine`'s.
    """

    def __init__(self, address: str, *, silence_s: float = 20.0, token: str = "") -> None:
        super().__init__(address, silence_s=silence_s, token=token)
        self._numbers = itertools.count()
        self._line: _Line | None = None
        self._reader: asyncio.Task[None] | None = None
        self._opening: asyncio.Task[_Line] | None = None

    async def close(self) -> None:
        """See `HttpEngine.close`."""
        self._closed = True
        try:
            if self._line is not None and self._reader is not None and not self._line.over:
                self._line.reason = "the client was closed"
                self._reader.cancel()
                await asyncio.gather(self._reader, return_exceptions=True)
                await self._line.end()  # a reader that had not begun has not done so
        finally:
            await super().close()
            if self._opening is not None:
                await asyncio.gather(self._opening, return_exceptions=True)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """See `Engine.generate`. Closing the iterator makes the server abort."""
        if not request.seeds:
            raise EngineError(f"expected one seed per completion, got none in {request.request_id!r}", hint="give at least one seed")
        line = await self._opened()
        number = next(self._numbers)
        answers = line.waiting[number] = asyncio.Queue[Answer | None]()
        last = False
        try:
            line.outgoing.put(Ask(number, msgspec.Raw(encode(request))))
            while not last:
                answer = await answers.get()
                last = answer is None or answer.last
                if answer is None:
                    raise self._gone(line.reason)
                if answer.error is not None:
                    raise (EngineUnavailable if answer.unavailable else EngineError)(answer.error.message, hint=answer.error.hint)
                for chunk in answer.chunks:
                    yield restore(chunk)
        finally:
            del line.waiting[number]
            if not last:
                line.outgoing.put(Leave(number))

    async def abort(self, request_id: str) -> None:
        """See `Engine.abort`."""
        (await self._opened()).outgoing.put(Abort(request_id))

    async def _opened(self) -> _Line:
        """The open connection. All who need one while there is none wait for the same attempt, and fail with it."""
        if self._line is not None and not self._line.over:
            return self._line
        if self._opening is None or self._opening.done():
            self._opening = asyncio.create_task(self._connect())
        line = await asyncio.shield(self._opening)
        if line.over:
            raise self._gone(line.reason)
        return line

    async def _connect(self) -> _Line:
        socket = await self._dial()
        if self._closed:
            await socket.close()
            raise self._gone("the client was closed")
        self._line = line = _Line(socket)
        self._reader = asyncio.create_task(line.read())
        return line

    async def _dial(self) -> aiohttp.ClientWebSocketResponse:
        # aiohttp pings after this long without a word, and waits half as long for the answer.
        heartbeat_s = self._silence_s * 2 / 3
        try:
            async with asyncio.timeout(self._silence_s):
                socket = await self._connected().ws_connect(
                    self.address + PATH,
                    protocols=(PROTOCOL,),
                    heartbeat=heartbeat_s,
                    max_msg_size=MAX_FRAME_BYTES,
                    timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_S),  # pyright: ignore[reportCallIssue]  # attrs makes it
                )
        except aiohttp.WSServerHandshakeError as error:
            await self._call("GET", "/server_info")  # says why, where the server turns all requests away
            if error.status == UPGRADE_REQUIRED and error.headers is not None:
                raise self._differs(error.headers.get("Sec-WebSocket-Protocol")) from error
            raise EngineError(
                f"expected {self.address} to open a channel, got status {error.status}",
                hint="is it an engine of ours?",
                status=error.status,
            ) from error
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise self._gone(repr(error)) from error
        if socket.protocol != PROTOCOL:
            await socket.close()
            raise self._differs(socket.protocol)
        return socket

    def _differs(self, protocol: str | None) -> EngineError:
        return EngineError(
            f"expected the engine at {self.address} to speak {PROTOCOL}, got {protocol or 'one from before protocols had names'}",
            hint="run producers and engines with the same version of streamrl",
            protocol=protocol or "",
        )
