"""What is refused, in OpenAI's form of an error, and never as a failure of the gateway."""

from __future__ import annotations

from typing import Any

from streamrl.producers.gateway.keys import Keys
from tests.support.gateways import PROMPT, gateway, one_session
from tests.support.producing import Loop

CHAT = {"model": "policy", "messages": PROMPT}
DEEP = b'{"model": "policy", "messages": ' + b"[" * 20_000 + b"]" * 20_000 + b"}"

WRONG_BODIES: list[tuple[Any, int, str]] = [
    (b"{", 400, ""),
    (b"\xff\xfe", 400, ""),
    (b"[]", 400, ""),
    (b"", 400, ""),
    (DEEP, 400, ""),
    ({}, 404, "model"),
    ({"model": ["policy"], "messages": PROMPT}, 404, "model"),
    ({"model": "policy"}, 400, "messages"),
    ({**CHAT, "messages": []}, 400, "messages"),
    ({**CHAT, "messages": "hello"}, 400, "messages"),
    ({**CHAT, "messages": [1]}, 400, "messages[0]"),
    ({**CHAT, "messages": [{"role": "pirate", "content": "arr"}]}, 400, "messages[0].role"),
    ({**CHAT, "messages": [*PROMPT, {"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[1].content[0]"),
    ({**CHAT, "messages": [*PROMPT, {"role": "user", "content": 7}]}, 400, "messages[1].content"),
    ({**CHAT, "messages": [*PROMPT, {"role": "user", "content": "x", "weight": 0}]}, 400, "messages[1].weight"),
    ({**CHAT, "messages": [*PROMPT, {"role": "assistant", "content": "x"}]}, 400, "messages"),
    ({**CHAT, "messages": [*PROMPT, {"role": "user", "content": "", "tool_calls": [{}]}]}, 400, "messages[1].tool_calls"),
    (
        {**CHAT, "messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        400,
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({**CHAT, "n": 2}, 400, "n"),
    ({**CHAT, "temperature": -1}, 400, "temperature"),
    ({**CHAT, "temperature": 1e300}, 400, "temperature"),
    ({**CHAT, "temperature": "hot"}, 400, "temperature"),
    ({**CHAT, "temperature": 10**400}, 400, "temperature"),
    ({**CHAT, "stop_token_ids": [10**400]}, 400, "stop_token_ids"),
    ({**CHAT, "top_p": 1.5}, 400, "top_p"),
    ({**CHAT, "logit_bias": {"5000": 10}}, 400, "logit_bias"),
    ({**CHAT, "logit_bias": {"x": 10}}, 400, "logit_bias"),
    ({**CHAT, "top_k": 0}, 400, "top_k"),
    ({**CHAT, "max_tokens": 0}, 400, "max_tokens"),
    ({**CHAT, "seed": "x"}, 400, "seed"),
    ({**CHAT, "chat_template_kwargs": {"enable_thinking": False}}, 400, "chat_template_kwargs.enable_thinking"),
    ({**CHAT, "chat_template_kwargs": [1]}, 400, "chat_template_kwargs"),
    ({**CHAT, "continue_final_message": True}, 400, "continue_final_message"),
    ({**CHAT, "add_generation_prompt": False}, 400, "add_generation_prompt"),
    ({**CHAT, "functions": [{"name": "f"}]}, 400, "functions"),
    ({**CHAT, "web_search_options": {}}, 400, "web_search_options"),
    ({**CHAT, "modalities": ["text", "audio"]}, 400, "modalities"),
    ({**CHAT, "messages": [*PROMPT, {"role": "assistant", "function_call": {"name": "f"}}]}, 400, "messages[1].function_call"),
    ({**CHAT, "messages": [*PROMPT, {"role": "assistant", "audio": {"id": "a"}}]}, 400, "messages[1].audio"),
    ({**CHAT, "logit_bias": {"5": 1000}}, 400, "logit_bias"),
    ({**CHAT, "presence_penalty": 3}, 400, "presence_penalty"),
    ({**CHAT, "regex": "[0-9]"}, 400, "regex"),
    ({**CHAT, "stop": [""]}, 400, "stop"),
    ({**CHAT, "response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, 400, "json_schema"),
    ({**CHAT, "response_format": {"type": "grammar"}}, 400, "response_format"),
    ({**CHAT, "tools": [{"type": "retrieval"}]}, 400, "tools[0]"),
    ({**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "messages"),
    ({**CHAT, "tool_choice": 5}, 400, "tool_choice"),
    ({**CHAT, "parallel_tool_calls": "no"}, 400, "parallel_tool_calls"),
    ({**CHAT, "top_logprobs": 5, "logprobs": True}, 400, "top_logprobs"),
    ({**CHAT, "logprobs": 5}, 400, "logprobs"),
    ({**CHAT, "stream": "yes"}, 400, "stream"),
]


async def test_calls_that_cannot_be_answered_name_what_is_wrong(loop: Loop) -> None:
    async with one_session(loop, max_body_bytes=65_536) as (gate, key):
        for body, status, param in WRONG_BODIES:
            got, answer = await gate.post("/v1/chat/completions", body, key)
            error = answer["error"]
            assert (got, error["param"] or "") == (status, param), (body, answer)
            assert error["message"].startswith("expected") and error["type"] in ("invalid_request_error", "not_found_error")
        # None of them has touched the session.
        assert (await gate.chat(key, PROMPT))["id"] == "chatcmpl-0.0.0"
        for path, body, param in (
            ("/v1/completions", {"model": "policy", "prompt": [[1], [2]]}, "prompt"),
            ("/v1/completions", {"model": "policy", "prompt": ""}, "prompt"),
            ("/v1/completions", {"model": "policy", "prompt": "7", "echo": True}, "echo"),
            ("/v1/responses", {"model": "policy", "input": "7", "top_logprobs": 2}, "top_logprobs"),
            ("/v1/responses", {"model": "policy", "input": "7", "include": ["message.output_text.logprobs"]}, "include"),
            ("/v1/responses", {"model": "policy", "input": "7", "background": True}, "background"),
            ("/inference/v1/generate", {"model": "policy", "token_ids": [-1]}, "token_ids"),
            ("/inference/v1/generate", {"model": "policy", "token_ids": [1]}, "token_ids"),
            ("/inference/v1/generate", {"model": "policy", "token_ids": [1], "sampling_params": {"beam": 2}}, "sampling_params.beam"),
            ("/inference/v1/generate", {"model": "policy", "token_ids": [1], "lora": "x"}, "lora"),
            ("/rl/set_reward", {}, "reward"),
            ("/rl/set_reward", {"reward": "1"}, "reward"),
            ("/rl/set_reward", {"reward": True}, "reward"),
            ("/rl/set_reward", {"reward": 10**400}, "reward"),
            ("/rl/set_reward", {"reward": 1, "parts": {"a": "b"}}, "parts.a"),
            ("/rl/set_reward", {"reward": 1, "interaction_id": "x"}, "interaction_id"),
            ("/rl/set_reward", {"reward": 1, "why": "x"}, "why"),
            ("/rl/end_session", {"failed": 1}, "failed"),
        ):
            status, answer = await gate.post(path, body, key)
            assert (status, answer["error"]["param"]) == (400, param), (path, body, answer)
        for number in (b"1e999", b"NaN", b"-1e31"):
            assert (await gate.post("/rl/set_reward", b'{"reward": ' + number + b"}", key))[0] == 400
        for body, param in (({"wait_s": -1}, "wait_s"), ({"prompt": "x"}, "prompt"), ({"api_key": "x"}, "api_key")):
            status, answer = await gate.post("/rl/start_session", body, gate.key)
            assert (status, answer["error"]["param"]) == (400, param)
        status, answer = await gate.post("/rl/start_session", {"wait_s": 0.1}, gate.key)
        assert (status, answer["error"]["code"]) == (429, "no_task")
        status, answer = await gate.post("/v1/embeddings", CHAT, key)
        assert status == 404 and answer["error"]["type"] == "not_found_error"
        status, answer = await gate.post("/v1/chat/completions", b"x" * 70_000, key)
        assert (status, answer["error"]["code"]) == (413, "body_too_large")


async def test_keys_open_their_own_session_only(loop: Loop) -> None:
    async with gateway(loop) as gate:
        await loop.issue(2, num_rollouts=1)
        told = await gate.start()
        key = told["api_key"]
        wrong = [
            "",
            "sk-x",
            gate.key,
            key[:-1] + ("0" if key[-1] != "0" else "1"),
            key.replace("sk-0.0", "sk-1.0"),
            key.replace("sk-0.0", "sk-0.1"),
            Keys("another key", loop.config.run.name).make(0, 0, key.split(".")[2]),
            Keys(gate.key, "another-run").make(0, 0, key.split(".")[2]),
            Keys(gate.key, loop.config.run.name).make(0, 0, "0" * 16),  # signed, and given to nobody
        ]
        for path in ("/v1/chat/completions", "/rl/end_session", "/inference/v1/generate"):
            for other in wrong:
                status, answer = await gate.post(path, CHAT if path != "/rl/end_session" else {}, other)
                assert (status, answer["error"]["code"]) == (401, "invalid_api_key"), (path, other, answer)
        assert (await gate.post("/rl/start_session", {}, key))[0] == 401
        assert (await gate.post(f"/sessions/{wrong[3]}/v1/chat/completions", CHAT))[0] == 401
        assert (await gate.chat(key, PROMPT))["id"] == "chatcmpl-0.0.0"


async def test_prompts_of_the_agents_own_need_the_runs_consent(loop: Loop) -> None:
    async with one_session(loop, prompts="any") as (gate, key):
        own = [{"role": "system", "content": "1"}, {"role": "user", "content": "2"}]
        await gate.chat(key, own)
        # The task's prompt, and more behind it, is no prompt of the agent's own.
        await gate.chat(key, [*PROMPT, {"role": "user", "content": "2"}])
        await gate.end(key, reward=1.0)
        message = (await loop.records(1))[0]
        assert message.subject.split(".")[1] == "samples"
