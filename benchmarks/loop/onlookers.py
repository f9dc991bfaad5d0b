"""What looks at a run that is measured: a client of its page, `streamrl top` on a terminal, and who scrapes the endpoint for Prometheus."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import struct
import termios
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from benchmarks.loop.sampler import Sampler
from benchmarks.processes import child
from streamrl.errors import LaunchError
from streamrl.page.address import address_of
from streamrl.runtime.rundir import RunDir

_LOOK_S = 0.1
_DRAW_S = 5.0
"""The overview draws its charts again at most so often (`paced` of streamrl/page/static/tools.js)."""
_SCRAPE_S = 5.0
_AWAY = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError)
"""The server is not there yet, or has gone with its run."""
_CHARTS: tuple[tuple[Mapping[str, str | int], tuple[str, ...]], ...] = (
    (
        {"table": "batch", "x": "version", "points": 1000, "thin": "extremes"},
        (
            *("rollout/raw_reward", "rollout/response_len/m", "rollouts/dropped_total/", "tokens/trained_total", "perf/step_s"),
            *("perf/wait_s", "staleness/m", "staleness/p95", "staleness/in_flight", "staleness/queued", "staleness/publish_lag"),
            *("train/train_rollout_logprob_abs_diff", "train/entropy_loss", "train/ppo_kl"),
        ),
    ),
    (
        {"table": "window", "x": "time_s", "points": 1000, "thin": "extremes"},
        ("tokens/sampled_total", "lag/stream_s", "lag/publish_to_commit_s", "lag/versions_behind", "lengths/"),
    ),
    ({"table": "window", "x": "time_s", "points": 250, "thin": "mean"}, ("trainer/share/", "producer/share/", "engine/share/")),
)
"""Requests of the overview's charts (streamrl/page/static/overview.js), and how the names begin that they ask for."""


@contextlib.asynccontextmanager
async def looking(looks: Sequence[Coroutine[Any, Any, None]]) -> AsyncGenerator[None]:
    """Those who look do so while open; raises what one of them has failed with."""
    tasks = [asyncio.create_task(look) for look in looks]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    for one in ended:
        if isinstance(one, Exception):
            raise one


class Browser:
    """A client that asks the page of a run what its overview asks, as often, and draws nothing."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self.draws = 0
        """How often all charts were asked for."""

    async def look(self) -> None:
        """Look at the page whenever there is one."""
        while True:
            if address := address_of(self._run):
                with contextlib.suppress(*_AWAY):
                    await self.look_at(address)
            await asyncio.sleep(_LOOK_S)

    async def look_at(self, address: str) -> None:
        """Look until the server ends the stream of events; raises aiohttp.ClientError where it refuses or has gone."""
        news, drawn = asyncio.Event(), None
        cookies = aiohttp.CookieJar(unsafe=True)  # else none from an address that is no name
        whole = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(cookie_jar=cookies, raise_for_status=True, timeout=whole, read_bufsize=1 << 20) as client:
            async with client.get(address) as answer:
                await answer.read()
                base = str(answer.url)  # the page's own folder, which it redirects to
            drawing = asyncio.create_task(self._draw(client, base, news))
            try:
                async with client.get(f"{base}api/live") as events:
                    async for line in events.content:
                        if drawing.done():
                            drawing.result()  # it has failed
                        if line.startswith(b"data: ") and (changes := msgspec.json.decode(line[6:])["changes"]) != drawn:
                            drawn = changes
                            news.set()
            finally:
                drawing.cancel()
                await asyncio.gather(drawing, return_exceptions=True)

    async def _draw(self, client: aiohttp.ClientSession, base: str, news: asyncio.Event) -> None:
        """Ask for all charts after news, but not at once again."""
        while True:
            await news.wait()
            news.clear()
            tables: dict[str, list[str]] = (await _get(client, f"{base}api/run"))["tables"]
            for query, beginnings in _CHARTS:
                names = [name for name in tables.get(str(query["table"]), ()) if name.startswith(beginnings)]
                if names:
                    await _get(client, f"{base}api/series", **query, names=",".join(names))
            await _get(client, f"{base}api/notes")
            self.draws += 1
            await asyncio.sleep(_DRAW_S)


class Top:
    """`streamrl top` on a terminal of its own."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self.sampler: Sampler | None = None
        """Of its process; None: it has not been started."""

    async def look(self) -> None:
        """Show the run as soon as there is one, until cancelled; raises LaunchError when it ends of itself."""
        while not self._run.exists:  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(_LOOK_S)
        terminal, screen = pty.openpty()
        fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        loop = asyncio.get_running_loop()
        loop.add_reader(terminal, os.read, terminal, 1 << 16)
        command = child("streamrl", "top", self._run.path, env={"TERM": "xterm-256color"})
        try:
            process = await asyncio.create_subprocess_exec(
                *command["args"], env=command["env"], stdin=screen, stdout=screen, stderr=screen, start_new_session=True
            )
            try:
                with Sampler(process.pid) as self.sampler:
                    code = await process.wait()
            finally:
                if process.returncode is None:
                    process.terminate()
                    await process.wait()
        finally:
            loop.remove_reader(terminal)
            os.close(terminal)
            os.close(screen)
        raise LaunchError(f"streamrl top: expected it to show the run to its end, got exit code {code}", hint=f"look into {self._run.logs}")


async def scrape(address: str) -> None:
    """Ask an endpoint for its metrics now and then."""
    async with aiohttp.ClientSession(raise_for_status=True) as client:
        while True:
            with contextlib.suppress(*_AWAY):
                async with client.get(address) as answer:
                    await answer.read()
            await asyncio.sleep(_SCRAPE_S)


async def _get(client: aiohttp.ClientSession, url: str, **query: str | int) -> Any:
    async with client.get(url, params=query) as answer:
        return msgspec.json.decode(await answer.read())
