"""Channels that break, fall silent or bring what cannot be read, and requests on them that fail alone. What they share with other
engines is in tests/contracts/test_engine.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import ANY

import aiohttp
import msgspec
import pytest
from aiohttp import WSMsgType, web

from streamrl.engines import channel
from streamrl.engines.channel import (
    FRAME_BYTES,
    PATH,
    PROTOCOL,
    Abort,
    Answer,
    Ask,
    ChannelEngine,
    Leave,
    Outgoing,
    decode_answers,
    decode_calls,
    encode,
)
from streamrl.engines.extras import EXPERTS, INEXACT
from streamrl.engines.protocol import Chunk, EngineInfo, GenerateRequest
from streamrl.engines.server import serve
from streamrl.errors import EngineError, EngineUnavailable
from streamrl.schemas.experts import RoutedExperts
from streamrl.schemas.samples import VersionSpan
from streamrl.schemas.versions import Version
from tests.support.errors import raises
from tests.support.models import ask
from tests.support.processes import until

REQUEST = GenerateRequest(request_id="r", prompt_ids=(1, 2), seeds=(5, 6))


@asynccontextmanager
async def answering(handler: Callable[[web.Request], Awaitable[web.StreamResponse]], **options: Any) -> AsyncIterator[ChannelEngine]:
    """A client of a server whose channel is `handler`."""
    app = web.Application()
    app.router.add_get(PATH, handler)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    client = ChannelEngine(f"http://127.0.0.1:{runner.addresses[0][1]}", **options)
    try:
        yield client
    finally:
        await client.close()
        await runner.cleanup()


async def opened(request: web.Request, **options: Any) -> web.WebSocketResponse:
    socket = web.WebSocketResponse(protocols=(PROTOCOL,), **options)
    await socket.prepare(request)
    return socket


class Scripted:
    """An engine that does what the request's first token says, and counts what was left."""

    def __init__(self) -> None:
        self.left: list[str] = []
        self.aborted: list[str] = []

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        if request.prompt_ids[0] == 1:
            raise ValueError("a defect")
        try:
            for index in range(len(request.seeds)):
                if request.prompt_ids[0] == 2:
                    await asyncio.Event().wait()
                extras = {EXPERTS: RoutedExperts("uint8", (1, 1, 2), b"\x00\x07"), INEXACT: True} if request.prompt_ids[0] == 3 else {}
                told: Any = {"spans": (VersionSpan(2, Version(1, 7)),), "finish_reason": "stop", "engine": "e", "extras": extras}
                yield Chunk(completion=index, token_ids=(4, 5), logprobs=(-0.1, -0.25), **told)
        finally:
            self.left.append(request.request_id)

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def info(self) -> EngineInfo:
        return EngineInfo(engine="e", policy="policy", serving=None, running=0, waiting=0, slots=1, max_len=9)


@asynccontextmanager
async def scripted() -> AsyncIterator[tuple[Scripted, ChannelEngine]]:
    engine = Scripted()
    server = await serve(engine)
    client = ChannelEngine(server.address)
    try:
        yield engine, client
    finally:
        await client.close()
        await server.stop()


async def test_chunks_arrive_as_the_engine_gave_them():
    async with scripted() as (engine, client):
        request = msgspec.structs.replace(REQUEST, prompt_ids=(3,), seeds=range(3))
        assert [chunk async for chunk in client.generate(request)] == [chunk async for chunk in engine.generate(request)]


async def test_a_request_that_fails_leaves_the_others_alone():
    async with scripted() as (_, client):
        waiting = asyncio.ensure_future(ask(client, msgspec.structs.replace(REQUEST, prompt_ids=(2,))))
        with pytest.raises(EngineError, match="a defect") as caught:
            await ask(client, REQUEST)
        assert not isinstance(caught.value, EngineUnavailable)
        with pytest.raises(EngineError, match="cannot be read"):
            await ask(client, msgspec.structs.replace(REQUEST, prompt_ids=(1.5,)))
        with pytest.raises(TypeError):
            await ask(client, msgspec.structs.replace(REQUEST, prompt_ids=(object(),)))
        assert [answer.ids for answer in await ask(client, msgspec.structs.replace(REQUEST, prompt_ids=(9,)))] == [[4, 5]] * 2
        assert not waiting.done()
        await client.close()
        with raises(EngineError, address=client.address, reason="the client was closed"):
            await waiting
        with raises(EngineError, address=client.address, reason="the client was closed"):
            await ask(client, REQUEST)


async def test_who_goes_away_has_the_engine_abort():
    async with scripted() as (engine, client):
        hanging = msgspec.structs.replace(REQUEST, prompt_ids=(2,))
        for name in ("cancelled", "closed"):
            task = asyncio.ensure_future(ask(client, msgspec.structs.replace(hanging, request_id=name)))
            await client.abort(f"{name}.1")
            await until(lambda name=name: engine.aborted[-1:] == [f"{name}.1"])
            await (client.close() if name == "closed" else _cancel(task))
            await until(lambda name=name: engine.left[-1:] == [name])
            await asyncio.gather(task, return_exceptions=True)


async def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()


@pytest.mark.parametrize(
    ("offered", "said"), [(404, {"status": 404}), (("streamrl.channel.99",), {"protocol": ""}), ((), {"protocol": ""})]
)
async def test_a_server_without_channels_or_of_another_protocol_is_said_so(offered: int | tuple[str, ...], said: dict[str, Any]):
    async def older(request: web.Request) -> web.StreamResponse:
        if isinstance(offered, int):
            return web.Response(status=offered)
        socket = web.WebSocketResponse(protocols=offered)
        await socket.prepare(request)
        await socket.receive()
        return socket

    async with answering(older) as client:
        with raises(EngineError, **said):
            await ask(client, REQUEST)


async def test_a_client_of_another_protocol_is_turned_away_and_told_which_one(monkeypatch: pytest.MonkeyPatch):
    async with scripted() as (engine, client):
        async with aiohttp.ClientSession() as session, session.get(client.address + PATH) as answer:
            assert answer.status == channel.UPGRADE_REQUIRED and PROTOCOL in await answer.text(), "a client from before says no protocol"
        monkeypatch.setattr(channel, "PROTOCOL", "streamrl.channel.99")
        with raises(EngineError, protocol=PROTOCOL) as caught:
            await ask(client, REQUEST)
        assert not isinstance(caught.value, EngineUnavailable)
        assert not engine.left, "it was asked for nothing"


async def test_frames_name_their_fields():
    (call,) = msgspec.msgpack.decode(encode([Ask(7, msgspec.Raw(encode(REQUEST)))]))
    assert call == {"type": "ask", "number": 7, "request": msgspec.msgpack.decode(encode(REQUEST))} and call["request"]["request_id"] == "r"
    assert msgspec.msgpack.decode(encode([Leave(7), Abort("r")])) == [{"type": "leave", "number": 7}, {"type": "abort", "request_id": "r"}]
    assert msgspec.msgpack.decode(encode([Answer(7, last=True)])) == [{"number": 7, "last": True}]


async def test_a_server_that_falls_silent_fails_its_open_requests():
    async def mute(request: web.Request) -> web.StreamResponse:
        socket = await opened(request, autoping=False)
        async for _ in socket:
            pass
        return socket

    async with answering(mute, silence_s=0.3) as client:
        with raises(EngineUnavailable, address=client.address, reason=ANY):
            await ask(client, REQUEST)


@pytest.mark.parametrize("closed", [False, True])
async def test_all_who_wait_for_a_connection_fail_with_its_one_attempt(closed: bool):
    opens = 0

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opens
        opens += 1
        await reader.read()
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    client = ChannelEngine(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", silence_s=30.0 if closed else 0.2)
    tasks = [asyncio.ensure_future(ask(client, REQUEST)) for _ in range(5)]
    await until(lambda: opens)
    if closed:
        await client.close()
    for task in tasks:
        with raises(EngineError, address=client.address, reason=ANY):
            await task
    assert closed or opens == 1, "aiohttp asks once more where the connection is broken"
    await client.close()
    server.close()


async def test_a_slow_answer_from_a_healthy_server_is_waited_for():
    async def slow(request: web.Request) -> web.StreamResponse:
        socket = await opened(request)
        async for message in socket:
            (call,) = decode_calls(message.data)
            assert not isinstance(call, Abort)
            asyncio.get_running_loop().call_later(1.0, lambda call=call: asyncio.ensure_future(_end(socket, call.number)))
        return socket

    async def _end(socket: web.WebSocketResponse, number: int) -> None:
        chunks = tuple(
            Chunk(completion=k, token_ids=(4,), logprobs=(-1.0,), spans=(VersionSpan(1, Version()),), finish_reason="length")
            for k in range(2)
        )
        await socket.send_bytes(encode([Answer(number, chunks, last=True)]))

    async with answering(slow, silence_s=0.3) as client:
        assert [answer.ids for answer in await ask(client, REQUEST)] == [[4], [4]]


@pytest.mark.parametrize("end", ["abort", "close", "garbage"])
async def test_a_connection_that_breaks_fails_its_requests_and_the_next_one_opens_another(end: str):
    opens = 0

    async def broken(request: web.Request) -> web.StreamResponse:
        nonlocal opens
        opens += 1
        socket = await opened(request)
        message = await socket.receive()
        assert message.type is WSMsgType.BINARY
        if end == "abort":
            request.transport.abort()  # type: ignore[union-attr]
        elif end == "garbage":
            await socket.send_bytes(b"\xc1")
            await socket.receive()
        return socket

    async with answering(broken) as client:
        for number in (1, 2):
            with raises(EngineUnavailable, address=client.address, reason=ANY):
                await ask(client, REQUEST)
            assert opens == number


async def test_a_stopping_server_lets_open_requests_end():
    engine, release = Scripted(), asyncio.Event()
    generate = engine.generate

    async def held(request: GenerateRequest) -> AsyncIterator[Chunk]:
        await release.wait()
        async for chunk in generate(request):
            yield chunk

    engine.generate = held  # type: ignore[method-assign]
    server = await serve(engine)
    client = ChannelEngine(server.address)
    task = asyncio.ensure_future(ask(client, msgspec.structs.replace(REQUEST, prompt_ids=(9,))))
    await client.abort("taken after the request")
    await until(lambda: engine.aborted)
    stopping = asyncio.ensure_future(server.stop())
    await asyncio.sleep(0.05)
    release.set()
    assert [answer.ids for answer in await task] == [[4, 5]] * 2
    await stopping
    await client.close()


async def test_what_comes_up_while_a_frame_is_written_shares_the_next_up_to_a_size():
    frames: list[bytes] = []

    async def send(frame: bytes) -> None:
        frames.append(frame)
        await asyncio.sleep(0)

    outgoing = Outgoing(send)
    big = (Chunk(completion=0, token_ids=(), logprobs=(), spans=(), engine="x" * FRAME_BYTES),)
    for number, chunks in enumerate(((), (), big, (), ())):
        outgoing.put(Answer(number, chunks))
    await outgoing.close()
    assert [[answer.number for answer in decode_answers(frame)] for frame in frames] == [[0, 1, 2], [3, 4]]
