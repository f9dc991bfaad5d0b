"""A gateway in this process: the worker on a bus, a table engine behind HTTP, and clients of it."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import numpy as np
from msgspec.structs import replace

from streamrl.config.gateway import GatewayConfig
from streamrl.producers.gateway.worker import addresses, main
from streamrl.runtime.worker import Worker
from tests.support.policies import script
from tests.support.processes import until
from tests.support.producing import Loop

PROMPT: Any = [{"role": "user", "content": "3+4"}]


class Gateway:
    """One that serves, and a raw client of it."""

    def __init__(self, loop: Loop, worker: Worker, url: str, http: aiohttp.ClientSession) -> None:
        self.loop = loop
        self.worker = worker
        self.url = url
        self.key = loop.run_dir.gateway_key()
        self._http = http

    async def post(self, path: str, body: Any, key: str = "", **headers: str) -> tuple[int, Any]:
        """Status and answer of a request; `body` is JSON, or bytes as they are."""
        data: dict[str, Any] = {"data": body} if isinstance(body, bytes) else {"json": body}
        given = {"Authorization": f"Bearer {key}"} | {name.replace("_", "-"): value for name, value in headers.items()}
        async with self._http.post(self.url + path, headers=given, **data) as answer:
            return answer.status, await answer.json()

    async def start(self, **body: Any) -> dict[str, Any]:
        status, told = await self.post("/rl/start_session", body, self.key)
        assert status == 200, told
        return told

    async def chat(self, key: str, messages: Any, **body: Any) -> dict[str, Any]:
        status, answer = await self.post("/v1/chat/completions", {"model": "policy", "messages": messages, **body}, key)
        assert status == 200, answer
        return answer

    async def end(self, key: str, reward: float | None = None) -> None:
        if reward is not None:
            assert (await self.post("/rl/set_reward", {"reward": reward}, key))[0] == 200
        assert (await self.post("/rl/end_session", {}, key))[0] == 200


@contextlib.asynccontextmanager
async def gateway(
    loop: Loop, *, logits: np.ndarray | None = None, engine: bool = True, index: int = 0, **config: Any
) -> AsyncIterator[Gateway]:
    """A gateway worker until the end, with an engine unless there is one already."""
    worker = loop.worker(index, kind="gateway", config=replace(loop.config, gateway=GatewayConfig(**{"wait_s": 5.0, **config})))
    async with contextlib.AsyncExitStack() as opened:
        if engine:
            await opened.enter_async_context(loop.engine(logits))
        await opened.enter_async_context(loop.serving(main, worker))
        await until(lambda: worker.name in addresses(loop.run_dir) and worker.detail().get("address"))
        http = await opened.enter_async_context(aiohttp.ClientSession())
        yield Gateway(loop, worker, worker.detail()["address"], http)


@contextlib.asynccontextmanager
async def one_session(loop: Loop, *, num_rollouts: int = 1, **config: Any) -> AsyncIterator[tuple[Gateway, str]]:
    """A gateway that has claimed a task, and the key of the task's first session."""
    async with gateway(loop, **config) as gate:
        await loop.issue(1, num_rollouts=num_rollouts)
        yield gate, (await gate.start())["api_key"]


def tool_policy(loop: Loop) -> np.ndarray:
    """Logits of a policy that asks (`?`) half of the time and answers 7 otherwise."""
    logits = script(loop.tokenizer, {(0, "<|assistant|>"): "7"})
    row = logits[0, loop.tokenizer.encode("<|assistant|>")[0]]
    row[loop.tokenizer.encode("?")[0]] = 30.0
    return logits


def shown(loop: Loop, sample: Any) -> str:
    return loop.tokenizer.decode(sample.tokens[sample.loss_mask == 1].tolist())
