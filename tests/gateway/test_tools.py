"""Tools and thoughts over the chat API, in the shapes of the field's chat templates."""

from __future__ import annotations

import json
from typing import Any

import pytest

from streamrl.bus.memory import MemoryBus
from streamrl.producers.gateway.chat_completions import read_tools
from streamrl.producers.gateway.entries import Ended, Started
from streamrl.producers.gateway.episodes import episodes_of
from streamrl.producers.gateway.errors import ApiError
from streamrl.producers.gateway.front import Answer, Call, answered, ask
from streamrl.producers.gateway.journal import Journal
from streamrl.producers.gateway.placing import Rules, by_messages
from streamrl.producers.gateway.rendering import Rendering
from streamrl.producers.gateway.session import Bounds, Session
from streamrl.producers.gateway.wire_messages import message_fields, read_messages
from tests.support.chat_templates import family
from tests.support.conversations import TOOLS, Round, called, written
from tests.support.scripted import rollout_engine

PROMPT: Any = [{"role": "user", "content": "2+3?"}]
FAMILIES = ["qwen3", "llama3", "deepseek", "qwen3.5"]


async def session_of(name: str, texts: list[str], *, tools: Any = TOOLS, own_prompts: bool = False, **context: Any) -> Session:
    made = rollout_engine(family(name), texts, tools=tools, **context).context
    rules = Rules(made.task, Rendering(made), own_prompts=own_prompts, drawable=lambda sampling: None)
    bounds = Bounds(max_turns=10, max_calls=4, call_s=10.0, max_bytes=1 << 20)
    session = Session(made.for_rollout(0), rules, Journal(MemoryBus("r").turns), bounds, (), lambda: None)
    await session.start(Started(nonce="n", started_s=1.0))
    return session


async def chat(session: Session, messages: list[Any]) -> Answer:
    body = {"model": "policy", "messages": messages, "tools": TOOLS}
    call = Call(session=session, body=body, model="policy")
    read, tools = read_messages(messages, "messages"), read_tools(body)
    asked = ask(call, "chat", [m.for_template() for m in read], by_messages(read, tools, session.rules), {}, tools=tools)
    return await answered(call, asked, "chatcmpl")


def turn(name: str, content: str, number: int) -> str:
    """A turn as the family writes it."""
    thought = "Let me see" if name in ("qwen3", "qwen3.5") else ""
    made = Round(content, thought, number, (), False, False)
    return written(name, made, [called(name, one) for one in range(number)])


@pytest.mark.parametrize("name", FAMILIES)
async def test_calls_of_tools_come_back_by_their_value_and_keep_their_tokens(name: str) -> None:
    number = 1 if name == "llama3" else 2
    session = await session_of(name, [turn(name, "", number), turn(name, "It is fine", 0)])
    first = await chat(session, PROMPT)
    message = message_fields(first.says.content, first.says.reasoning, first.says.tool_calls)
    assert [(call["id"], call["function"]["name"]) for call in message["tool_calls"]] == [
        (f"call_3.0.0_{k}", "look") for k in range(number)
    ]
    assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [{"at": f"place {k}"} for k in range(number)]
    # As agents give it back: without its thought, arguments written otherwise, the ids of the calls their own.
    given = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": f"x{k}", "type": "function", "function": {"name": "look", "arguments": json.dumps({"at": f"place {k}"}, indent=3)}}
            for k in range(number)
        ],
    }
    results = [{"role": "tool", "tool_call_id": f"x{k}", "content": f"rain {k}"} for k in range(number)]
    second = await chat(session, [*PROMPT, given, *results])
    kept = [*first.prompt_ids, *first.token_ids]
    assert second.prompt_ids[: len(kept)] == kept
    added = family(name).decode(second.prompt_ids[len(kept) :])
    assert all(f"rain {k}" in added for k in range(number))
    assert second.says.content.strip() == "It is fine" and not second.says.tool_calls
    await session.end(Ended())
    [episode], abandoned = episodes_of(session)
    assert abandoned == 0 and [token for segment in episode.segments for token in segment.token_ids] == [
        *second.prompt_ids,
        *second.token_ids,
    ]


@pytest.mark.parametrize("name", FAMILIES)
async def test_a_turn_that_the_agent_rewrites_is_context_behind_what_it_keeps(name: str) -> None:
    words = ("First", "Second", "Third")
    session = await session_of(name, [turn(name, word, 0) for word in words])
    messages = PROMPT
    answers: list[Answer] = []
    for word in words[:2]:
        answers.append(await chat(session, messages))
        assert answers[-1].says.content.strip() == word
        messages = [*messages, message_fields(word, "", ()), {"role": "user", "content": "And then?"}]
    rewritten = [*PROMPT, message_fields("First", "", ()), {"role": "user", "content": "And then?"}]
    rewritten += [message_fields("Nothing", "", ()), {"role": "user", "content": "Really?"}]
    third = await chat(session, rewritten)
    first = answers[0]
    kept = [*first.prompt_ids, *first.token_ids]
    assert third.prompt_ids[: len(kept)] == kept
    added = family(name).decode(third.prompt_ids[len(kept) :])
    assert added.index("And then?") < added.index("Nothing") < added.index("Really?") and "Second" not in added
    await session.end(Ended())
    [episode], abandoned = episodes_of(session)
    assert abandoned == 1 and len(episode.turns) == 2


CALL = "[{'id': 'call_3.0.0_0', 'type': 'function', 'function': {'name': 'look', 'arguments': {'at': 'place 0'}}}]"
EDITED = [{"id": "call_3.0.0_0", "type": "function", "function": {"name": "look", "arguments": '{"at": "place 0", "deep": true}'}}]
TOLD: list[tuple[int, dict[str, Any], bool]] = [
    (1, {"content": f"Calling tools:\n{CALL}"}, True),  # smolagents' ToolCallingAgent
    (0, {"content": "Look\n</code>\nCalling tools:\n[{'id': 'call_1'}]"}, True),  # its CodeAgent
    (1, {"content": "", "tool_calls": EDITED}, True),
    (1, {"content": f"Calling tools:\n{CALL.replace('3.0.0', '3.0.1')}"}, False),
    (0, {"content": "I shall Look"}, False),
]


@pytest.mark.parametrize(("num_calls", "told", "is_kept"), TOLD)
async def test_a_turn_that_the_agent_tells_in_other_words_is_trained_in_a_sample_of_its_own(
    num_calls: int, told: dict[str, Any], is_kept: bool
) -> None:
    session = await session_of("qwen3", [turn("qwen3", "" if num_calls else "Look", num_calls), turn("qwen3", "It is fine", 0)])
    await chat(session, PROMPT)
    last = await chat(session, [*PROMPT, {"role": "assistant", **told}, {"role": "user", "content": "Observation: rain"}])
    await session.end(Ended())
    episodes, abandoned = episodes_of(session)
    assert (len(episodes), abandoned) == ((2, 0) if is_kept else (1, 1))
    trained = [segment.token_ids for episode in episodes for segment in episode.segments if segment.logprobs]
    assert trained[-1] == last.token_ids
    if is_kept:
        assert [len(episode.turns) for episode in episodes] == [1, 1]
        assert episodes[1].branch is not None and episodes[1].branch.parent == 0


async def test_a_tool_that_the_task_does_not_have_is_a_prompt_of_the_agents_own() -> None:
    session = await session_of("qwen3", [turn("qwen3", "Fine", 0)], tools=[])
    with pytest.raises(ApiError) as caught:
        await chat(session, PROMPT)
    assert caught.value.code == "prompt_not_granted"
