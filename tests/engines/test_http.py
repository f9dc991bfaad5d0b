"""The client against servers that fail, fall silent, or are SGLang."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import ANY

import pytest
from aiohttp import web

from streamrl.engines.channel import ChannelEngine
from streamrl.engines.http import HttpEngine
from streamrl.engines.protocol import GenerateRequest
from streamrl.engines.wire import MetaInfo, SpanOut, spans_in
from streamrl.errors import EngineError, EngineUnavailable, SchemaError
from streamrl.schemas.samples import LogprobMode, VersionSpan
from streamrl.schemas.versions import Version
from tests.support.errors import raises
from tests.support.models import ask

REQUEST = GenerateRequest(request_id="r", prompt_ids=(1, 2), seeds=(5, 6))


@asynccontextmanager
async def answering(handler: Callable[[web.Request], Awaitable[web.StreamResponse]], **options: Any) -> AsyncGenerator[HttpEngine]:
    """A client of a server whose POST /generate is `handler`, and which is healthy."""
    app = web.Application()
    app.router.add_post("/generate", handler)
    app.router.add_get("/health", _ok)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    engine = HttpEngine(f"http://127.0.0.1:{runner.addresses[0][1]}", **options)
    try:
        yield engine
    finally:
        await engine.close()
        await runner.cleanup()


async def _ok(request: web.Request) -> web.Response:
    return web.Response()


def sglang_result(ids: list[int], reason: Any, **meta: Any) -> dict[str, Any]:
    """As SGLang 0.5.23 answers."""
    rows = [[-0.5 * (k + 1), token, None] for k, token in enumerate(ids)]
    base = {"id": "x", "finish_reason": reason, "prompt_tokens": 2, "completion_tokens": len(ids), "cached_tokens": 0, "e2e_latency": 0.1}
    return {"text": "", "output_ids": ids, "meta_info": base | {"output_token_logprobs": rows, "weight_version": "0.7"} | meta}


@pytest.mark.parametrize("kind", [HttpEngine, ChannelEngine])
async def test_nobody_listening_is_an_engine_error(kind: type[HttpEngine]):
    engine = kind("http://127.0.0.1:9")
    for call in (ask(engine, REQUEST), engine.info(), engine.abort("r")):
        with raises(EngineUnavailable, address=engine.address, reason=ANY):
            await call
    await engine.close()


async def test_a_server_that_falls_silent_fails_its_open_requests():
    entered = asyncio.Event()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        entered.set()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    engine = HttpEngine(f"http://127.0.0.1:{port}", silence_s=0.3, check_every_s=0.05)
    with raises(EngineError, address=engine.address, reason="no answer for 0.3 s"):
        await ask(engine, REQUEST)
    assert entered.is_set()
    await engine.close()
    server.close()


async def test_a_slow_answer_from_a_healthy_server_is_waited_for():
    async def slow(request: web.Request) -> web.Response:
        await asyncio.sleep(1.3)
        return web.json_response([sglang_result([4], {"type": "length", "length": 1})] * 2)

    async with answering(slow, silence_s=1.0, check_every_s=0.05) as engine:
        assert [answer.ids for answer in await ask(engine, REQUEST)] == [[4], [4]]


async def test_a_connection_that_breaks_is_an_engine_error():
    async def broken(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async with answering(broken) as engine:
        with raises(EngineError, address=engine.address, reason=ANY):
            await ask(engine, REQUEST)


async def test_closing_the_client_ends_open_requests():
    entered = asyncio.Event()

    async def hang(request: web.Request) -> web.StreamResponse:
        entered.set()
        await asyncio.Event().wait()
        return web.Response()

    async with answering(hang) as engine:
        task = asyncio.ensure_future(ask(engine, REQUEST))
        await entered.wait()
        await engine.close()
        with raises(EngineError, address=engine.address, reason="the client was closed"):
            await task


async def test_an_answer_of_another_form_is_an_engine_error():
    bodies = [b"<html>", b"[]x", b'[{"output_ids": []}]', b'[{"output_ids": [1], "meta_info": {"completion_tokens": 1}}]']
    given = iter(bodies)

    async def odd(request: web.Request) -> web.Response:
        return web.Response(body=next(given))

    async with answering(odd) as engine:
        for _ in bodies:
            with raises(EngineError, address=engine.address) as caught:
                await ask(engine, REQUEST)
            assert not isinstance(caught.value, EngineUnavailable)


@pytest.mark.parametrize("rows", [[[-0.5, 5, None]], [[-1e30, 4, None]], [[0.5, 4, None]], [[None, 4, None]], []])
async def test_log_probs_that_are_not_the_tokens_own_are_an_engine_error(rows: list[Any]):
    async def other(request: web.Request) -> web.Response:
        return web.json_response([sglang_result([4], {"type": "length"}, output_token_logprobs=rows)] * 2)

    async with answering(other) as engine:
        with raises(EngineError, address=engine.address, got=ANY):
            await ask(engine, REQUEST)


async def test_sglangs_answers_are_understood():
    seen: list[dict[str, Any]] = []

    async def generate(request: web.Request) -> web.Response:
        seen.append(await request.json())
        versions = [{"version": "0.6", "start": 0, "end": 1}, {"version": "0.7", "start": 1, "end": 3}]
        return web.json_response(
            [
                sglang_result([4, 5, 6], {"type": "stop", "matched": 6}, weight_versions=versions),
                sglang_result([4, 5], {"type": "length", "length": 2}, streamrl_versions=["0.5", "0.7"], weight_versions=versions),
            ]
        )

    async with answering(generate) as engine:
        chunks = [chunk async for chunk in engine.generate(REQUEST)]
    assert chunks[0].spans == (VersionSpan(1, Version(0, 6)), VersionSpan(2, Version(0, 7)))
    assert chunks[1].spans == (VersionSpan(1, Version(0, 5)), VersionSpan(1, Version(0, 7))), "the plugin's versions are the exact ones"
    assert [chunk.logprob_mode for chunk in chunks] == [LogprobMode.TEMPERATURE] * 2
    assert chunks[0].logprobs == (-0.5, -1.0, -1.5)
    assert [chunk.finish_reason for chunk in chunks] == ["stop", "length"]
    (body,) = seen
    assert body["input_ids"] == [[1, 2], [1, 2]]
    assert body["rid"] == ["r.0", "r.1"]
    assert [params["sampling_seed"] for params in body["sampling_params"]] == [5, 6]
    assert set(body) == {"input_ids", "rid", "sampling_params", "return_logprob", "policy"}


async def test_a_cumulative_stream_is_understood():
    async def generate(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for length in (1, 2, 4):
            reason = {"type": "length", "length": 4} if length == 4 else None
            event = sglang_result([3, 4, 5, 6][:length], reason) | {"index": 0}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async with answering(generate) as engine:
        chunks = [chunk async for chunk in engine.generate(GenerateRequest(request_id="r", prompt_ids=(1,), stream=True))]
    assert [chunk.token_ids for chunk in chunks] == [(3,), (4,), (5, 6)]
    assert [chunk.logprobs for chunk in chunks] == [(-0.5,), (-1.0,), (-1.5, -2.0)]
    assert [chunk.spans for chunk in chunks] == [(VersionSpan(k, Version(0, 7)),) for k in (1, 1, 2)]


async def test_a_stream_that_ends_early_is_an_engine_error():
    async def generate(request: web.Request) -> web.StreamResponse:
        return web.Response(body=b"data: [DONE]\n\n", content_type="text/event-stream")

    async with answering(generate) as engine:
        with raises(EngineError, address=engine.address, completions=1):
            await ask(engine, GenerateRequest(request_id="r", prompt_ids=(1,), stream=True))


def test_spans_must_cover_the_tokens():
    with raises(SchemaError, start=0, end=3):
        spans_in(MetaInfo(weight_versions=[SpanOut("0.1", 0, 2)]), 0, 3)
    with raises(SchemaError, version="default"):
        spans_in(MetaInfo(weight_version="default"), 0, 3)
