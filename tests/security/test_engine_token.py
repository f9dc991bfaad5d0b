"""Who does not know the run's token gets nothing from an engine but its health."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from streamrl.engines.channel import ChannelEngine
from streamrl.engines.http import HttpEngine
from streamrl.engines.protocol import GenerateRequest
from streamrl.engines.server import EngineServer, serve
from streamrl.engines.table.engine import TableEngine
from streamrl.errors import EngineError
from streamrl.schemas.tasks import Sampling
from tests.support.errors import raises
from tests.support.policies import make_model, script, start_engine

TOKEN = "t0ken-of-the-run"
ROUTES = [
    ("POST", "/generate"),
    ("POST", "/abort_request"),
    ("GET", "/channel"),
    ("GET", "/health_generate"),
    ("GET", "/server_info"),
    ("GET", "/get_server_info"),
    ("GET", "/model_info"),
    ("GET", "/get_model_info"),
    ("GET", "/no/such/route"),
]


@asynccontextmanager
async def engine(tmp_path: Path) -> AsyncIterator[TableEngine]:
    directory = tmp_path / "model"
    running = await start_engine(directory, script(make_model(directory), {}), engine_id="e")
    try:
        yield running
    finally:
        await running.stop()


@asynccontextmanager
async def serving(tmp_path: Path) -> AsyncIterator[EngineServer]:
    async with engine(tmp_path) as running:
        server = await serve(running, token=TOKEN)
        try:
            yield server
        finally:
            await server.stop()


@pytest.mark.parametrize("given", [None, "", "Bearer ", "Bearer wrong", TOKEN, f"bearer {TOKEN}", f"Bearer {TOKEN} ", "Bearer t\xe9"])
async def test_every_route_but_health_asks_for_the_token(tmp_path: Path, given: str | None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    headers = {} if given is None else {"Authorization": given}
    async with serving(tmp_path) as server, aiohttp.ClientSession(server.address) as session:
        served = {str(route.resource.canonical) for route in _routes(server) if route.resource is not None}
        assert served == {path for _, path in ROUTES[:-1]} | {"/health"}
        for method, path in ROUTES:
            async with session.request(method, path, data=b"{}", headers=headers) as answer:
                # A header's trailing space is not part of its value.
                right = given == f"Bearer {TOKEN} "
                assert (answer.status == 401) is not right, path
                assert TOKEN not in await answer.text()
        async with session.get("/health", headers=headers) as answer:
            assert answer.status == 200
    assert TOKEN not in caplog.text


@pytest.mark.parametrize("client", [HttpEngine, ChannelEngine])
async def test_a_client_with_the_token_is_served_and_one_without_is_told_why(tmp_path: Path, client: type[HttpEngine]) -> None:
    request = GenerateRequest(request_id="r", prompt_ids=(1, 2), sampling=Sampling(max_new_tokens=3), seeds=(7,))
    async with serving(tmp_path) as server:
        good, bad = client(server.address, token=TOKEN), client(server.address)
        try:
            assert sum(len(chunk.token_ids) for chunk in [chunk async for chunk in good.generate(request)]) >= 1
            assert (await good.info()).engine == "e"
            with pytest.raises(EngineError, match="expected the run's token") as caught:
                await anext(aiter(bad.generate(request)))
            assert "credentials/engine-token" in caught.value.hint
            with pytest.raises(EngineError, match="expected the run's token"):
                await bad.info()
        finally:
            await good.close()
            await bad.close()


async def test_an_engine_without_a_token_listens_on_loopback_only(tmp_path: Path) -> None:
    async with engine(tmp_path) as running:
        with raises(EngineError, host="0.0.0.0"):
            await serve(running, "0.0.0.0")
        server = await serve(running, "0.0.0.0", token=TOKEN)
        await server.stop()


def _routes(server: EngineServer) -> list[web.AbstractRoute]:
    assert server.runner is not None
    return list(server.runner.app.router.routes())
