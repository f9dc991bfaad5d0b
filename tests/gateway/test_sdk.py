"""Agents that know nothing but OpenAI's SDK."""

from __future__ import annotations

import asyncio
from pathlib import Path

import openai
import pytest

from tests.support.gateways import PROMPT, Gateway, gateway, shown, tool_policy
from tests.support.producing import Loop, samples_in

pytestmark = pytest.mark.process  # the SDK asks `uname` for the machine


def client(gate: Gateway, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gate.url}/v1", api_key=key, max_retries=0)


async def test_the_async_sdk_chats_streams_and_completes(loop: Loop) -> None:
    async with gateway(loop) as gate:
        await loop.issue(1, num_rollouts=2)
        told = await gate.start()
        async with client(gate, told["api_key"]) as sdk:
            [policy, run] = (await sdk.models.list()).data
            assert (policy.id, run.id, (policy.model_extra or {})["max_model_len"]) == ("policy", loop.config.run.name, 128)
            answer = await sdk.chat.completions.create(model="policy", messages=told["messages"], logprobs=True, user="me", n=1)
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
        params = {"temperature": 1.0, "max_tokens": 8, "logprobs": 1, "skip_special_tokens": False, "stop_token_ids": [9]}
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
    async with gateway(loop) as gate:
        await loop.issue(1, num_rollouts=1)
        monkeypatch.setenv("GATEWAY_KEY", gate.key)
        await asyncio.to_thread(exec, code.replace("http://127.0.0.1:8900", gate.url), {})
        [sample] = samples_in(await loop.records(1))
    assert (sample.reward, shown(loop, sample)) == (1.0, "7<|end|>")
