"""An agent that means harm: each of its tricks gets a 4xx in the API's form, and costs nobody else anything."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import logging
import resource
import zlib
from typing import Any

import msgspec
import pytest

from streamrl.producers.gateway import guards, server, session, verbs
from tests.support.gateways import PROMPT, Gateway, gateway, one_session, shown
from tests.support.processes import until
from tests.support.producing import Loop, samples_in, tombstones_in
from tests.support.raw_http import chunked, connected, head, status, told

pytestmark = pytest.mark.whole

CHAT = "/v1/chat/completions"
CALL: dict[str, Any] = {"model": "policy", "messages": PROMPT}
BODY = msgspec.json.encode(CALL)
MIB = 1 << 20

VALUES: list[tuple[str, bytes]] = [
    ("/rl/set_reward", b'{"reward": NaN}'),
    ("/rl/set_reward", b'{"reward": Infinity}'),
    ("/rl/set_reward", b'{"reward": 1e400}'),
    ("/rl/set_reward", b'{"reward": -1e400}'),
    ("/rl/set_reward", b'{"reward": 1' + b"0" * 400 + b"}"),
    ("/rl/set_reward", b'{"reward": 1' + b"0" * 100_000 + b"}"),
    ("/rl/set_reward", b'{"reward": 1, "parts": {"a": 1e999}}'),
    ("/rl/set_reward", b'{"reward": 1, "parts": {"\\ud800": 1}}'),
    ("/rl/set_reward", b'{"reward": 1, "parts": {' + b",".join(b'"%d": 1' % n for n in range(300)) + b"}}"),
    ("/rl/end_session", b'{"failed": "\\ud800"}'),
    (CHAT, b'{"model": "policy", "messages": [{"role": "user", "content": "\\ud800"}]}'),
    (CHAT, b'{"model": "policy", "messages": [{"role": "user", "content": "\xff"}]}'),
    (CHAT, b'{"model": "\\ud800", "messages": []}'),
    (CHAT, BODY[:-1] + b', "max_tokens": 1' + b"0" * 5000 + b"}"),
    (CHAT, BODY[:-1] + b', "temperature": 1' + b"0" * 400 + b"}"),
    (CHAT, BODY[:-1] + b', "seed": "7"}'),
    (CHAT, BODY[:-1] + b', "seed": 1' + b"0" * 5000 + b"}"),
    (CHAT, BODY[:-1] + b', "stop": ' + b"[" * 500 + b"]" * 500 + b"}"),
    (CHAT, BODY[:-1] + b', "\\u0000\\n": 1}'),
    (CHAT, BODY[:-1] + b', "tools": [{"type": "function", "function": {"name": "f", "x": ' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}}]}"),
    ("/v1/completions", b'{"model": "policy", "prompt": "\\ud800"}'),
    ("/v1/completions", b'{"model": "policy", "prompt": [1' + b"0" * 30 + b"]}"),
    ("/v1/completions", b'{"model": "policy", "prompt": [1e3]}'),
    ("/v1/completions", b'{"model": "policy", "prompt": [' + b",".join([b"1"] * 100_000) + b"]}"),
    ("/inference/v1/generate", b'{"model": "policy", "token_ids": [2147483647]}'),
    ("/inference/v1/generate", b'{"model": "policy", "token_ids": [true]}'),
]
"""Values that JSON can say, or nearly."""


async def test_values_that_no_field_can_have(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    async with one_session(loop) as (gate, key):
        wrong = []
        for path, body in VALUES:
            got, answer = await gate.post(path, body, key)
            if not 400 <= got < 500 or not answer["error"]["message"].startswith("expected") or len(str(answer)) > 1500:
                wrong.append((path, body[:90], got, str(answer)[:200]))
        assert wrong == []
        await still_serves(gate, key)
    assert "event=gateway_failed" not in caplog.text


async def still_serves(gate: Gateway, key: str) -> None:
    """The session is as it was, and its sample is what the engine gave."""
    loop = gate.loop
    assert (await gate.chat(key, PROMPT))["id"] == "chatcmpl-0.0.0"
    await gate.end(key, reward=1.0)
    [sample] = samples_in(await loop.records(1))
    assert (sample.reward, shown(loop, sample), len(sample.tokens)) == (1.0, "7<|end|>", 8)


FORGED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {**CALL, "id": "chatcmpl-0.1.0"}),
    (CHAT, {**CALL, "version": {"epoch": 0, "number": 9}}),
    (CHAT, {**CALL, "session_id": "0.1"}),
    (CHAT, {**CALL, "task": 1, "rollout": 0}),
    (CHAT, {**CALL, "messages": [*PROMPT, {"role": "assistant", "content": "7", "logprobs": [0.0]}, PROMPT[0]]}),
    (CHAT, {**CALL, "messages": [*PROMPT, {"role": "assistant", "content": "7", "token_ids": [1, 2]}, PROMPT[0]]}),
    (CHAT, {**CALL, "logprobs": [0.0, -1.0]}),
    (CHAT, {**CALL, "engine": "table-9"}),
    (CHAT, {**CALL, "min_version": {"epoch": 0, "number": 0}}),
    ("/v1/completions", {"model": "policy", "prompt": "7", "completion": "8", "token_logprobs": [0.0]}),
    ("/inference/v1/generate", {"model": "policy", "token_ids": [1], "output_token_logprobs": [[0.0, 1]]}),
    ("/rl/set_reward", {"reward": 1.0, "session_id": "0.1"}),
    ("/rl/set_reward", {"reward": 1.0, "task": 0, "rollout": 1}),
    ("/rl/end_session", {"session_id": "0.1"}),
    ("/rl/end_session", {"reason": "timeout"}),
]
"""What an agent would like to say of its turns and of other sessions, and never can."""


async def test_what_is_forged_in_bodies_is_refused_by_name(loop: Loop) -> None:
    async with gateway(loop) as gate:
        await loop.issue(1, num_rollouts=2)
        key, other = [(await gate.start())["api_key"] for _ in range(2)]
        for path, body in FORGED:
            got, answer = await gate.post(path, body, key)
            assert got == 400 and answer["error"]["param"], (path, body, answer)
        # Headers name a session too: the key that opens the request counts, and where two do, the first.
        status_of, answer = await gate.post(CHAT, CALL, key, X_Session_ID=other, X_Api_Key="sk-0.1.0.0")
        assert (status_of, answer["id"]) == (200, "chatcmpl-0.0.0")
        await gate.end(key, reward=0.0)
        await gate.end(other)
        records = await loop.records(2)
    assert [(s.rollout, s.reward) for s in samples_in(records)] == [(0, 0.0)]
    assert [stone.rollout for stone in tombstones_in(records)] == [1]


async def test_bodies_without_end_and_packed_ones_are_not_read(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LINGER_S", 0.2)
    async with one_session(loop, max_body_bytes=MIB) as (gate, key):
        filler = b"x" * 65536
        json = "Content-Type: application/json"

        async def sent(*lines: str, pieces: Any = (), of: str = key) -> int:
            return status(await told(gate.url, head(CHAT, of, json, *lines), pieces))

        many = 1024  # pieces of 64 MiB
        assert await sent(f"Content-Length: {1 << 30}", pieces=(filler for _ in range(many))) == 413
        assert await sent("Transfer-Encoding: chunked", pieces=chunked(filler for _ in range(many))) == 413
        assert await sent(f"Content-Length: {1 << 80}") == 400
        assert await sent("Content-Length: -1") == 400
        assert await sent(f"Content-Length: {1 << 30}", pieces=(filler for _ in range(many)), of="sk-0.0.0") == 401
        for packing, bomb in (("gzip", gzip.compress(bytes(8 * MIB))), ("deflate", zlib.compress(bytes(8 * MIB))), ("br", b"x")):
            assert await sent(f"Content-Encoding: {packing}", f"Content-Length: {len(bomb)}", pieces=[bomb]) == 415
        # A body that is shorter than it says ends with its connection.
        reader, writer = await connected(gate.url)
        writer.write(head(CHAT, key, json, "Content-Length: 5000") + BODY)
        await writer.drain()
        writer.close()
        assert await reader.read() == b""
        # One of many values takes more room than its bytes.
        values = BODY[:-1] + b', "metadata": [' + b"[]," * 300_000 + b"1]}"
        assert await sent(f"Content-Length: {len(values)}", pieces=[values]) == 200


async def test_who_says_nothing_is_closed_and_keeps_nobody_out(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that bring nothing, heads and bodies that trickle, and more connections than there is room for."""
    monkeypatch.setattr(server, "SILENCE_S", 0.4)
    monkeypatch.setattr(server, "BODY_S", 0.4)
    monkeypatch.setattr(guards, "_OTHER_FILES", resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 64)
    async with one_session(loop) as (gate, key), contextlib.AsyncExitStack() as opened:

        async def trickle(begun: bytes, more: bytes = b"x") -> bytes:
            reader, writer = await connected(gate.url)
            opened.callback(writer.close)
            answer = asyncio.create_task(reader.read())
            with contextlib.suppress(ConnectionError):
                writer.write(begun)
                while not answer.done():
                    writer.write(more)
                    await writer.drain()
                    await asyncio.sleep(0.05)
                return await answer
            return b""

        async with asyncio.timeout(120):
            nothing, of_head, of_body = await asyncio.gather(
                trickle(b"", b""), trickle(head(CHAT, key)[:-2] + b"X-More: "), trickle(head(CHAT, key, "Content-Length: 1000"), b"")
            )
        assert nothing == of_head == b"", "aiohttp closes it without a word"
        assert status(of_body) == 408
        monkeypatch.setattr(server, "SILENCE_S", 60.0)
        # Far more than there is room for, each silent: whoever comes last is served.
        crowd = []
        for _ in range(300):
            reader, writer = await connected(gate.url)
            opened.callback(writer.close)
            crowd.append(reader)
        assert (await gate.chat(key, PROMPT))["id"] == "chatcmpl-0.0.0"
        await until(lambda: sum(reader.at_eof() for reader in crowd) > 200)


SMUGGLED = [
    b"POST %s HTTP/1.1\r\nHost: g\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" % CHAT.encode(),
    b"POST %s HTTP/1.1\r\nHost: g\r\nContent-Length: 4\r\nContent-Length: 90\r\n\r\n{}{}" % CHAT.encode(),
    b"POST %s HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" % CHAT.encode(),
    b"POST %s HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n" % CHAT.encode(),
    b"POST %s HTTP/1.1\r\nHost: g\r\nX: a\x00b\r\n\r\n" % CHAT.encode(),
    b"POST %s HTTP/1.1\r\nHost: g\r\nAuthorization : Bearer KEY\r\n\r\n" % CHAT.encode(),
    b"POST %s HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer KEY\r\n\tfolded\x01\r\n\r\n" % CHAT.encode(),
    b"POST %s HTTP/9.9\r\nHost: g\r\n\r\n" % CHAT.encode(),
    b"P\x00ST / HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"POST %s HTTP/1.1\r\nHost: g\r\n%b\r\n" % (CHAT.encode(), b"X: y\r\n" * 500),
    b"POST %s HTTP/1.1\r\nHost: g\r\nX: %b\r\n\r\n" % (CHAT.encode(), b"y" * 100_000),
    b"GET /%b HTTP/1.1\r\nHost: g\r\n\r\n" % (b"a" * 100_000),
]
"""Heads that two servers may read differently, or that none can read. `KEY` stands for a session's key."""
PATHS = [
    "/sessions/KEY/../../rl/start_session",
    "/sessions/KEY/%2e%2e/%2e%2e/rl/start_session",
    "/sessions/KEY/v1/../../../etc/passwd",
    "/sessions/KEY%00/v1/chat/completions",
    "/sessions/KEY%0d%0aX-Y:%20z/v1/chat/completions",
    "/sessions//v1/chat/completions",
    "//v1/chat/completions",
    "/v1/chat/completions/",
    "/V1/CHAT/COMPLETIONS",
    "http://elsewhere/rl/start_session",
    "/rl/start_session;x=y",
    "*",
]


async def test_heads_and_paths_that_play_tricks(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with one_session(loop) as (gate, key):
        for sent in SMUGGLED:
            answer = await told(gate.url, sent.replace(b"KEY", key.encode()) + b"GET /health HTTP/1.1\r\nHost: g\r\n\r\n")
            assert (400 <= status(answer) < 500) or answer == b"", (sent[:100], answer[:200])
            assert b'"ok"' not in answer, "what stands behind it is no request"
        for path in PATHS:
            answer = await told(gate.url, head(path.replace("KEY", key), "sk-0.0.0", "Content-Length: 2"), [b"{}"])
            assert status(answer) in (400, 401, 404, 405), (path, answer[:300])
            assert b"X-Y" not in answer.partition(b"\r\n\r\n")[0]
        for method in ("GET", "PUT", "DELETE", "OPTIONS", "CONNECT", "TRACE", "HEAD", "BREW"):
            answer = await told(gate.url, head(CHAT, key, method=method))
            assert 400 <= status(answer) < 500, (method, answer[:200])
        # A name of the agent's choosing in what it is told is for itself only, and is no header.
        answer = await told(
            gate.url, head("/rl/start_session", gate.key, "Content-Length: 14").replace(b"gateway", b"x y") + b'{"wait_s": 0.0}'
        )
        assert status(answer) in (400, 429)
        status_of, refusal = await gate.post(CHAT, CALL, key, Idempotency_Key="k" * 300)
        assert status_of == 400 and refusal["error"]["param"] == "Idempotency-Key"
        await gate.post("/rl/end_session", {"failed": "x\n2026-11-25 ERROR event=forged\u2028event=forged\x1b[2J"}, key)
        await loop.records(1)
    written = [record.getMessage() for record in caplog.records]
    assert not [line for line in written if "\nevent=forged" in line or "\n2026" in line or "\x1b" in line or "\u2028" in line]
    leaked = [line[:200] for line in written if key in line or gate.key in line]
    assert leaked == []
    assert "event=gateway_failed" not in caplog.text


async def test_a_million_of_anything_is_one_sessions_own_trouble(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Branches, rewards, calls at a time, bytes: what is refused is refused to that session, and others do not notice."""
    async with gateway(loop, max_turns=40, max_calls=8) as gate:
        await loop.issue(1, num_rollouts=2)
        key, other = [(await gate.start())["api_key"] for _ in range(2)]
        codes = set()
        for number in range(60):
            body = {**CALL, "messages": [*PROMPT, {"role": "user", "content": str(number)}]}
            codes.add((got := await gate.post(CHAT, body, key))[0])
        assert codes == {200, 400} and got[1]["error"]["code"] == "too_many_turns"
        codes = set()
        for number in range(60):
            codes.add((got := await gate.post("/rl/set_reward", {"reward": number}, key))[0])
        assert codes == {200, 400} and got[1]["error"]["code"] == "too_many_rewards"
        # As many at a time as it may have, which bring no body: the next is told so, and who is another is not.
        waiting = []
        for _ in range(8):
            _, writer = await connected(gate.url)
            writer.write(head(CHAT, key, "Content-Length: 1000"))
            await writer.drain()
            waiting.append(writer)
        while (got := await gate.post(CHAT, CALL, key))[0] != 429:
            await asyncio.sleep(0.01)
        assert got[1]["error"]["code"] == "busy"
        assert (await gate.chat(other, PROMPT))["id"] == "chatcmpl-0.1.0"
        for writer in waiting:
            writer.close()
        while (await gate.post("/rl/set_reward", {}, key))[0] == 429:
            await asyncio.sleep(0.01)
        monkeypatch.setattr(session, "ENTRY_BYTES", 1 << 28)
        await gate.chat(other, [*PROMPT, {"role": "user", "content": "1"}])
        status_of, refusal = await gate.post(CHAT, {**CALL, "messages": [*PROMPT, {"role": "user", "content": "2"}]}, other)
        assert (status_of, refusal["error"]["code"]) == (400, "too_many_turns")
        await gate.end(other, reward=0.5)
        monkeypatch.setattr(verbs, "MAX_LATE", 2)
        await gate.post("/rl/end_session", {}, key)
        await loop.records(1)
        late = [(await gate.post("/rl/set_reward", {"reward": 1.0}, key))[0] for _ in range(4)]
        samples = samples_in(await loop.records(1))
        assert late == [200, 200, 400, 400]
        assert {(s.rollout, s.reward) for s in samples} == {(0, 39.0), (1, 0.5)}
