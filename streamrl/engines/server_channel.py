"""The server's end of `streamrl.engines.channel`."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing

import aiohttp
import msgspec
from aiohttp import web

from streamrl.engines.channel import (
    MAX_FRAME_BYTES,
    PROTOCOL,
    UPGRADE_REQUIRED,
    Abort,
    Answer,
    Ask,
    Call,
    Leave,
    Outgoing,
    decode_calls,
    decode_request,
)
from streamrl.engines.protocol import Chunk, Engine
from streamrl.engines.wire import ErrorDetail
from streamrl.errors import EngineUnavailable, StreamRLError

logger = logging.getLogger(__name__)


class Channels:
    """The open channels of one server."""

    def __init__(self, engine: Engine, *, shutdown_s: float, silence_s: float) -> None:
        self._engine = engine
        self._shutdown_s = shutdown_s
        self._silence_s = silence_s
        self._open: set[Channel] = set()

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """One channel, from its opening to its end; a client that does not offer our protocol is turned away."""
        offered = request.headers.get("Sec-WebSocket-Protocol", "")
        if PROTOCOL not in (name.strip() for name in offered.split(",")):
            said = f"expected a client that speaks {PROTOCOL}, got {offered[:80] or 'none'}: run producers and engines of one version"
            logger.warning("event=channel_refused peer=%s error=%s", request.remote, said)
            return web.Response(status=UPGRADE_REQUIRED, text=said, headers={"Sec-WebSocket-Protocol": PROTOCOL})
        heartbeat_s = self._silence_s * 2 / 3  # a ping, and half of that for its pong: a client that is gone without a word is let go
        socket = web.WebSocketResponse(
            protocols=(PROTOCOL,), timeout=self._shutdown_s, heartbeat=heartbeat_s, max_msg_size=MAX_FRAME_BYTES, compress=False
        )
        await socket.prepare(request)
        channel = Channel(self._engine, socket)
        self._open.add(channel)
        try:
            await channel.run()
        finally:
            self._open.discard(channel)
        return socket

    async def close(self, app: web.Application) -> None:
        """Let open requests end for a while, then end all channels."""
        await asyncio.gather(*(channel.close(self._shutdown_s) for channel in list(self._open)))


class Channel:
    """One client's requests."""

    def __init__(self, engine: Engine, socket: web.WebSocketResponse) -> None:
        self._engine = engine
        self._socket = socket
        self._outgoing = Outgoing(socket.send_bytes)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._aborts: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until the client has gone, which aborts what it asked for."""
        try:
            async for message in self._socket:
                if message.type is aiohttp.WSMsgType.BINARY:
                    for call in decode_calls(message.data):
                        self._take(call)
        except (msgspec.DecodeError, RecursionError, StreamRLError) as error:
            logger.warning("event=channel_refused error=%s", error)
        finally:
            tasks = [*self._tasks.values(), *self._aborts]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._outgoing.close()

    async def close(self, bound_s: float) -> None:
        """End it once nothing is open, after `bound_s` at the latest."""
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=bound_s)
        await self._outgoing.close()
        await self._socket.close()

    def _take(self, call: Call) -> None:
        if isinstance(call, Ask):
            task = self._tasks[call.number] = asyncio.create_task(self._answer(call))
            task.add_done_callback(lambda _: self._tasks.pop(call.number, None))
        elif isinstance(call, Leave):
            if (task := self._tasks.get(call.number)) is not None:
                task.cancel()
        else:
            self._aborts.add(task := asyncio.create_task(self._abort(call)))
            task.add_done_callback(self._aborts.discard)

    async def _abort(self, call: Abort) -> None:
        await self._engine.abort(call.request_id)

    async def _answer(self, ask: Ask) -> None:
        kept: list[Chunk] = []
        try:
            request = decode_request(ask.request)
            async with aclosing(self._engine.generate(request)) as chunks:  # type: ignore[type-var]  # every adapter is an async generator
                async for chunk in chunks:
                    if request.stream:
                        self._outgoing.put(Answer(ask.number, (chunk,)))
                    else:
                        kept.append(chunk)
            answer = Answer(ask.number, tuple(kept), last=True)
        except StreamRLError as error:
            unavailable = isinstance(error, EngineUnavailable)
            answer = Answer(ask.number, last=True, error=ErrorDetail(error.message, error.hint), unavailable=unavailable)
        except (msgspec.DecodeError, RecursionError) as error:
            answer = Answer(ask.number, last=True, error=ErrorDetail(f"expected a request, got one that cannot be read: {error}"))
        except Exception as error:  # told to the client, which would else wait for ever
            logger.exception("event=request_failed")
            answer = Answer(ask.number, last=True, error=ErrorDetail(f"expected an answer of the engine, got {error!r}", "see its log"))
        self._outgoing.put(answer)
