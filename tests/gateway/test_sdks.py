"""Agents that know nothing but an SDK: OpenAI's chats, completions and responses, Anthropic's messages, over the same sessions."""

from __future__ import annotations

import ast
import asyncio
import contextlib
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from streamrl.producers.gateway.anthropic_messages import blocks_of, choice_of, conversation_of, events_of, tools_of
from streamrl.producers.gateway.errors import ApiError
from streamrl.producers.gateway.front import Answer, Call, answered, ask
from streamrl.producers.gateway.messages import Message
from streamrl.producers.gateway.placing import by_messages
from streamrl.producers.gateway.responses import conversation_of as input_of
from streamrl.producers.gateway.responses import output_of
from streamrl.producers.gateway.responses import tools_of as functions_of
from streamrl.producers.gateway.session import Session
from tests.gateway.test_tools import session_of, turn
from tests.support.conversations import TOOLS
from tests.support.gateways import PROMPT, Gateway, gateway, shown, tool_policy
from tests.support.producing import Loop, samples_in

pytestmark = pytest.mark.process  # the SDKs ask `uname` for the machine


def client(gate: Gateway, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gate.url}/v1", api_key=key, max_retries=0)


async def test_the_async_sdk_chats_streams_and_completes(loop: Loop) -> None:
    async with gateway(loop) as gate:
        await loop.issue(1, num_rollouts=2)
        told = await gate.start()
        async with client(gate, told["api_key"]) as sdk:
            [policy, run] = (await sdk.models.list()).data
            assert (policy.id, run.id, (policy.model_extra or {})["max_model_len"]) == ("policy", loop.config.run.name, 128)
            raw = await sdk.chat.completions.with_raw_response.create(
                model="policy", messages=told["messages"], logprobs=True, user="me", n=1, temperature=0, verbosity="low"
            )
            assert raw.headers["X-StreamRL-Ignored"] == "temperature, verbosity"
            answer = raw.parse()
            assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("7", "stop")
            assert answer.usage is not None and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 2)
            assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content is not None
            assert [one.token for one in answer.choices[0].logprobs.content] == ["7", "<|end|>"]
            assert all(-0.01 < one.logprob < 0 for one in answer.choices[0].logprobs.content)
            messages = [*told["messages"], answer.choices[0].message, {"role": "user", "content": "5"}]
            chunks = [
                chunk
                async for chunk in await sdk.chat.completions.create(
                    model="policy", messages=messages, stream=True, stream_options={"include_usage": True}
                )
            ]
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "7"
            assert chunks[-2].choices[0].finish_reason == "stop"
            assert chunks[-1].usage is not None and chunks[-1].usage.prompt_tokens == 12
        await gate.end(told["api_key"], reward=1.0)
        other = await gate.start()
        async with client(gate, other["api_key"]) as sdk:
            first = await sdk.completions.create(model="policy", prompt="<|user|>3+4<|end|><|assistant|>", logprobs=1)
            assert (first.choices[0].text, first.choices[0].finish_reason) == ("7", "stop")
            rest = "<|user|>3+4<|end|><|assistant|>7<|user|>5<|assistant|>"
            text = [chunk.choices[0].text async for chunk in await sdk.completions.create(model="policy", prompt=rest, stream=True)]
            assert "".join(text) == "7"
        await gate.end(other["api_key"])
        chat, text_only = samples_in(await loop.records(1))
    assert shown(loop, chat) == shown(loop, text_only) == "7<|end|>7<|end|>"
    whole = "<|user|>3+4<|end|><|assistant|>7<|end|><|user|>5<|assistant|>7<|end|>"
    assert loop.tokenizer.decode(text_only.tokens.tolist()) == whole, "the stop token that the text lacks is kept"
    assert (chat.reward, text_only.reward) == (1.0, 1.0), "the second is scored by the run's reward"


async def test_the_sync_sdk_finds_its_session_by_the_path(loop: Loop) -> None:
    async with gateway(loop) as gate:
        await loop.issue(1, num_rollouts=1)
        told = await gate.start()

        def agent() -> str:
            with openai.OpenAI(base_url=told["base_url"], api_key="unused") as sdk:
                answer = sdk.chat.completions.create(model=told["model"], messages=told["messages"], temperature=0.5, max_tokens=1)
                with sdk.chat.completions.create(model=told["model"], messages=told["messages"], stream=True) as chunks:
                    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            assert answer.choices[0].finish_reason == "length"
            return text

        assert await asyncio.to_thread(agent) == "7"
        await gate.end(told["api_key"], reward=0.5)
        [sample] = samples_in(await loop.records(1))
    # The first answer was not gone on with, and is not the newest.
    assert (shown(loop, sample), sample.sampling.temperature) == ("7<|end|>", 1.0)


async def test_a_turn_that_is_drawn_otherwise_says_so(loop: Loop) -> None:
    async with gateway(loop) as gate:
        await loop.issue(1, num_rollouts=1)
        told = await gate.start()
        async with client(gate, told["api_key"]) as sdk:
            first = await sdk.chat.completions.create(model="policy", messages=PROMPT, temperature=0.5)
            more = [*PROMPT, first.choices[0].message, {"role": "user", "content": "5"}]
            other = {"top_k": 50, "min_p": 0.01}
            await sdk.chat.completions.create(
                model="policy", messages=more, max_completion_tokens=1, top_p=0.9, logit_bias={"5": 1}, stop="x", extra_body=other
            )
        await gate.end(told["api_key"], reward=1.0)
        [sample] = samples_in(await loop.records(1))
    drawn = {"top_p": 0.9, "top_k": 50, "min_p": 0.01, "stop": ["x"], "logit_bias": {"5": 1.0}}
    assert [turn.sampling for turn in sample.turns] == [{"temperature": 0.5}, drawn]
    assert (sample.finish_reason, sample.status) == ("length", "truncated")


async def test_tokens_go_in_and_out_as_a_training_client_wants_them(loop: Loop) -> None:
    async with gateway(loop, logits=tool_policy(loop)) as gate:
        await loop.issue(1, num_rollouts=1)
        told = await gate.start()
        params = {"temperature": 0, "max_tokens": 8, "logprobs": 1, "skip_special_tokens": False, "stop_token_ids": [9]}
        ids, given = told["prompt_token_ids"], []
        for _ in range(2):
            body = {"model": "policy", "token_ids": ids, "sampling_params": params, "cache_salt": "1"}
            status, answer = await gate.post("/inference/v1/generate", body, gate.key, X_Session_ID=told["api_key"])
            assert status == 200, answer
            [choice] = answer["choices"]
            assert [one["token"] for one in choice["logprobs"]["content"]] == [f"token_id:{token}" for token in choice["token_ids"]]
            assert answer["usage"]["completion_tokens"] == len(choice["token_ids"])
            given += choice["token_ids"]
            ids = [*ids, *choice["token_ids"], *loop.tokenizer.encode("<|user|>5<|end|><|assistant|>")]
        await gate.end(told["api_key"], reward=1.0)
        [sample] = samples_in(await loop.records(1))
    assert sample.tokens[sample.loss_mask == 1].tolist() == given
    assert sample.tokens.tolist() == ids[: len(sample.tokens)]


async def test_errors_are_the_sdks_own(loop: Loop) -> None:
    async with gateway(loop) as gate:
        await loop.issue(1, num_rollouts=1)
        told = await gate.start()
        async with client(gate, "sk-0.0.0123456789abcdef." + "0" * 40) as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.chat.completions.create(model="policy", messages=PROMPT)
        async with client(gate, told["api_key"]) as sdk:
            with pytest.raises(openai.NotFoundError) as unknown:
                await sdk.chat.completions.create(model="gpt-5", messages=PROMPT)
            assert unknown.value.code == "model_not_found"
            with pytest.raises(openai.BadRequestError) as long:
                await sdk.chat.completions.create(model="policy", messages=[*PROMPT, {"role": "user", "content": "1" * 200}])
            assert long.value.code == "context_length_exceeded"
            with pytest.raises(openai.BadRequestError) as prompt:
                await sdk.chat.completions.create(model="policy", messages=[{"role": "user", "content": "1+1"}])
            assert prompt.value.code == "prompt_not_granted"
            with pytest.raises(openai.BadRequestError) as several:
                await sdk.chat.completions.create(model="policy", messages=PROMPT, n=2)
            assert several.value.param == "n"


async def test_the_agent_of_the_documentation_works(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text(encoding="utf-8")
    code = page.partition("```python\n")[2].partition("```")[0]
    imports = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Import)]
    assert {alias.name for node in imports for alias in node.names} == {"os", "openai"}
    async with gateway(loop) as gate:
        await loop.issue(1, num_rollouts=1)
        monkeypatch.setenv("GATEWAY_KEY", gate.key)
        await asyncio.to_thread(exec, code.replace("http://127.0.0.1:8900", gate.url), {})
        [sample] = samples_in(await loop.records(1))
    assert (sample.reward, shown(loop, sample)) == (1.0, "7<|end|>")


async def test_anthropics_sdk_chats_and_streams(loop: Loop) -> None:
    import anthropic  # a second and a half, which those who collect this file need not wait

    async with gateway(loop) as gate:
        await loop.issue(1, num_rollouts=1)
        told = await gate.start()
        async with anthropic.AsyncAnthropic(base_url=gate.url, api_key=told["api_key"], max_retries=0) as sdk:
            messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "3+"}, {"type": "text", "text": "4"}]}]
            answer = await sdk.messages.create(model="policy", messages=messages, max_tokens=4)
            assert (answer.content[0].text, answer.stop_reason) == ("7", "end_turn")  # type: ignore[union-attr]
            assert (answer.usage.input_tokens, answer.usage.output_tokens) == (6, 2)
            messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "5"}]
            async with sdk.messages.stream(model="policy", messages=messages, max_tokens=4) as events:
                assert "".join([text async for text in events.text_stream]) == "7"
                last = await events.get_final_message()
            assert (last.content[0].text, last.usage.output_tokens) == ("7", 2)  # type: ignore[union-attr]
            with pytest.raises(anthropic.BadRequestError, match="top_a"):
                await sdk.messages.create(model="policy", messages=messages, max_tokens=4, extra_body={"top_a": 0.5})
            with pytest.raises(anthropic.NotFoundError) as caught:
                await sdk.messages.create(model="claude", messages=messages, max_tokens=4)
            assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
            counted = await sdk.messages.count_tokens(model="policy", messages=messages[:1], thinking={"type": "adaptive"})
            assert counted.input_tokens == answer.usage.input_tokens
            for wrong in ({"extra_body": {"mcp_servers": [{"type": "url"}]}}, {"tool_choice": {"type": 5}}, {"max_tokens": 0}):
                with pytest.raises(anthropic.BadRequestError):
                    await sdk.messages.create(**{"model": "policy", "messages": messages, "max_tokens": 4, **wrong})
        async with anthropic.AsyncAnthropic(base_url=gate.url, api_key="sk-0", max_retries=0) as stranger:
            with pytest.raises(anthropic.AuthenticationError):
                await stranger.messages.create(model="policy", messages=messages, max_tokens=4)
        await gate.end(told["api_key"], reward=1.0)
        [sample] = samples_in(await loop.records(1))
    assert shown(loop, sample) == "7<|end|>7<|end|>"


async def test_openais_sdk_asks_for_responses(loop: Loop) -> None:
    async with gateway(loop) as gate:
        await loop.issue(1, num_rollouts=1)
        told = await gate.start()
        async with openai.AsyncOpenAI(base_url=told["base_url"], api_key="unused", max_retries=0) as sdk:
            first = await sdk.responses.create(model="policy", input="3+4", max_output_tokens=4, store=False)
            assert (first.output_text, first.status) == ("7", "completed")
            assert first.usage is not None and first.usage.output_tokens == 2
            items: list[Any] = [{"role": "user", "content": "3+4"}, *first.output, {"role": "user", "content": "5"}]
            async with sdk.responses.stream(model="policy", input=items) as events:
                text = "".join([event.delta async for event in events if event.type == "response.output_text.delta"])
                last = await events.get_final_response()
            assert text == last.output_text == "7"
            cut = await sdk.responses.create(model="policy", input=items, max_output_tokens=1)
            assert (cut.status, cut.incomplete_details and cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
            for wrong in ({"previous_response_id": first.id}, {"tools": [{"type": "web_search"}]}, {"conversation": "c"}):
                with pytest.raises(openai.BadRequestError):
                    await sdk.responses.create(**{"model": "policy", "input": items, **wrong})
        await gate.end(told["api_key"], reward=1.0)
        found = samples_in(await loop.records(1))
    assert "7<|end|>7" in "".join(shown(loop, sample) for sample in found)


async def asked(session: Session, messages: list[Message], tools: Any) -> Answer:
    call = Call(session=session, body={}, model="policy")
    place = by_messages(messages, tools, session.rules)
    return await answered(call, ask(call, "x", [m.for_template() for m in messages], place, {}, tools=tools), "msg")


@pytest.mark.parametrize("api", ["messages", "responses"])
async def test_calls_of_tools_come_back_by_their_value_and_keep_their_tokens(api: str) -> None:
    session = await session_of("qwen3", [turn("qwen3", "Look", 2), turn("qwen3", "It is fine", 0)])
    function = TOOLS[0]["function"]
    name, parameters = function["name"], function["parameters"]  # type: ignore[index]
    question = {"role": "user", "content": "2+3?"}
    if api == "messages":
        tools = tools_of({"tools": [{"name": name, "input_schema": parameters}]})
        first = await asked(session, conversation_of({"messages": [question]}), tools)
        blocks = blocks_of(first)
        assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": b["id"], "content": "rain"} for b in blocks if b["type"] == "tool_use"]
        given = [
            question,
            {"role": "assistant", "content": blocks},
            {"role": "user", "content": [*results, {"type": "text", "text": "so?"}]},
        ]
        second = await asked(session, conversation_of({"messages": given}), tools)
        kinds = [event["delta"]["type"] for event in events_of(first) if event["type"] == "content_block_delta"]
        assert kinds == ["thinking_delta", "text_delta", "input_json_delta", "input_json_delta"]
    else:
        tools = functions_of({"tools": [{"type": "function", "name": name, "parameters": parameters, "strict": True}]})
        first = await asked(session, input_of({"input": [question]}), tools)
        output = output_of(first)
        assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "function_call"]
        outputs = [{"type": "function_call_output", "call_id": i["call_id"], "output": "rain"} for i in output if "call_id" in i]
        second = await asked(session, input_of({"input": [question, *output, *outputs, {"role": "user", "content": "so?"}]}), tools)
    assert tools == TOOLS
    kept = [*first.prompt_ids, *first.token_ids]
    assert second.prompt_ids[: len(kept)] == kept
    added = session.rules.rendering.tokenizer.decode(second.prompt_ids[len(kept) :])
    assert added.count("rain") == 2 and added.index("rain") < added.index("so?")


WRONG: list[Any] = [
    None,
    [],
    [5],
    [{"role": "tool", "content": "x"}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": [{"type": "image", "source": {}}]}],
    [{"role": "user", "content": "x", "name": "me"}],
    [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": 5}]}],
    [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "["}],
    [{"type": "item_reference", "id": "a"}],
    [{"type": ["message"], "role": "user", "content": "x"}],
    [{"role": "user", "content": "x"}] * 10_001,
]


@pytest.mark.parametrize("given", WRONG, ids=range(len(WRONG)))
def test_messages_of_another_form_are_refused_by_name(given: Any) -> None:
    for read, name in ((conversation_of, "messages"), (input_of, "input")):
        with pytest.raises(ApiError) as caught:
            read({name: given})
        assert caught.value.status == 400 and caught.value.param.startswith(name)


WORDS = """type role content text tool_use tool_result tool_use_id input name id thinking user assistant function_call function_call_output
call_id arguments output reasoning message input_text output_text {}"""
words = st.sampled_from(WORDS.split())
bodies = st.recursive(
    st.none() | st.booleans() | st.integers() | words, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=4)
)


@settings(max_examples=300, deadline=None)
@drawn(bodies, bodies)
def test_any_json_is_read_or_refused(messages: Any, tools: Any) -> None:
    for read in (
        lambda: conversation_of({"messages": messages, "system": tools}),
        lambda: input_of({"input": messages, "instructions": tools}),
        lambda: tools_of({"tools": tools}),
        lambda: functions_of({"tools": tools}),
        lambda: choice_of({"tool_choice": tools, "thinking": messages}),
    ):
        with contextlib.suppress(ApiError):
            read()
