"""Server-sent events over a real connection, cut wherever the network cuts them."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from streamrl.engines.events import event_data

LONG = b'{"x": "' + b"y" * 3_000_000 + b'"}'


async def received(pieces: list[bytes]) -> list[bytes]:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(0)
        return response

    app = web.Application()
    app.router.add_get("/", answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as session, session.get(server.make_url("/")) as response:
        return [data async for data in event_data(response)]


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_events_arrive_whole_however_they_are_cut(size: int) -> None:
    text = b'data: {"a": 1}\n\n: a comment\ndata: {"b": "data: "}\n\ndata: [DONE]\n\ndata: {"late": 1}\n\n'
    assert await received([text[at : at + size] for at in range(0, len(text), size)]) == [b'{"a": 1}', b'{"b": "data: "}']


async def test_an_event_may_be_long_and_the_last_line_may_be_cut_off() -> None:
    assert await received([b"data: " + LONG + b'\n\ndata: {"cut": ']) == [LONG]
    assert await received([]) == []
