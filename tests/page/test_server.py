from __future__ import annotations

import asyncio
import socket

import aiohttp
import pytest
from aiohttp import web

from streamrl.errors import LaunchError
from streamrl.page.access import page_token, place_of
from streamrl.page.server import served
from streamrl.runtime.rundir import RunDir
from tests.page.conftest import batches, page, write

SECRET = ("/", "/api/run", "/api/live", "/api/series?names=rollout/raw_reward", "/api/drops", "/static/page.js", "/nothing")


async def test_only_who_brings_the_token_to_loopback_by_get_is_let_in(run: RunDir) -> None:
    write(run, batches(1, 3))
    async with page(run) as (base, token, client), aiohttp.ClientSession() as stranger:
        for path in SECRET:
            async with stranger.get(base + path) as answer:
                assert (answer.status, "streamrl" in await answer.text()) == (403, True)
            async with client.get(base + path, headers={"Host": "rebound.example:80"}) as answer:
                assert answer.status == 403
            for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
                async with client.request(method, base + path) as answer:
                    assert answer.status == 405
        for wrong in ("", "x", token[:-1], token + "x", "é"):
            async with client.get(f"{base}/", params={"token": wrong}, allow_redirects=False) as answer:
                assert answer.status == 403, "a wrong token counts, whatever the cookie"
            async with stranger.get(base, cookies={"streamrl": wrong}) as answer:
                assert answer.status == 403
        async with stranger.get(f"{base}//elsewhere.example/?token={token}", allow_redirects=False) as answer:
            assert (answer.status, answer.headers["Location"]) == (303, f"/{place_of(token)}/")
            cookie = answer.headers["Set-Cookie"]
            assert "HttpOnly" in cookie and "SameSite" in cookie
        for path in ("/nothing", "/static/../server.py", "/static/%2e%2e/server.py", "/static/vendor/"):
            async with client.get(base + path) as answer:
                assert answer.status == 404


async def test_the_cookie_stays_within_the_pages_own_folder_whatever_the_port(run: RunDir) -> None:
    """Browsers bring cookies to every port of a host: nobody else on this machine may get one that opens the page."""
    heard: list[dict[str, str]] = []

    async def hear(request: web.Request) -> web.Response:
        heard.append(dict(request.cookies))
        return web.Response()

    other = web.Application()
    other.router.add_get("/{path:.*}", hear)
    write(run, batches(1, 3))
    async with page(run) as (base, token, client), served(other, 0) as port:
        async with client.get(f"{base}/../?token={token}") as answer:
            assert (answer.status, str(answer.url)) == (200, f"{base}/"), "the address that is printed leads there"
        async with client.get(f"{base}/api/run") as answer:
            assert answer.status == 200
        for path in ("", "api/run", "static/page.js"):
            async with client.get(f"http://127.0.0.1:{port}/{path}") as answer:
                assert answer.status == 200
    assert heard == [{}] * 3


async def test_every_answer_tells_the_browser_to_ask_nobody_else(run: RunDir) -> None:
    async with page(run) as (base, token, client):
        for path in ("/", "/api/run", "/nothing", f"/?token={token}x"):
            async with client.get(base + path) as answer:
                assert answer.headers["Content-Security-Policy"].startswith("default-src 'self';")
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
                assert answer.headers["Cache-Control"] == "no-store"


async def test_series_are_what_the_rows_say(run: RunDir) -> None:
    write(run, batches(1, 3))
    async with page(run) as (base, _, client):
        async with client.get(f"{base}/api/series?table=batch&x=version&names=rollout/raw_reward,train/loss") as answer:
            found = await answer.json()
        assert (found["x"], found["rows"]) == ([1, 2, 3], 3)
        assert found["values"] == {"rollout/raw_reward": [0.5] * 3, "train/loss": [None] * 3}
        async with client.get(f"{base}/api/run") as answer:
            told = await answer.json()
        assert (told["run"], told["tables"]["batch"]) == ("demo", ["rollout/raw_reward", "staleness/max"])
        for query, status in (
            ("names=nobody", 400),
            ("x=../..&names=", 400),
            ("table=../..&names=", 200),
            ("points=-1&last=x&names=", 200),
        ):
            async with client.get(f"{base}/api/series?{query}") as answer:
                assert answer.status == status


async def test_a_page_that_nobody_looks_at_rests_until_somebody_does(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.page.server._REST_S", 3600.0)
    write(run, batches(1, 3))

    async def rows() -> int:
        async with client.get(f"{base}/api/series?names=rollout/raw_reward") as answer:
            return (await answer.json())["rows"]

    async with page(run, works=True) as (base, _, client):
        monkeypatch.setattr("streamrl.page.attention.LOOKED_AT_S", 0.0)  # nobody is there from now on but at the moment of asking
        await asyncio.sleep(3.0)  # it has looked for the last time
        write(run, batches(4, 6))
        async with asyncio.timeout(60):
            while await rows() != 6:
                await asyncio.sleep(0.05)


async def test_live_events_come_at_once_and_pages_beyond_the_most_are_told_so(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.page.server._LISTENERS", 1)
    async with page(run) as (base, _, client), client.get(f"{base}/api/live") as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        async with asyncio.timeout(20):
            assert (await answer.content.readline()).startswith(b'data: {"run":"demo"')
        async with client.get(f"{base}/api/live") as second:
            assert second.status == 503


async def test_a_log_that_is_not_there_is_said_and_the_rest_goes_on(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.page.log._ANSWER_S", 0.05)
    write(run, batches(1, 3))
    async with page(run) as (base, _, client):
        for path in ("/api/drops", "/api/letters", "/api/batches/1", "/api/batches/1/tasks/2"):
            async with client.get(base + path) as answer:
                assert answer.status == 503
                assert "cannot be read now" in await answer.text()
        async with client.get(f"{base}/api/versions") as answer:
            assert (await answer.json())["engines"] == []


async def test_a_port_that_is_taken_is_a_sentence(run: RunDir) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        from aiohttp import web

        with pytest.raises(LaunchError, match="to be free"):
            async with served(web.Application(), taken.getsockname()[1]):
                pass


def test_a_token_stays_until_its_file_is_deleted_and_an_empty_one_lets_nobody_in(run: RunDir) -> None:
    token = page_token(run)
    path = run.credentials / "page-token"
    assert (page_token(run), path.stat().st_mode & 0o777) == (token, 0o600)
    path.unlink()
    assert page_token(run) != token
    path.write_text("\n")
    with pytest.raises(LaunchError, match="empty file"):
        page_token(run)
