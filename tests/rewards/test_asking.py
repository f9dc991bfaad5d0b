"""`remote` and `judge` against servers that answer, fail, lie and hang."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from streamrl.errors import RewardError, SchemaError
from streamrl.rewards.asking import MAX_ANSWER_BYTES
from streamrl.rewards.factory import built_in
from streamrl.rewards.judge import TEMPLATE
from streamrl.rewards.layers import Boxed, close
from streamrl.rewards.protocol import RewardValue
from tests.rewards.episodes import Episode, task

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
FAST = {"attempts": 3, "backoff_s": 0.01, "timeout_s": 20.0}


class Server:
    """What it was asked, and how it answers."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.handler: Handler = self.says(1.0)
        self.at_once = self.most = 0
        self.connections: set[Any] = set()

    def says(self, value: Any, status: int = 200, **headers: str) -> Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            return web.Response(text=value if isinstance(value, str) else json.dumps(value), status=status, headers=headers)

        return handler

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        self.headers.append(dict(request.headers))
        self.connections.add(request.transport)
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        try:
            return await self.handler(request)
        finally:
            self.at_once -= 1


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    app = web.Application()
    app.router.add_post("/{path:.*}", made.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}/score"
    yield made
    await runner.cleanup()


async def scored(kind: str, options: dict[str, Any], num_episodes: int = 1, completion: str = "four") -> list[Any]:
    reward = built_in(kind, options)
    try:
        episodes = [Episode(completion, rollout, metadata={"rounds": 2}) for rollout in range(num_episodes)]
        return list(await reward.score(task("4", prompt="2 + 2?", metadata={"level": 1}), episodes))
    finally:
        await close(reward)


async def test_a_server_is_told_what_it_scores_and_says_a_number_or_parts(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCORER_KEY", "abc")
    [value] = await scored("remote", {"url": server.url, "token_env": "SCORER_KEY"})
    assert value == RewardValue(1.0)
    assert server.asked == [{"prompt": "2 + 2?", "response": "four", "label": "4", "metadata": {"level": 1, "rounds": 2}}]
    assert server.headers[0]["Authorization"] == "Bearer abc"
    server.handler = server.says({"reward": 0.5, "style": 2})
    assert await scored("remote", {"url": server.url}) == [RewardValue(0.5, {"style": 2.0})]
    assert "Authorization" not in server.headers[1]
    server.handler = server.says({"a": 0.5, "b": 2})
    assert await scored("remote", {"url": server.url}) == [RewardValue(2.5, {"a": 0.5, "b": 2.0})]
    assert await scored("boxed_remote", {"url": server.url}, completion=r"so \boxed{4}") and server.asked[-1]["response"] == "4"
    assert isinstance(built_in("boxed_remote", {"url": server.url}), Boxed)


async def test_calls_share_a_bounded_pool(server: Server) -> None:
    async def slow(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.02)
        return web.json_response(1)

    server.handler = slow
    values = await scored("remote", {"url": server.url, "concurrency": 4}, num_episodes=32)
    assert values == [RewardValue(1.0)] * 32
    assert 2 <= server.most <= 4 and len(server.connections) <= 4


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_busy_server_is_asked_again(server: Server, status: int) -> None:
    async def busy(request: web.Request) -> web.StreamResponse:
        if len(server.asked) < 3:
            return web.Response(status=status, text="busy")
        return web.json_response(0.5)

    server.handler = busy
    assert await scored("remote", {"url": server.url, **FAST}) == [RewardValue(0.5)]
    server.handler = server.says("busy", status)
    [error] = await scored("remote", {"url": server.url, **FAST})
    assert isinstance(error, RewardError) and f"status {status}: busy, tried 3 times" in error.message and "row 7" in error.message


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ("no such model", 404, "status 404: no such model"),
        ("not for you", 401, "status 401: not for you"),
        ("NaN", 200, "no JSON"),
        ("Infinity", 200, "no JSON"),
        ("1e999", 200, ""),
        ("{}", 200, "no parts"),
        ("null", 200, "NoneType"),
        ('"1.0"', 200, "must be a number"),
        ("[1, 2]", 200, "list"),
        ('{"reward": "good"}', 200, "must be a number"),
        ("<html>", 200, "no JSON"),
        ("", 200, "no JSON"),
        ("[" * 100_000, 200, "no JSON"),
        ("1", 204, "status 204"),
    ],
)
async def test_an_answer_that_is_no_reward_is_final_and_said(server: Server, body: str, status: int, said: str) -> None:
    server.handler = server.says(body, status)
    [error] = await scored("remote", {"url": server.url, **FAST})
    assert isinstance(error, RewardError | SchemaError) and said in error.message
    assert len(server.asked) == 1
    server.handler = server.says(body, 301, Location="http://192.0.2.1/elsewhere")
    [error] = await scored("remote", {"url": server.url, **FAST})
    assert "a redirect to 'http://192.0.2.1/elsewhere'" in error.message and len(server.asked) == 2, "it is not followed"


async def test_an_endless_answer_is_cut_and_a_small_one_does_not_unfold(server: Server) -> None:
    sent = 0

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"1" * (1 << 16))
            sent += 1 << 16

    async def packed(request: web.Request) -> web.StreamResponse:
        return web.Response(body=gzip.compress(b" " * (100 << 20) + b"1", 1), headers={"Content-Encoding": "gzip"})

    for server.handler, said in ((endless, f"more than {MAX_ANSWER_BYTES} bytes"), (packed, "no JSON")):
        [error] = await scored("remote", {"url": server.url, **FAST})
        assert isinstance(error, RewardError) and said in error.message
    assert sent < 64 << 20 and len(server.asked) == 2


async def test_a_server_that_never_answers_costs_its_limits(server: Server) -> None:
    async def never(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(3600)
        raise AssertionError

    server.handler = never
    [error] = await scored("remote", {"url": server.url, "attempts": 2, "timeout_s": 0.05, "backoff_s": 0.01})
    assert isinstance(error, RewardError) and "0.05 s, tried 2 times" in error.message
    [error] = await scored("remote", {"url": server.url, "attempts": 100, "timeout_s": 0.05, "backoff_s": 0.01, "total_s": 0.3})
    assert isinstance(error, RewardError) and "in 0.3 s (total_s)" in error.message
    [error] = await scored("remote", {"url": "http://127.0.0.1:9/score", "attempts": 2, "backoff_s": 0.01})
    assert isinstance(error, RewardError) and "tried 2 times" in error.message and "127.0.0.1:9" in error.message, "nobody is there"


@pytest.mark.parametrize("value", ["", "a\nX-Injected: b"])
async def test_a_key_that_is_none_is_never_sent_nor_shown(server: Server, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("SCORER_KEY", value)
    [error] = await scored("remote", {"url": server.url, "token_env": "SCORER_KEY"})
    assert isinstance(error, RewardError) and "SCORER_KEY holds no key" in error.message and "Injected" not in error.message
    assert server.asked == []


async def test_cancelling_ends_the_calls(server: Server) -> None:
    begun = asyncio.Event()

    async def never(request: web.Request) -> web.StreamResponse:
        begun.set()
        await asyncio.sleep(3600)
        raise AssertionError

    server.handler = never
    scoring = asyncio.create_task(scored("remote", {"url": server.url}, num_episodes=3))
    await begun.wait()
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring


def completion(text: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


def judge(server: Server, **options: Any) -> dict[str, Any]:
    return {"url": server.url.removesuffix("/score") + "/v1/", "model": "m", **FAST, **options}


@pytest.mark.parametrize(
    ("said", "options", "value"),
    [
        ("Good. [[7]]", {}, 0.7),
        ("[[1]] no, [[ 10 ]]", {}, 1.0),
        ("[[2.5]]", {"scaled": False}, 2.5),
        ("[[-1]]", {"low": -1.0, "high": 1.0}, 0.0),
        ("Verdict: YES", {"pattern": r"Verdict: (\w+)", "verdicts": {"yes": 1, "no": 0}}, 1.0),
        ('{"score": 4}', {"pattern": r'"score": (\d+)', "high": 5.0}, 0.8),
    ],
)
async def test_a_judge(server: Server, said: str, options: dict[str, Any], value: float) -> None:
    server.handler = server.says(completion(said))
    [found] = await scored("judge", judge(server, system="You grade.", **options))
    assert found.value == pytest.approx(value)
    [asked] = server.asked
    assert (asked["model"], asked["temperature"], asked["max_tokens"]) == ("m", 0.0, 1024)
    assert asked["messages"][0] == {"role": "system", "content": "You grade."}
    assert all(text in asked["messages"][1]["content"] for text in ("2 + 2?", "four", "\n4\n"))


@pytest.mark.parametrize(
    ("said", "why", "options"),
    [
        (completion("I like it"), "no score in 'I like it'", {}),
        (completion("[[11]]"), "the score 11, not from 0 to 10", {}),
        (completion(None), "no chat completion", {}),
        ({"choices": []}, "no chat completion", {}),
        ([], "no chat completion", {}),
        ({"error": "x"}, "no chat completion", {}),
        (completion("Verdict: maybe"), "'maybe', of yes", {"pattern": r"Verdict: (\w+)", "verdicts": {"yes": 1}}),
        (completion("Verdict: maybe"), "no number", {"pattern": r"Verdict: (\w+)"}),
    ],
)
async def test_a_judge_without_a_score_fails_the_rollout(server: Server, said: Any, why: str, options: dict[str, Any]) -> None:
    server.handler = server.says(said)
    [error] = await scored("judge", judge(server, **options))
    assert isinstance(error, RewardError) and why in error.message and "row 7" in error.message


async def test_places_in_what_a_model_wrote_are_text_and_chat_messages_are_one(server: Server) -> None:
    server.handler = server.says(completion("[[1]]"))
    await scored("judge", judge(server, template="{label}: {response} {x}"), completion="{label} {prompt} {0} %s")
    assert server.asked[0]["messages"][0]["content"] == "4: {label} {prompt} {0} %s {x}"
    assert {"{prompt}", "{response}", "{label}", "{low}", "{high}"} <= {f"{{{part.split('}')[0]}}}" for part in TEMPLATE.split("{")[1:]}
    reward = built_in("judge", judge(server, template="{prompt} / {response}"))
    prompt = [{"role": "system", "content": "Be short."}, {"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]}]
    await reward.score(task("4", prompt=prompt), [Episode("4")])
    await close(reward)
    assert server.asked[1]["messages"][0]["content"] == "system: Be short.\n\nuser: 2 + 2? / 4"
