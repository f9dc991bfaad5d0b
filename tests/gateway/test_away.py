"""Bus, engines, versions and gateways that are away while calls are open: an answer waits, or is a refusal that can be repeated."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from msgspec.structs import replace

from streamrl.bus import connect
from streamrl.bus.memory.queue import MemoryLease
from streamrl.bus.server import NatsServer
from streamrl.engines.batching.delays import TokenDelay
from streamrl.engines.table.engine import TableEngine
from streamrl.errors import BusError
from streamrl.schemas.codec import encode
from streamrl.schemas.subjects import SAMPLES
from streamrl.schemas.tasks import RolloutTask, Sampling
from streamrl.schemas.versions import Version
from tests.gateway.test_lives import cancelled, more
from tests.support.gateways import PROMPT, Gateway, gateway
from tests.support.policies import script, serve_logits
from tests.support.processes import until
from tests.support.producing import Loop, samples_in

CHAT = "/v1/chat/completions"
CALL: dict[str, Any] = {"model": "policy", "messages": PROMPT}


async def asked(gate: Gateway, key: str, call: dict[str, Any] = CALL) -> tuple[int, Any, str]:
    """Status, answer and `Retry-After`; 0: the connection broke."""
    headers = {"Authorization": f"Bearer {key}"}
    try:
        async with aiohttp.ClientSession() as http, http.post(gate.url + CHAT, json=call, headers=headers) as answer:
            return answer.status, await answer.json(), answer.headers.get("Retry-After", "")
    except aiohttp.ClientError:
        return 0, None, ""


async def answered(gate: Gateway, key: str, call: dict[str, Any] = CALL) -> dict[str, Any]:
    """The answer, asked for again until there is one."""
    async with asyncio.timeout(30):
        while (got := await asked(gate, key, call))[0] != 200:
            await asyncio.sleep(0.1)
    return got[1]


@pytest.fixture
async def on_server(loop: Loop, own_server: NatsServer) -> AsyncIterator[Loop]:
    """The run on a nats-server that the test may stop. Its operations are patient for two seconds."""
    config = replace(loop.config, bus=replace(loop.config.bus, patience_s=2.0))
    bus = await connect(own_server.address, config.run.name, config.bus)
    yield Loop(bus, config, loop.run_dir, loop.tokenizer)
    await bus.close()


@pytest.mark.nats
async def test_a_bus_that_comes_back_in_time_is_waited_for(on_server: Loop, own_server: NatsServer) -> None:
    loop = on_server
    async with gateway(loop) as gate:
        await loop.issue(1, num_rollouts=1)
        key = (await gate.start())["api_key"]
        first = await gate.chat(key, PROMPT)
        own_server.kill()
        call = {**CALL, "messages": more(first, "5")}
        open_call = asyncio.create_task(asked(gate, key, call))
        await asyncio.sleep(0.5)
        assert not open_call.done(), "nothing leaves that is not stored"
        own_server.start()
        status, second, _ = await open_call
        assert status == 200
        assert (await answered(gate, key, call))["id"] == second["id"]
        await gate.end(key, reward=1.0)
        [sample] = samples_in(await loop.records(1))
    assert sample.loss_mask.sum() == 4


@pytest.mark.nats
async def test_a_bus_that_stays_away_is_a_refusal_and_the_session_goes_on_afterwards(on_server: Loop, own_server: NatsServer) -> None:
    loop = on_server
    async with loop.engine():
        with contextlib.suppress(BusError, ExceptionGroup):  # a worker that has waited long enough ends; its supervisor starts the next
            async with gateway(loop, engine=False) as gate:
                await loop.issue(1, num_rollouts=1)
                key = (await gate.start())["api_key"]
                first = await gate.chat(key, PROMPT)
                own_server.kill()
                call = {**CALL, "messages": more(first, "5")}
                status, refusal, again = await asked(gate, key, call)
                assert status in (0, 503)
                if status:
                    assert refusal["error"]["code"] in ("bus_unavailable", "session_moved") and int(again) >= 1
        own_server.start()
        async with gateway(loop, engine=False) as gate:
            assert await answered(gate, key) == first
            second = await answered(gate, key, call)
            assert len(await loop.bus.turns.values("0/")) == 3, "nothing is stored of what was refused, or it is what is answered"
            await gate.end(key, reward=1.0)
            [sample] = samples_in(await loop.records(1))
    assert second["id"] == "chatcmpl-0.0.1" and sample.loss_mask.sum() == 4


async def test_engines_that_are_away_are_waited_for_within_the_calls_limit(loop: Loop) -> None:
    async with gateway(loop, engine=False, call_timeout_s=0.5) as gate:
        await loop.issue(1, num_rollouts=1)
        key = (await gate.start())["api_key"]
        status, refusal, again = await asked(gate, key)
        assert (status, refusal["error"]["code"]) == (504, "engine_timeout") and int(again) >= 1
        async with loop.engine():
            assert (await answered(gate, key))["id"] == "chatcmpl-0.0.0"


async def test_a_call_that_is_held_for_a_version_stays_within_its_limit(loop: Loop) -> None:
    logits = script(loop.tokenizer, {(0, "<|assistant|>"): "7"})
    async with loop.engine(logits) as engine, gateway(loop, engine=False, call_timeout_s=0.5) as gate:
        ids = tuple(loop.tokenizer.encode("<|user|>3+4<|end|><|assistant|>"))
        sampling = Sampling(max_new_tokens=8)
        about: dict[str, Any] = {"run": loop.config.run.name, "source": "main", "prompt": "3+4", "label": "7", "num_rollouts": 1, "seed": 0}
        task = RolloutTask(index=0, prompt_ids=ids, sampling=sampling, min_version=3, **about)
        await loop.bus.publish(loop.subjects.tasks("main"), encode(task))
        key = (await gate.start())["api_key"]
        status, refusal, again = await asked(gate, key)
        assert (status, refusal["error"]["code"]) == (504, "engine_timeout") and int(again) >= 1
        assert isinstance(engine, TableEngine)
        await serve_logits(engine, logits, Version(0, 3))
        await answered(gate, key)
        await gate.end(key, reward=1.0)
        [sample] = samples_in(await loop.records(1))
    assert {span.version for span in sample.spans if span.version is not None} == {Version(0, 3)}


async def test_a_gateway_that_drains_answers_its_open_calls_one_way_or_the_other(loop: Loop) -> None:
    async with loop.engine(delay=TokenDelay(mean_s=60.0, sigma=0.0)) as engine, gateway(loop, engine=False) as gate:
        await loop.issue(2, num_rollouts=1)
        keys = [(await gate.start())["api_key"] for _ in range(2)]
        calls = [asyncio.create_task(asked(gate, key)) for key in keys]
        async with asyncio.timeout(60):
            while (await engine.info()).running < 2:
                await asyncio.sleep(0.02)
        gate.worker.draining.set()
        outcomes = [await call for call in calls]
        assert (await asked(gate, "sk-0"))[0] in (0, 401), "or it listens no more"
    for status, refusal, again in outcomes:
        assert (status, refusal["error"]["code"]) == (503, "session_moved") and int(again) >= 1
    assert len(await loop.bus.turns.keys()) == 2, "nothing but that they were started"
    async with gateway(loop, index=1) as gate:
        assert [(await answered(gate, key))["id"] for key in keys] == ["chatcmpl-0.0.0", "chatcmpl-1.0.0"]


async def test_of_two_gateways_that_serve_one_is_killed(loop: Loop) -> None:
    async with loop.engine(), gateway(loop, engine=False, index=1, wait_s=10.0) as second:
        async with cancelled(loop, engine=False) as first:
            await loop.issue(6, num_rollouts=1)
            here, there = [[(await gate.start())["api_key"] for _ in range(3)] for gate in (first, second)]
            told = {key: await gate.chat(key, PROMPT) for gate, keys in ((first, here), (second, there)) for key in keys}
        for key in (*there, *here):
            assert await second.chat(key, PROMPT) == told[key]
            await second.chat(key, more(told[key], "5"))
            await second.end(key, reward=1.0)
        samples = samples_in(await loop.records(6))
        await loop.queue_is_empty()
        await until(lambda: not second.worker.detail()["tasks"])
    assert sorted((s.task, s.producer) for s in samples) == [(task, "gateway-1") for task in range(6)]
    assert all(sample.loss_mask.sum() == 4 for sample in samples)


async def test_a_task_that_comes_a_second_time_to_the_same_gateway_is_not_begun_again(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a stop that was longer than the lease: the second delivery waits for what becomes of the first."""

    async def lapses(lease: MemoryLease) -> None:
        return

    async with gateway(loop) as gate:
        await loop.issue(1, num_rollouts=2)
        keys = [(await gate.start())["api_key"] for _ in range(2)]
        first = await gate.chat(keys[0], PROMPT)
        with monkeypatch.context() as patched:
            patched.setattr(MemoryLease, "keep", lapses)
            status, _ = await gate.post("/rl/start_session", {"wait_s": 2.5}, gate.key)
            assert status == 429
        assert gate.worker.detail()["tasks"] == [0, 0]
        await gate.chat(keys[0], more(first, "5"))
        await gate.chat(keys[1], PROMPT)
        for key in keys:
            await gate.end(key, reward=1.0)
        await until(lambda: not gate.worker.detail()["tasks"])
        await loop.queue_is_empty()
        samples = samples_in(await loop.records(1))
        assert (await loop.bus.state(SAMPLES)).last == 1
        assert (await gate.post(CHAT, CALL, keys[0]))[0] == 410 and await loop.bus.turns.keys() == []
    assert [(s.rollout, int(s.loss_mask.sum())) for s in samples] == [(0, 4), (1, 2)]
