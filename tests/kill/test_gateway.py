"""A gateway is ended at every call on the bus; its agents go on at the next, and what they were told is what is trained."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from streamrl.bus.server import NatsServer
from streamrl.engines.batching.engine import BatchingEngine
from streamrl.engines.protocol import Chunk, GenerateRequest
from tests.support.audit.answers import Answer, check, read_sessions
from tests.support.audit.raw import read_run
from tests.support.world.agents import Agent, Told
from tests.support.world.nursery import Nursery
from tests.support.world.table import GATEWAY
from tests.support.world.world import World, table_config, world

pytestmark = pytest.mark.nats

AGENTS = 6


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Answer]:
    """What the engines of this process give, as it comes from them."""
    found: list[Answer] = []
    generate: Any = BatchingEngine.generate

    async def written_down(self: BatchingEngine, request: GenerateRequest) -> AsyncIterator[Chunk]:
        chunks: list[Chunk] = []
        async with contextlib.aclosing(generate(self, request)) as stream:
            async for chunk in stream:
                chunks.append(chunk)
                if chunk.finish_reason is not None:
                    found.append(answer_of(request, chunks))
                yield chunk

    monkeypatch.setattr(BatchingEngine, "generate", written_down)
    return found


def answer_of(request: GenerateRequest, chunks: list[Chunk]) -> Answer:
    task, rollout = map(int, request.session.split("."))
    return Answer(
        task,
        rollout,
        tuple(request.prompt_ids),
        tuple(token for chunk in chunks for token in chunk.token_ids),
        tuple(logprob for chunk in chunks for logprob in chunk.logprobs),
        tuple((s.version.epoch, s.version.number) for c in chunks for s in c.spans if s.version is not None for _ in range(s.length)),
    )


@contextlib.asynccontextmanager
async def agents(w: World, lines: list[dict[str, Any]]) -> AsyncIterator[None]:
    """Agents that work until the end; one that fails fails the test."""
    async with aiohttp.ClientSession() as http:
        working = [asyncio.create_task(Agent(w.run, lines.append, http, random.Random(seed)).work()) for seed in range(AGENTS)]
        try:
            yield
        finally:
            for each in working:
                each.cancel()
            outcomes = await asyncio.gather(*working, return_exceptions=True)
    assert [one for one in outcomes if not isinstance(one, asyncio.CancelledError)] == []


async def test_every_call(tmp_path: Path, own_server: NatsServer, children: Nursery, made: list[Answer]) -> None:
    config = table_config(
        tmp_path,
        run={"steps": 24},
        model={"max_len": 64},
        bus={"ack_wait_s": 1.0},  # a session whose start was never answered is nobody's, and idles
        gateway={"wait_s": 5.0, "idle_timeout_s": 5.0, "call_timeout_s": 30.0},
        trainer={"checkpoint_every": 1000},  # so that no sample is trimmed before it is looked at
    )
    lines: list[dict[str, Any]] = []
    async with world(config, own_server, children) as w:
        async with w.around("engine", "trainer", "feeder"), agents(w, lines):
            await w.disturb(GATEWAY)
            async with w.around("gateway"):
                await w.finished()
        told = Told(lines)
        address = own_server.address
        raw = await read_run(address.url, address.user, address.password, config.run.name, w.run.path)
        sessions = read_sessions(raw.samples.messages)
        queued = {message.sequence - 1 for message in raw.tasks.messages}
        assert check(sessions, told.answers, told.ended, made, queued=queued) == []
        assert len(queued) < 20 and len(told.ended) > 80
        assert told.wrong == []
        assert len(sessions.rows) > 60 and any(len(rows) > 1 for rows in sessions.rows.values())
        await w.check()
