"""`/v1/responses`: a subset of OpenAI's Responses API: items in and out, instructions, functions, thoughts, streams.

Pure translation, as `streamrl.producers.gateway.anthropic_messages`. Nothing is stored for `previous_response_id`: an agent sends all of
its conversation with each call, as SDKs do with `store = false`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, cast

import msgspec
from aiohttp import web

from streamrl.producers.gateway.blocks import Conversation, call_of, format_of, items, table, text, texts, tool_of
from streamrl.producers.gateway.errors import refused
from streamrl.producers.gateway.fields import RESPONSES, sampled
from streamrl.producers.gateway.front import Answer, Call, answered, ask, given_back, replied
from streamrl.producers.gateway.messages import ASSISTANT, Message
from streamrl.producers.gateway.placing import by_messages
from streamrl.producers.gateway.sse import pieces, stream

_PART = ("type", "text", "annotations", "logprobs")
_ITEM = ("id", "type", "status")
_ITEMS: Mapping[str, tuple[str, ...]] = {
    "message": (*_ITEM, "role", "content", "phase"),
    "reasoning": (*_ITEM, "summary", "content", "encrypted_content"),
    "function_call": (*_ITEM, "name", "arguments", "call_id", "namespace"),
    "function_call_output": (*_ITEM, "call_id", "output"),
}
"""Fields of an item by its type."""
_IDLE_PARTS = (
    *("reasoning.", "web_search_call.", "file_search_call.", "code_interpreter_call.", "computer_call_output."),
    "message.input_image.",
)
"""Beginnings of what `include` may ask for that no answer here has."""


async def responses(call: Call, request: web.Request) -> web.StreamResponse:
    """Answer a call of items."""
    body = call.body
    messages, tools = conversation_of(body), tools_of(body)
    fields = sampled(body, RESPONSES) | {"max_tokens": body.get("max_output_tokens")} | format_asked(body)
    given, streams = given_back(body.get("tool_choice"), body.get("parallel_tool_calls")), call.flag("stream")
    _check_parts(body.get("include"))
    what = [message.for_template() for message in messages]
    asked = ask(call, "responses", what, by_messages(messages, tools, call.session.rules), fields, tools=tools)
    answer = await answered(call, asked, "resp", given)
    if streams:
        return await stream(request, events_of(call, answer), headers=call.headers, named=True)
    return replied(call, _whole(call, answer))


def conversation_of(body: Mapping[str, Any]) -> list[Message]:
    """Read the messages of a request; raises ApiError for what is none."""
    found = Conversation()
    if instructions := text(body.get("instructions"), "instructions"):
        found.add(Message(role="system", content=instructions))
    given = body.get("input")
    if isinstance(given, str):
        found.add(Message(role="user", content=given))
        return found.done("input")
    for number, item in enumerate(items(given, "input")):
        found.add(_message(item, f"input[{number}]"))
        found.end()
    return found.done("input")


def _message(item: Any, where: str) -> Message:
    kind: Any = cast("Mapping[str, Any]", item).get("type", "message") if isinstance(item, Mapping) else "message"
    if not isinstance(kind, str) or kind not in _ITEMS:
        raise refused(f"expected an item of type {', '.join(_ITEMS)}, got {kind!r:.80}", param=where)
    fields = table(item, where, _ITEMS[kind])
    match kind:
        case "message":
            role = fields.get("role")
            if role not in ("user", ASSISTANT, "system", "developer"):
                raise refused(f"expected a role of user, assistant, system or developer, got {role!r:.80}", param=f"{where}.role")
            types = ("output_text", "text") if role == ASSISTANT else ("input_text", "text")
            said = texts(fields.get("content"), f"{where}.content", types, _PART)
            return Message(role="system" if role == "developer" else role, content=said)
        case "reasoning":
            return Message(role=ASSISTANT, reasoning=texts(fields.get("content"), f"{where}.content", ("reasoning_text",), _PART))
        case "function_call":
            return Message(role=ASSISTANT, tool_calls=(call_of(fields.get("name"), fields.get("arguments"), fields.get("call_id"), where),))
        case _:
            said = texts(fields.get("output"), f"{where}.output", ("input_text",), _PART)
            return Message(role="tool", content=said, tool_call_id=text(fields.get("call_id"), f"{where}.call_id"))


def tools_of(body: Mapping[str, Any]) -> list[Any] | None:
    """Read the tools of a request; None: it has none."""
    if not body.get("tools"):
        return None
    found: list[Any] = []
    for number, given in enumerate(items(body["tools"], "tools")):
        where = f"tools[{number}]"
        kind: Any = cast("Mapping[str, Any]", given).get("type") if isinstance(given, Mapping) else None
        if kind != "function":
            raise refused(
                f"expected tools of type function, got {kind!r:.80}",
                hint="hosted tools do not run here: give functions, which the agent runs itself",
                code="unsupported_parameter",
                param=where,
            )
        fields = table(given, where, ("type", "name", "description", "parameters", "strict"))
        found.append(tool_of(fields.get("name"), fields.get("description"), fields.get("parameters"), where))
    return found


def format_asked(body: Mapping[str, Any]) -> dict[str, Any]:
    """The format of the answer, in `text`, as a field of sampling; raises ApiError."""
    if (about := body.get("text")) is None:
        return {}
    given = table(about, "text", ("format", "verbosity")).get("format")
    fields = table(given, "text.format", ("type", "name", "schema", "strict", "description")) if given is not None else {}
    return format_of(fields.get("type"), fields.get("schema"), given, "text.format")


def _check_parts(include: Any) -> None:
    """Raise ApiError where an answer is to have parts that it might have and does not."""
    for name in items(include, "include") if include is not None else ():
        if not isinstance(name, str) or not name.startswith(_IDLE_PARTS):
            raise refused(f"expected include without {name!r:.80}", hint="leave it out", code="unsupported_parameter", param="include")


def output_of(answer: Answer) -> list[dict[str, Any]]:
    """The items of a turn."""
    says, name = answer.says, answer.identity.removeprefix("resp-")
    found: list[dict[str, Any]] = []
    if says.reasoning:
        part = {"type": "reasoning_text", "text": says.reasoning}
        found.append({"type": "reasoning", "id": f"rs-{name}", "summary": [], "content": [part], "status": "completed"})
    if says.content or not says.tool_calls:
        part = {"type": "output_text", "text": says.content, "annotations": [], "logprobs": []}
        found.append({"type": "message", "id": f"msg-{name}", "status": "completed", "role": ASSISTANT, "content": [part]})
    for one in says.tool_calls:
        arguments = msgspec.json.encode(one.arguments).decode()
        about = {"call_id": one.id, "name": one.name, "arguments": arguments, "status": "completed"}
        found.append({"type": "function_call", "id": f"fc-{one.id}", **about})
    return found


def _whole(call: Call, answer: Answer) -> dict[str, Any]:
    prompt, made = len(answer.prompt_ids), len(answer.token_ids)
    truncated = answer.finish_reason == "length"
    return {
        "id": answer.identity,
        "object": "response",
        "created_at": answer.created_s,
        "status": "incomplete" if truncated else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if truncated else None,
        "error": None,
        "model": answer.model,
        "instructions": call.body.get("instructions"),
        "metadata": call.body.get("metadata") or {},
        "output": output_of(answer),
        "parallel_tool_calls": True,
        "temperature": call.body.get("temperature"),
        "top_p": call.body.get("top_p"),
        "tool_choice": "auto",
        "tools": call.body.get("tools") or [],
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": made,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + made,
        },
    }


def events_of(call: Call, answer: Answer) -> Iterator[dict[str, Any]]:
    """List the events of a turn that is streamed."""
    whole, numbers = _whole(call, answer), itertools.count()

    def event(kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": f"response.{kind}", "sequence_number": next(numbers), **fields}

    begun = whole | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield event("created", response=begun)
    yield event("in_progress", response=begun)
    for index, item in enumerate(whole["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        opened: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        yield event("output_item.added", output_index=index, item=item | {"status": "in_progress"} | opened)
        if item["type"] == "function_call":
            for piece in pieces(item["arguments"]):
                yield event("function_call_arguments.delta", delta=piece, **place)
            yield event("function_call_arguments.done", arguments=item["arguments"], name=item["name"], **place)
        else:
            [part] = item["content"]
            kind = part["type"]
            yield event("content_part.added", content_index=0, part=part | {"text": ""}, **place)
            for piece in pieces(part["text"]):
                yield event(f"{kind}.delta", content_index=0, delta=piece, logprobs=[], **place)
            yield event(f"{kind}.done", content_index=0, text=part["text"], logprobs=[], **place)
            yield event("content_part.done", content_index=0, part=part, **place)
        yield event("output_item.done", output_index=index, item=item)
    yield event("incomplete" if whole["incomplete_details"] else "completed", response=whole)
