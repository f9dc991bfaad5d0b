"""Calls of verifiers' clients to the session of their rollout, by the trace's id that they bring; on loopback, in the guest itself.

All rollouts share one client of verifiers so: a client for each session would stay open as long as the guest lives. A call that the gateway
cannot answer now is repeated here, which is safe: it gives the same call the same answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
from aiohttp import web

_AGAIN = (429, 503, 504)
_PAUSE_S = 1.0
_MAX_BYTES = 1 << 30
Answer = Callable[[str, dict[str, Any]], Awaitable[web.Response]]


class Line:
    """A session as its calls see it.

    Args:
        root: its URL, without `/v1`.
        key: of it.
        patience_s: for how long a gateway that is away is asked again.
    """

    def __init__(self, root: str, key: str, patience_s: float) -> None:
        self.root, self.key, self.patience_s = root, key, patience_s
        self.active_s = time.monotonic()
        """When it last began or ended a call."""
        self.open = 0
        """Calls that are not answered."""


class Relay:
    """A server on loopback.

    Args:
        http: for calls to the gateway.
        max_model_len: told to who asks.
        model: told likewise.
    """

    def __init__(self, http: aiohttp.ClientSession, model: str, max_model_len: int) -> None:
        self.lines: dict[str, Line] = {}
        """By trace."""
        self.heard: Answer | None = None
        """What answers a call of messages, where no gateway does."""
        self._http = http
        self._model = {"id": model, "object": "model", "max_model_len": max_model_len}
        self.base_url = ""

    async def start(self) -> web.AppRunner:
        """Listen; the caller cleans up what it gives."""
        app = web.Application(client_max_size=_MAX_BYTES)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        return runner

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._model]})

    async def _chat(self, request: web.Request) -> web.Response:
        if self.heard is None:
            return await self._pass_on(request, "/v1/chat/completions")
        return await self.heard(request.headers.get("X-Session-ID", ""), await request.json())

    async def _generate(self, request: web.Request) -> web.Response:
        return await self._pass_on(request, "/inference/v1/generate")

    async def _pass_on(self, request: web.Request, path: str) -> web.Response:
        line = self.lines.get(request.headers.get("X-Session-ID", ""))
        if line is None:
            return web.json_response({"error": {"message": "expected a call of a rollout of this guest"}}, status=404)
        body = await request.read()
        line.open += 1
        try:
            return await self._asked(line, path, body)
        finally:
            line.open -= 1
            line.active_s = time.monotonic()

    async def _asked(self, line: Line, path: str, body: bytes) -> web.Response:
        headers = {"Authorization": f"Bearer {line.key}", "Content-Type": "application/json"}
        deadline = time.monotonic() + line.patience_s
        while True:
            try:
                async with self._http.post(line.root + path, data=body, headers=headers) as answer:
                    data = await answer.read()
                    if answer.status not in _AGAIN or (answer.status != 504 and time.monotonic() > deadline):
                        return web.Response(body=data, status=answer.status, content_type=answer.content_type)
                    pause_s = float(answer.headers.get("Retry-After", _PAUSE_S))
            except aiohttp.ClientConnectionError as error:
                if time.monotonic() > deadline:
                    return web.json_response({"error": {"message": f"the gateway is away: {error}"}}, status=502)
                pause_s = _PAUSE_S
            await asyncio.sleep(pause_s)
