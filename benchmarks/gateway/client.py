"""A raw client: sessions, and calls at a fixed rate to an engine or through a gateway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast
from uuid import uuid4

import aiohttp

from benchmarks.gateway.spec import GatewaySpec
from streamrl.engines.channel import ChannelEngine
from streamrl.engines.protocol import GenerateRequest
from streamrl.errors import LaunchError
from streamrl.producers.completions import complete
from streamrl.schemas.tasks import Sampling

AT_ONCE = 32
"""Sessions that are started at a time."""


class Session:
    """One of a gateway, and its conversation so far."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.key: str = told["api_key"]
        self.messages: list[Any] = list(told["messages"])
        self.num_tokens = len(cast("list[int]", told["prompt_token_ids"]))
        """Of the prompt of its next call, about."""


class Client:
    """Of one gateway.

    Args:
        http: connections.
        url: of the gateway.
        key: of the gateway.
    """

    def __init__(self, http: aiohttp.ClientSession, url: str, key: str) -> None:
        self._http = http
        self._url = url
        self._key = key
        self.sessions: list[Session] = []

    async def open(self, count: int) -> None:
        """Start sessions."""
        left = iter(range(count))

        async def some() -> None:
            for _ in left:
                told = await self._post("/rl/start_session", {}, self._key)
                while told is None:  # credits come with time
                    told = await self._post("/rl/start_session", {}, self._key)
                self.sessions.append(Session(told))

        await asyncio.gather(*(some() for _ in range(AT_ONCE)))

    async def _post(self, path: str, body: Any, key: str) -> Any:
        async with self._http.post(self._url + path, json=body, headers={"Authorization": f"Bearer {key}"}) as answer:
            if answer.status == 429:
                return None
            if answer.status != 200:
                raise LaunchError(f"expected an answer of the gateway, got status {answer.status}: {await answer.text()}")
            return await answer.json()

    async def call(self, session: Session) -> None:
        """One more turn of a session."""
        answer = await self._post("/v1/chat/completions", {"model": "policy", "messages": session.messages}, session.key)
        session.messages += [answer["choices"][0]["message"], {"role": "user", "content": "1"}]
        session.num_tokens = answer["usage"]["total_tokens"] + 5


async def at_rate(spec: GatewaySpec, call: Callable[[int], Awaitable[None]]) -> list[float]:
    """Make the calls of half a round; returns the seconds of each, from when it was due: a late start counts."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    times: list[float] = []

    async def one(number: int, due: float) -> None:
        await call(number)
        times.append(loop.time() - due)

    async with asyncio.TaskGroup() as group:
        for number in range(spec.calls):
            due = began + number / spec.rate
            await asyncio.sleep(max(0.0, due - loop.time()))
            group.create_task(one(number, due))
    return times


async def ask(engine: ChannelEngine, spec: GatewaySpec, num_tokens: int) -> None:
    """The same to the engine itself: a prompt as long, an answer as long."""
    sampling = Sampling(max_new_tokens=spec.tokens, ignore_eos=True)
    request = GenerateRequest(request_id=uuid4().hex, prompt_ids=[1] * num_tokens, sampling=sampling, seeds=(time.monotonic_ns() & 0xFFFF,))
    await complete(engine, request)
