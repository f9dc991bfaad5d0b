"""`/v1/messages`: a subset of Anthropic's API: messages, system, tools and their results, thoughts, stop sequences, streams.

Pure translation: the session sees what `/v1/chat/completions` would have given it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from streamrl.producers.gateway.blocks import Conversation, call_of, format_of, items, table, text, texts, tool_of
from streamrl.producers.gateway.errors import refused
from streamrl.producers.gateway.fields import MESSAGES, sampled
from streamrl.producers.gateway.front import Answer, Call, answered, ask, given_back, replied
from streamrl.producers.gateway.messages import ASSISTANT, Given, Message
from streamrl.producers.gateway.placing import by_messages
from streamrl.producers.gateway.session import LARGE
from streamrl.producers.gateway.sse import pieces, stream

_TEXT = ("type", "text", "cache_control", "citations")
_STOPS = {"stop": "end_turn", "length": "max_tokens"}


async def anthropic_messages(call: Call, request: web.Request) -> web.StreamResponse:
    """Answer a call of messages."""
    body = call.body
    messages, tools = conversation_of(body), tools_of(body)
    if body.get("max_tokens") is None:
        raise refused("expected max_tokens, which this API wants", param="max_tokens")
    fields = sampled(body, MESSAGES) | {"max_tokens": body["max_tokens"]} | format_asked(body)
    if stops := body.get("stop_sequences"):
        fields["stop"] = stops
    given, streams = choice_of(body), call.flag("stream")
    what = [message.for_template() for message in messages]
    asked = ask(call, "messages", what, by_messages(messages, tools, call.session.rules), fields, tools=tools)
    answer = await answered(call, asked, "msg", given)
    if streams:
        return await stream(request, events_of(answer), headers=call.headers, named=True)
    return replied(call, _whole(answer))


async def count_tokens(call: Call, request: web.Request) -> web.StreamResponse:
    """Answer how many tokens a conversation has up to where the model would write, rendered anew."""
    messages, tools = conversation_of(call.body), tools_of(call.body)
    sampled(call.body, MESSAGES)
    rules = call.session.rules
    count = partial(rules.rendering.prompt, messages, tools or rules.task.tools or None)
    ids = await asyncio.to_thread(count) if call.size > LARGE else count()
    return replied(call, {"input_tokens": len(ids)})


def conversation_of(body: Mapping[str, Any]) -> list[Message]:
    """Read the messages of a request; raises ApiError for what is none."""
    found = Conversation()
    if system := texts(body.get("system"), "system", ("text",), _TEXT):
        found.add(Message(role="system", content=system))
    for number, given in enumerate(items(body.get("messages"), "messages")):
        where = f"messages[{number}]"
        fields = table(given, where, ("role", "content"))
        role, content = fields.get("role"), fields.get("content")
        if role not in ("user", ASSISTANT):
            raise refused(f"expected a role of user or {ASSISTANT}, got {role!r:.80}", param=f"{where}.role")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else items(content, f"{where}.content")
        read = _said if role == ASSISTANT else _asked
        for place, block in enumerate(blocks):
            read(found, block, f"{where}.content[{place}]")
        found.end()
    return found.done("messages")


def _asked(found: Conversation, block: Any, where: str) -> None:
    """A block of the user's."""
    fields = table(block, where, ("tool_use_id", "content", "is_error", *_TEXT))
    match fields.get("type"):
        case "text":
            found.add(Message(role="user", content=text(fields.get("text"), f"{where}.text")))
        case "tool_result":
            said = texts(fields.get("content"), f"{where}.content", ("text",), _TEXT)
            found.add(Message(role="tool", content=said, tool_call_id=text(fields.get("tool_use_id"), f"{where}.tool_use_id")))
        case other:
            raise refused(f"expected a block of type text or tool_result, got {other!r:.80}", param=where)


def _said(found: Conversation, block: Any, where: str) -> None:
    """A block of the assistant's."""
    fields = table(block, where, ("id", "name", "input", "thinking", "signature", "caller", *_TEXT))
    match fields.get("type"):
        case "text":
            found.add(Message(role=ASSISTANT, content=text(fields.get("text"), f"{where}.text")))
        case "thinking":
            found.add(Message(role=ASSISTANT, content="", reasoning=text(fields.get("thinking"), f"{where}.thinking")))
        case "tool_use":
            called = call_of(fields.get("name"), fields.get("input"), fields.get("id"), where)
            found.add(Message(role=ASSISTANT, content="", tool_calls=(called,)))
        case other:
            raise refused(f"expected a block of type text, thinking or tool_use, got {other!r:.80}", param=where)


def tools_of(body: Mapping[str, Any]) -> list[Any] | None:
    """Read the tools of a request; None: it has none."""
    if not body.get("tools"):
        return None
    found: list[Any] = []
    for number, given in enumerate(items(body["tools"], "tools")):
        where = f"tools[{number}]"
        fields = table(given, where, ("name", "description", "input_schema", "type", "cache_control"))
        if fields.get("type") not in (None, "custom"):
            raise refused(f"expected a tool of the caller's own, got one of type {fields['type']!r:.80}", param=where)
        found.append(tool_of(fields.get("name"), fields.get("description"), fields.get("input_schema"), where))
    return found


def choice_of(body: Mapping[str, Any]) -> Given:
    """Read the form in which the calls of the turn are given back; raises ApiError."""
    choice = body.get("tool_choice")
    if choice is None:
        return "all calls"
    fields = table(choice, "tool_choice", ("type", "name", "disable_parallel_tool_use"))
    single = fields.get("disable_parallel_tool_use")
    if single is not None and not isinstance(single, bool):
        raise refused(f"expected true or false, got {single!r:.80}", param="tool_choice.disable_parallel_tool_use")
    return given_back(fields, None if single is None else not single)


def format_asked(body: Mapping[str, Any]) -> dict[str, Any]:
    """The format of the answer as a field of sampling; raises ApiError."""
    where, given = "output_format", body.get("output_format")
    if (config := body.get("output_config")) is not None:
        inner = table(config, "output_config", ("effort", "format")).get("format")
        where, given = ("output_config.format", inner) if inner is not None else (where, given)
    if given is None:
        return {}
    fields = table(given, where, ("type", "schema"))
    return format_of(fields.get("type"), fields.get("schema"), given, where)


def blocks_of(answer: Answer) -> list[dict[str, Any]]:
    """List the blocks of content of a turn."""
    says = answer.says
    found: list[dict[str, Any]] = []
    if says.reasoning:
        found.append({"type": "thinking", "thinking": says.reasoning, "signature": ""})
    if says.content:
        found.append({"type": "text", "text": says.content, "citations": None})
    return found + [{"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments} for call in says.tool_calls]


def _stop(answer: Answer) -> dict[str, Any]:
    reason = "tool_use" if answer.says.tool_calls and answer.finish_reason == "stop" else _STOPS.get(answer.finish_reason, "end_turn")
    return {"stop_reason": reason, "stop_sequence": None}


def _whole(answer: Answer) -> dict[str, Any]:
    usage = {"input_tokens": len(answer.prompt_ids), "output_tokens": len(answer.token_ids)}
    head = {"id": answer.identity, "type": "message", "role": ASSISTANT, "model": answer.model}
    return {**head, "content": blocks_of(answer), **_stop(answer), "usage": usage}


def events_of(answer: Answer) -> Iterator[dict[str, Any]]:
    """List the events of a turn that is streamed."""
    whole = _whole(answer)
    begun = {"content": [], "stop_reason": None, "usage": whole["usage"] | {"output_tokens": 0}}
    yield {"type": "message_start", "message": whole | begun}
    for index, block in enumerate(whole["content"]):
        match block["type"]:
            case "tool_use":
                begins, name, said = {"input": {}}, "partial_json", msgspec.json.encode(block["input"]).decode()
                kind = "input_json_delta"
            case word:
                begins, name, said, kind = {word if word == "thinking" else "text": ""}, word, block[word], f"{word}_delta"
        yield {"type": "content_block_start", "index": index, "content_block": block | begins}
        for piece in pieces(said):
            yield {"type": "content_block_delta", "index": index, "delta": {"type": kind, name: piece}}
        yield {"type": "content_block_stop", "index": index}
    yield {"type": "message_delta", "delta": _stop(answer), "usage": {"output_tokens": whole["usage"]["output_tokens"]}}
    yield {"type": "message_stop"}
