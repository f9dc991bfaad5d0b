"""Sessions over retries, dead agents and dead gateways, limits, and a bus that is away or full."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace

from streamrl.bus.memory import MemoryBus
from streamrl.engines.batching.delays import TokenDelay
from streamrl.errors import BusUnavailable
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.control import Grant
from streamrl.schemas.samples import RewardUpdate
from streamrl.schemas.subjects import KEY_GRANTED, SAMPLES, kind_of
from tests.support.gateways import PROMPT, Gateway, gateway, shown, tool_policy
from tests.support.processes import until
from tests.support.producing import ACK_WAIT_S, Loop, samples_in, tombstones_in


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
    async with gateway(loop, logits=tool_policy(loop)) as gate:
        await loop.issue(1, num_rollouts=1)
        key = (await gate.start())["api_key"]
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


async def test_a_start_that_is_repeated_gives_one_session(loop: Loop) -> None:
    async with gateway(loop) as gate:
        await loop.issue(1, num_rollouts=2)
        first, again = [await gate.post("/rl/start_session", {}, gate.key, Idempotency_Key="mine") for _ in range(2)]
        assert first == again
        assert (await gate.start())["session_id"] == "0.1"


async def test_a_client_that_has_gone_finds_its_answer(loop: Loop) -> None:
    delay = TokenDelay(mean_s=0.05, sigma=0.0)
    async with loop.engine(delay=delay), gateway(loop, engine=False) as gate:
        await loop.issue(1, num_rollouts=1)
        key = (await gate.start())["api_key"]
        leaving = asyncio.create_task(gate.chat(key, PROMPT))
        await asyncio.sleep(0.03)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        assert (await gate.chat(key, PROMPT))["id"] == "chatcmpl-0.0.0", "it was finished, and stored once"
        assert len(await loop.bus.turns.values("0/")) == 2


async def test_a_call_that_takes_too_long_is_told_so_and_goes_on(loop: Loop) -> None:
    delay = TokenDelay(mean_s=0.2, sigma=0.0)
    async with loop.engine(delay=delay), gateway(loop, engine=False, call_timeout_s=0.1) as gate:
        await loop.issue(1, num_rollouts=1)
        key = (await gate.start())["api_key"]
        body = {"model": "policy", "messages": PROMPT}
        status, answer = await gate.post("/v1/chat/completions", body, key)
        assert (status, answer["error"]["code"]) == (504, "engine_timeout")
        while status != 200:
            status, answer = await gate.post("/v1/chat/completions", body, key)
        assert answer["id"] == "chatcmpl-0.0.0"


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
            samples = samples_in(await loop.records(1, timeout_s=10))
            await loop.queue_is_empty()
            await until_empty(loop)
    assert [(s.rollout, s.reward, s.deliveries) for s in samples] == [(0, 0.5, 2), (1, 0.25, 2)]
    assert samples[0].reward_parts == {"x": 1.0}
    assert samples[0].tokens.tolist() == second["prompt_token_ids"] + second["choices"][0]["token_ids"]


async def until_empty(loop: Loop) -> None:
    """Wait until nothing is left of any session."""
    async with asyncio.timeout(10):
        while await loop.bus.turns.keys():
            await asyncio.sleep(0.05)


async def test_two_gateways_that_hold_a_task_do_not_both_go_on(loop: Loop) -> None:
    async with loop.engine(), gateway(loop, engine=False) as first:
        await loop.issue(1, num_rollouts=1)
        key = (await first.start())["api_key"]
        answer = await first.chat(key, PROMPT)
        # As when the first was stopped for longer than its lease: the second has stored a turn of the session.
        taken = (await loop.bus.turns.values("0/"))["0/0/1"]
        await loop.bus.turns.put("0/0/2", taken)
        status, refusal = await first.post("/v1/chat/completions", {"model": "policy", "messages": more(answer, "5")}, key)
        assert (status, refusal["error"]["code"]) == (503, "session_moved")
        # It gives the task back, so that whoever gets it goes on from what is stored.
        await until(lambda: first.worker.detail()["tasks"] == [])


async def test_what_idles_ends_as_timeout_and_what_nobody_started_goes_back(loop: Loop) -> None:
    async with gateway(loop, idle_timeout_s=0.6) as gate:
        await loop.issue(1, num_rollouts=3)
        busy, idle = (await gate.start())["api_key"], (await gate.start())["api_key"]
        await gate.start()
        answer = await gate.chat(busy, PROMPT)
        for _ in range(8):  # the others are over while this one calls
            await asyncio.sleep(0.2)
            await gate.chat(busy, PROMPT)
        status, refusal = await gate.post("/v1/chat/completions", {"model": "policy", "messages": PROMPT}, idle)
        assert (status, refusal["error"]["code"]) == (410, "session_ended")
        assert (await gate.post("/rl/end_session", {}, idle))[0] == 410
        await gate.chat(busy, more(answer, "5"))
        await gate.end(busy, reward=1.0)
        records = await loop.records(3)
        assert [(one.rollout, one.reason) for one in tombstones_in(records)] == [(1, "timeout"), (2, "timeout")]
        assert [one.rollout for one in samples_in(records)] == [0]


async def test_a_task_of_which_nobody_starts_a_session_goes_back(loop: Loop) -> None:
    async with gateway(loop, idle_timeout_s=0.3) as gate:
        assert (await gate.post("/rl/start_session", {"wait_s": 0.05}, gate.key))[0] == 429
        await loop.issue(1, num_rollouts=2)  # the claim that it began still waits for a task
        await until(lambda: gate.worker.detail()["tasks"] == [0])
        await until(lambda: gate.worker.detail()["tasks"] == [])
        assert (await loop.bus.state(SAMPLES)).last == 0, "it is nobody's failure"
        told = await gate.start()
        assert told["session_id"] == "0.0"


async def test_a_failed_session_and_one_without_calls_are_failures_of_their_rollout(loop: Loop) -> None:
    async with gateway(loop) as gate:
        await loop.issue(1, num_rollouts=3)
        keys = [(await gate.start())["api_key"] for _ in range(3)]
        await gate.chat(keys[0], PROMPT)
        assert (await gate.post("/rl/end_session", {"failed": "the sandbox has died"}, keys[0]))[0] == 200
        await gate.end(keys[1])
        await gate.chat(keys[2], PROMPT)
        await gate.end(keys[2])
        records = await loop.records(3)
    assert [(one.rollout, one.reason, one.detail) for one in tombstones_in(records)] == [
        (0, "failed", "the sandbox has died"),
        (1, "failed", "the session ended without an answered call"),
    ]
    assert [(one.rollout, one.reward) for one in samples_in(records)] == [(2, 1.0)], "scored by the run's reward"


async def test_a_late_reward_joins_by_its_session_at_any_gateway(loop: Loop) -> None:
    async with loop.engine():
        async with gateway(loop, engine=False) as gate:
            await loop.issue(1, num_rollouts=1)
            key = (await gate.start())["api_key"]
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
    assert isinstance(loop.bus, MemoryBus)
    async with gateway(loop) as gate:
        await loop.issue(1, num_rollouts=1)
        key = (await gate.start())["api_key"]
        put = loop.bus.turns.put

        async def away(*args: Any, **kwargs: Any) -> int:
            raise BusUnavailable("it is away")

        monkeypatch.setattr(loop.bus.turns, "put", away)
        for path, body in (
            ("/v1/chat/completions", {"model": "policy", "messages": PROMPT}),
            ("/rl/end_session", {}),
            ("/rl/set_reward", {"reward": 1}),
        ):
            status, answer = await gate.post(path, body, key)
            assert (status, answer["error"]["code"]) == (503, "bus_unavailable")
        monkeypatch.setattr(loop.bus.turns, "put", put)
        assert (await gate.chat(key, PROMPT))["id"] == "chatcmpl-0.0.0"
        await gate.end(key, reward=1.0)
        [sample] = samples_in(await loop.records(1))
    assert shown(loop, sample) == "7<|end|>"


async def test_an_entry_without_an_answer_is_looked_for(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(loop.bus, MemoryBus)
    async with gateway(loop) as gate:
        await loop.issue(1, num_rollouts=1)
        key = (await gate.start())["api_key"]
        put = loop.bus.turns.put

        async def unheard(*args: Any, **kwargs: Any) -> int:
            await put(*args, **kwargs)
            raise BusUnavailable("its answer got lost")

        monkeypatch.setattr(loop.bus.turns, "put", unheard)
        status, answer = await gate.post("/v1/chat/completions", {"model": "policy", "messages": PROMPT}, key)
        assert (status, answer["error"]["code"]) == (503, "bus_unavailable")
        monkeypatch.setattr(loop.bus.turns, "put", put)
        await gate.end(key, reward=1.0)  # behind the turn that is there
        assert len(samples_in(await loop.records(1))) == 1


async def test_a_call_that_the_end_of_its_session_cuts_is_stored_before_it_or_not_at_all(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(loop.bus, MemoryBus)
    async with gateway(loop) as gate:
        await loop.issue(1, num_rollouts=1)
        key = (await gate.start())["api_key"]
        put, reached, goes_on = loop.bus.turns.put, asyncio.Event(), asyncio.Event()

        async def slow(*args: Any, **kwargs: Any) -> int:
            reached.set()
            await goes_on.wait()
            return await put(*args, **kwargs)

        monkeypatch.setattr(loop.bus.turns, "put", slow)
        call = asyncio.create_task(gate.post("/v1/chat/completions", {"model": "policy", "messages": PROMPT}, key))
        await reached.wait()
        ends = [asyncio.create_task(gate.post("/rl/end_session", {}, key)) for _ in range(3)]
        assert (await call)[0] == 410
        goes_on.set()
        assert [(await one)[0] for one in ends] == [200] * 3
        assert len(samples_in(await loop.records(1))) == 1


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


async def test_a_gateway_that_drains_gives_its_sessions_to_the_next(loop: Loop) -> None:
    async with loop.engine():
        async with gateway(loop, engine=False) as gate:
            await loop.issue(1, num_rollouts=1)
            key = (await gate.start())["api_key"]
            answer = await gate.chat(key, PROMPT)
            waiting = asyncio.create_task(gate.post("/rl/start_session", {}, gate.key))
            await until(lambda: gate.worker.detail()["waiting"])
            gate.worker.draining.set()
            assert (await waiting)[0] == 429
        async with gateway(loop, engine=False, wait_s=10.0) as gate:
            assert await gate.chat(key, PROMPT) == answer
            await gate.end(key, reward=1.0)
            assert [s.reward for s in samples_in(await loop.records(1))] == [1.0]
            assert (await loop.bus.state(SAMPLES)).last == 1
    assert ACK_WAIT_S == 1.0


async def test_a_task_that_expires_takes_its_sessions_with_it(loop: Loop) -> None:
    async with gateway(loop) as gate:
        await loop.issue(1, num_rollouts=1)
        key = (await gate.start())["api_key"]
        await gate.chat(key, PROMPT)
        await loop.bus.kv.put(KEY_GRANTED, encode(Grant(granted=4, version=9, retired=1, first_open=1)))
        await until(lambda: gate.worker.detail()["tasks"] == [], within_s=10)
        status, answer = await gate.post("/v1/chat/completions", {"model": "policy", "messages": PROMPT}, key)
        assert (status, answer["error"]["code"]) == (410, "session_ended")
        await until_empty(loop)
