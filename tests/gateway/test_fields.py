"""The fields that stock harnesses send are taken, ignored or refused as the one table of them says."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.producers.gateway.anthropic_messages import anthropic_messages, choice_of, count_tokens
from streamrl.producers.gateway.anthropic_messages import format_asked as messages_format
from streamrl.producers.gateway.blocks import format_of
from streamrl.producers.gateway.chat_completions import chat_completions
from streamrl.producers.gateway.entries import Ended
from streamrl.producers.gateway.episodes import episodes_of
from streamrl.producers.gateway.errors import ApiError
from streamrl.producers.gateway.fields import CHAT, MESSAGES, RESPONSES, TABLES, Fields, ignored, sampled
from streamrl.producers.gateway.front import Call, given_back
from streamrl.producers.gateway.responses import format_asked as responses_format
from streamrl.producers.gateway.responses import responses
from streamrl.producers.gateway.server import APIS
from streamrl.producers.gateway.session import Session
from streamrl.producers.gateway.wire_messages import plain_tool
from tests.gateway.test_tools import PROMPT, session_of, turn
from tests.support.conversations import TOOLS
from tests.support.errors import raises

FUNCTION: Any = TOOLS[0]["function"]
FORMS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "wire_forms.json").read_text(encoding="utf-8"))
"""Two calls of each harness that docs/gateway.md names, with a tool between."""
CALLED = [turn("qwen3", "Look", 2), turn("qwen3", "It is fine", 0)]
DECIDED: list[tuple[Fields, dict[str, Any], list[str]]] = [
    (CHAT, {"temperature": 0, "n": 1, "verbosity": "low", "reasoning_effort": "high"}, ["temperature", "verbosity", "reasoning_effort"]),
    (CHAT, {"tool_choice": "auto", "parallel_tool_calls": False, "chat_template_kwargs": {}, "store": True, "top_logprobs": 0}, []),
    (CHAT, {"tool_choice": "none"}, []),
    (CHAT, {"tool_choice": "required"}, ["tool_choice"]),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": "look"}}}, ["tool_choice"]),
    (CHAT, {"continue_final_message": False, "add_generation_prompt": True, "include_reasoning": True, "modalities": ["text"]}, []),
    (
        MESSAGES,
        {"thinking": {"type": "enabled", "budget_tokens": 1024}, "context_management": {"edits": [{"type": "x"}]}},
        ["thinking", "context_management"],
    ),
    (MESSAGES, {"thinking": {"type": "disabled"}, "context_management": {"edits": []}, "tool_choice": {"type": "none"}}, []),
    (MESSAGES, {"tool_choice": {"type": "any"}, "output_config": {"effort": "high"}}, ["tool_choice", "output_config"]),
    (
        RESPONSES,
        {"reasoning": {"effort": "low", "summary": "auto"}, "text": {"verbosity": "low"}, "truncation": "auto"},
        ["reasoning", "text", "truncation"],
    ),
    (RESPONSES, {"reasoning": {}, "background": False, "stream_options": {"include_obfuscation": False}, "truncation": "disabled"}, []),
]


@pytest.mark.parametrize(("known", "body", "names"), DECIDED)
def test_fields_without_an_effect_are_taken_and_those_that_ask_for_one_are_named(
    known: Fields, body: dict[str, Any], names: list[str]
) -> None:
    assert sampled(body, known) == {}
    assert ignored(body, known) == names


@pytest.mark.parametrize("api", TABLES)
def test_a_null_is_a_field_that_was_left_out(api: str) -> None:
    nothing = dict.fromkeys([*TABLES[api], "a field of next year"])
    assert sampled(nothing, TABLES[api]) == {} and ignored(nothing, TABLES[api]) == []


@pytest.mark.parametrize("api", TABLES)
def test_a_refused_field_is_named_with_what_is_to_be_done(api: str) -> None:
    for name, field in TABLES[api].items():
        if field.verdict == "refused":
            with raises(ApiError, param=name, code="unsupported_parameter", status=400) as caught:
                sampled({name: "a value of next year"}, TABLES[api])
            assert caught.value.hint
            for value in field.neutral:
                assert sampled({name: value}, TABLES[api]) == {}


words = st.sampled_from(["type", "auto", "none", "tool", "format", "schema", "json_schema", "text", "effort", "edits", "function"])
values = st.recursive(
    st.none() | st.booleans() | st.integers(0, 1) | words,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=3),
)


@settings(max_examples=100, deadline=None)
@given(values)
def test_any_value_of_a_field_is_decided(value: Any) -> None:
    for known in TABLES.values():
        for name in known:
            ignored({name: value}, known)
            with contextlib.suppress(ApiError):
                sampled({name: value}, known)
    for read in (
        lambda: given_back(value, value),
        lambda: choice_of({"tool_choice": value}),
        lambda: format_of(value, value, value, "x"),
        lambda: messages_format({"output_config": value, "output_format": value}),
        lambda: responses_format({"text": value}),
        lambda: plain_tool(value),
    ):
        with contextlib.suppress(ApiError):
            read()


async def asked(session: Session, api: Any, **body: Any) -> dict[str, Any]:
    request: Any = None
    answer = await api(Call(session=session, body={"model": "policy", **body}, model="policy"), request)
    return msgspec.json.decode(answer.body)


@pytest.mark.parametrize(
    ("choice", "num_calls"),
    [
        ({}, 2),
        ({"tool_choice": "required"}, 2),
        ({"parallel_tool_calls": False}, 1),
        ({"tool_choice": "none"}, 0),
        ({"tool_choice": "none", "parallel_tool_calls": False}, 0),
    ],
)
async def test_a_turn_is_known_by_the_calls_of_it_that_were_given_back(choice: dict[str, Any], num_calls: int) -> None:
    session = await session_of("qwen3", CALLED)
    first = await asked(session, chat_completions, messages=PROMPT, tools=TOOLS, **choice)
    message = first["choices"][0]["message"]
    assert len(message.get("tool_calls", [])) == num_calls
    assert first["choices"][0]["finish_reason"] == ("tool_calls" if num_calls else "stop")
    assert message["content"].count("<tool_call>") == (2 if "none" in choice.values() else 0)
    replies = [{"role": "tool", "tool_call_id": call["id"], "content": "rain"} for call in message.get("tool_calls", [])]
    more = [*PROMPT, message, *(replies or [{"role": "user", "content": "so?"}])]
    await asked(session, chat_completions, messages=more, tools=TOOLS, **choice)
    await session.end(Ended())
    [episode], abandoned = episodes_of(session)
    assert abandoned == 0 and len(episode.turns) == 2


async def test_anthropics_and_openais_words_for_one_call_mean_the_same() -> None:
    for api, body in (
        (anthropic_messages, {"max_tokens": 400, "tools": [{"name": "look", "input_schema": FUNCTION["parameters"]}]}),
        (responses, {"tools": [{"type": "function", "strict": True, **FUNCTION}]}),
    ):
        session = await session_of("qwen3", CALLED)
        if api is responses:
            answer = await asked(session, api, input=PROMPT, parallel_tool_calls=False, **body)
            assert [item["type"] for item in answer["output"]] == ["reasoning", "message", "function_call"]
        else:
            choice = {"type": "auto", "disable_parallel_tool_use": True}
            answer = await asked(session, api, messages=PROMPT, tool_choice=choice, **body)
            assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use"]
            counted = await asked(session, count_tokens, messages=PROMPT, tools=body["tools"])
            assert counted == {"input_tokens": answer["usage"]["input_tokens"]}


async def test_variables_of_the_template_are_taken_at_the_values_of_the_task() -> None:
    session = await session_of("qwen3", CALLED, template_kwargs={"enable_thinking": False})
    await asked(session, chat_completions, messages=PROMPT, tools=TOOLS, chat_template_kwargs={"enable_thinking": False})
    for wrong in ({"enable_thinking": True}, {"other": 1}):
        with raises(ApiError, param=f"chat_template_kwargs.{next(iter(wrong))}"):
            await asked(session, chat_completions, messages=PROMPT, tools=TOOLS, chat_template_kwargs=wrong)


async def test_tools_are_the_tasks_with_the_nulls_and_the_strictness_that_sdks_add() -> None:
    session = await session_of("qwen3", CALLED)
    tools = [{"type": "function", "function": {**FUNCTION, "description": None, "strict": True}}]
    answer = await asked(session, chat_completions, messages=PROMPT, tools=tools)
    assert answer["usage"]["prompt_tokens"] == len(session.context.task.prompt_ids)


@pytest.mark.parametrize("form", FORMS, ids=[form["harness"] for form in FORMS])
async def test_two_calls_of_a_stock_harness_are_trained(form: dict[str, Any]) -> None:
    texts = [form.get("says", turn("qwen3", "", 1)), turn("qwen3", "It is fine", 0)]
    session = await session_of("qwen3", texts, tools=None, own_prompts=True)
    api, known = APIS[form["api"]]
    messages = "input" if form["api"] == "responses" else "messages"
    fields = {**form["fields"], "tools": form["tools"]}
    assert ignored(fields, known) == form["ignored"]
    for said in (form["opening"], [*form["opening"], *form["rest"]]):
        await asked(session, api, **{messages: said}, **fields)
    await session.end(Ended())
    episodes, abandoned = episodes_of(session)
    assert (len(episodes), abandoned, len(session.tree.turns)) == (form.get("num_samples", 1), 0, 2)
