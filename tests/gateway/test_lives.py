"""Sessions over retries, dead agents and dead gateways, limits, and a bus that is away or full."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from msgspec.structs import replace

from streamrl.bus import connect
from streamrl.bus.memory import MemoryBus
from streamrl.bus.server import NatsServer
from streamrl.engines.batching.delays import TokenDelay
from streamrl.errors import BusError, BusUnavailable
from streamrl.schemas.codec import decode
from streamrl.schemas.samples import RewardUpdate
from streamrl.schemas.subjects import kind_of
from tests.support.gateways import PROMPT, Gateway, gateway, one_session, shown, tool_policy
from tests.support.producing import Loop, samples_in

pytestmark = pytest.mark.whole

CHAT = "/v1/chat/completions"
CALL: dict[str, Any] = {"model": "policy", "messages": PROMPT}


@contextlib.asynccontextmanager
async def cancelled(loop: Loop, **config: Any) -> AsyncIterator[Gateway]:
    """A gateway that is cut short in the end, and does not drain; `test_end_to_end.py` kills one."""
    stopped = contextlib.AsyncExitStack()
    gate = await stopped.enter_async_context(gateway(loop, **config))
    try:
        yield gate
    finally:
        for task in asyncio.all_tasks():
            frame = getattr(task.get_coro(), "cr_frame", None)
            if frame is not None and frame.f_code.co_name == "main" and frame.f_locals.get("worker") is gate.worker:
                task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await stopped.aclose()


def more(answer: dict[str, Any], content: str, messages: list[Any] = PROMPT) -> list[Any]:
    return [*messages, answer["choices"][0]["message"], {"role": "user", "content": content}]


async def test_the_same_call_again_has_the_same_answer(loop: Loop) -> None:
    async with one_session(loop, logits=tool_policy(loop)) as (gate, key):
        both = await asyncio.gather(*(gate.chat(key, PROMPT, stream_options=None, user=str(number)) for number in range(8)))
        assert len({one["id"] for one in both}) == 1, "calls at once share one"
        assert await gate.chat(key, PROMPT) == both[0]
        # Another Idempotency-Key asks for another answer, with a seed of its own.
        body = {"model": "policy", "messages": PROMPT}
        others = [await gate.post("/v1/chat/completions", body, key, Idempotency_Key=str(number % 12)) for number in range(24)]
        assert [one[1]["id"] for one in others] == [f"chatcmpl-0.0.{1 + number % 12}" for number in range(24)]
        assert {one[1]["choices"][0]["message"]["content"] for one in others} == {"?", "7"}
        status, answer = await gate.post("/v1/chat/completions", {**body, "max_tokens": 1}, key, Idempotency_Key="0")
        assert (status, answer["error"]["code"]) == (422, "idempotency_key_reused")
        await gate.end(key, reward=1.0)
        await gate.end(key)
        [sample] = samples_in(await loop.records(1))
    assert sample.loss_mask.sum() == 2, "of thirteen answers to one prompt the newest is trained"


async def test_a_client_that_has_gone_finds_its_answer(loop: Loop) -> None:
    delay = TokenDelay(mean_s=0.05, sigma=0.0)
    async with loop.engine(delay=delay), one_session(loop, engine=False) as (gate, key):
        leaving = asyncio.create_task(gate.chat(key, PROMPT))
        await asyncio.sleep(0.03)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        assert (await gate.chat(key, PROMPT))["id"] == "chatcmpl-0.0.0", "it was finished, and stored once"
        assert len(await loop.bus.turns.values("0/")) == 2


async def test_sessions_outlive_their_gateway(loop: Loop) -> None:
    async with loop.engine(tool_policy(loop)):
        async with cancelled(loop, engine=False) as gate:
            await loop.issue(1, num_rollouts=2)
            key, ended = [(await gate.start())["api_key"] for _ in range(2)]
            first = await gate.chat(key, PROMPT, return_token_ids=True)
            await gate.chat(ended, PROMPT)
            await gate.end(ended, reward=0.25)
            assert (await gate.post("/rl/set_reward", {"reward": 0.5, "parts": {"x": 1}}, key))[0] == 200
        async with gateway(loop, engine=False, wait_s=10.0) as gate:
            # Nobody asks for a session: the calls of those that there are bring their task back.
            assert await gate.chat(key, PROMPT, return_token_ids=True) == first
            second = await gate.chat(key, more(first, "5"), return_token_ids=True)
            assert (await gate.post("/v1/chat/completions", {"model": "policy", "messages": PROMPT}, ended))[0] == 410
            await gate.end(key)
            samples = samples_in(await loop.records(1))
            await loop.queue_is_empty()
            await until_empty(loop)
    assert [(s.rollout, s.reward, s.deliveries) for s in samples] == [(0, 0.5, 2), (1, 0.25, 2)]
    assert samples[0].reward_parts == {"x": 1.0}
    assert samples[0].tokens.tolist() == second["prompt_token_ids"] + second["choices"][0]["token_ids"]


async def until_empty(loop: Loop) -> None:
    """Wait until nothing is left of any session."""
    async with asyncio.timeout(60):
        while await loop.bus.turns.keys():
            await asyncio.sleep(0.05)


async def test_a_late_reward_joins_by_its_session_at_any_gateway(loop: Loop) -> None:
    async with loop.engine():
        async with one_session(loop, engine=False) as (gate, key):
            await gate.chat(key, PROMPT)
            await gate.end(key)
            await loop.records(1)
            assert (await gate.post("/rl/set_reward", {"reward": 0.5, "revision": 3}, key))[1]["late"] is True
        async with gateway(loop, engine=False, index=1, wait_s=0.5) as other:
            assert (await other.post("/rl/set_reward", {"reward": 0.75}, key))[0] == 200
            status, answer = await other.post("/v1/chat/completions", {"model": "policy", "messages": PROMPT}, key)
            assert (status, answer["error"]["code"]) == (503, "session_away")
        updates = [decode(one.body, RewardUpdate) for one in await loop.records(3) if kind_of(one.subject) == "rewards"]
    assert [(one.task, one.rollout, one.reward) for one in updates] == [(0, 0, 0.5), (0, 0, 0.75)]
    assert updates[0].revision == 3 < updates[1].revision


async def test_no_answer_leaves_that_is_not_stored(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that the end of its session cuts is stored before it or not at all; an entry without an answer is looked for."""
    assert isinstance(loop.bus, MemoryBus)
    put, reached, goes_on = loop.bus.turns.put, asyncio.Event(), asyncio.Event()

    async def away(*args: Any, **kwargs: Any) -> int:
        raise BusUnavailable("it is away")

    async def unheard(*args: Any, **kwargs: Any) -> int:
        await put(*args, **kwargs)
        raise BusUnavailable("its answer got lost")

    async def slow(*args: Any, **kwargs: Any) -> int:
        reached.set()
        await goes_on.wait()
        return await put(*args, **kwargs)

    async with one_session(loop) as (gate, key):
        for stand_in, requests in (
            (away, ((CHAT, CALL), ("/rl/end_session", {}), ("/rl/set_reward", {"reward": 1}))),
            (unheard, ((CHAT, CALL),)),
        ):
            monkeypatch.setattr(loop.bus.turns, "put", stand_in)
            for path, body in requests:
                status, answer = await gate.post(path, body, key)
                assert (status, answer["error"]["code"]) == (503, "bus_unavailable")
        monkeypatch.setattr(loop.bus.turns, "put", put)
        first = await gate.chat(key, PROMPT)
        assert first["id"] == "chatcmpl-0.0.1", "behind the turn that is there"
        monkeypatch.setattr(loop.bus.turns, "put", slow)
        call = asyncio.create_task(gate.post(CHAT, {**CALL, "messages": more(first, "5")}, key))
        await reached.wait()
        ends = [asyncio.create_task(gate.post("/rl/end_session", {}, key)) for _ in range(3)]
        assert (await call)[0] == 410
        goes_on.set()
        assert [(await one)[0] for one in ends] == [200] * 3
        [sample] = samples_in(await loop.records(1))
    assert shown(loop, sample) in ("7<|end|>", "7<|end|>7<|end|>")


async def test_a_full_store_of_turns_is_a_503_and_sessions_that_end_make_room(loop: Loop) -> None:
    config = replace(loop.config.bus, turns_bytes=2_000)
    loop.bus = MemoryBus(loop.config.run.name, config)
    async with gateway(loop) as gate:
        await loop.issue(2, num_rollouts=1)
        one, two = (await gate.start())["api_key"], (await gate.start())["api_key"]
        status, number = 200, 0
        while status == 200:
            number += 1
            messages = [*PROMPT, {"role": "user", "content": str(number)}]
            status, answer = await gate.post("/v1/chat/completions", {"model": "policy", "messages": messages}, one)
        assert (status, answer["error"]["code"]) == (503, "store_full")
        await loop.bus.turns.remove("0/")  # what the end of a task does
        await gate.chat(two, PROMPT)


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
async def test_a_bus_that_is_away_is_waited_for_or_is_a_refusal_and_the_session_goes_on(on_server: Loop, own_server: NatsServer) -> None:
    loop = on_server
    async with loop.engine():
        with contextlib.suppress(BusError, ExceptionGroup):  # a worker that has waited long enough ends; its supervisor starts the next
            async with one_session(loop, engine=False) as (gate, key):
                first = await gate.chat(key, PROMPT)
                own_server.kill()
                call = {**CALL, "messages": more(first, "5")}
                open_call = asyncio.create_task(asked(gate, key, call))
                await asyncio.sleep(0.5)
                assert not open_call.done(), "nothing leaves that is not stored"
                own_server.start()
                status, second, _ = await open_call
                assert status == 200 and (await answered(gate, key, call))["id"] == second["id"]
                own_server.kill()
                call = {**CALL, "messages": more(second, "6", call["messages"])}
                status, refusal, again = await asked(gate, key, call)
                assert status in (0, 503)
                if status:
                    assert refusal["error"]["code"] in ("bus_unavailable", "session_moved") and int(again) >= 1
        own_server.start()
        async with gateway(loop, engine=False) as gate:
            assert await answered(gate, key) == first
            third = await answered(gate, key, call)
            assert len(await loop.bus.turns.values("0/")) == 4, "nothing is stored of what was refused, or it is what is answered"
            await gate.end(key, reward=1.0)
            [sample] = samples_in(await loop.records(1))
    assert third["id"] == "chatcmpl-0.0.2" and sample.loss_mask.sum() == 6


async def test_engines_that_are_away_are_waited_for_within_the_calls_limit(loop: Loop) -> None:
    async with one_session(loop, engine=False, call_timeout_s=0.5) as (gate, key):
        status, refusal, again = await asked(gate, key)
        assert (status, refusal["error"]["code"]) == (504, "engine_timeout") and int(again) >= 1
        async with loop.engine():
            assert (await answered(gate, key))["id"] == "chatcmpl-0.0.0"


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
