"""`/v1/chat/completions`: OpenAI's chat API, with what vLLM and SGLang add to it for those who want tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import msgspec
from aiohttp import web

from streamrl.producers.gateway.errors import refused
from streamrl.producers.gateway.front import Answer, Call, answered, ask
from streamrl.producers.gateway.placing import by_messages
from streamrl.producers.gateway.sse import pieces, stream
from streamrl.producers.gateway.wire_messages import message_fields, read_messages

_HANDLED = ("model", "messages", "tools", "tool_choice", "response_format", "modalities", "function_call", "functions", "logprobs")


async def chat_completions(call: Call, request: web.Request) -> web.StreamResponse:
    """Answer a call of messages."""
    messages = read_messages(call.body.get("messages"), "messages")
    tools = read_tools(call.body)
    fields = call.fields(*_HANDLED) | _format(call.body.get("response_format"))
    _check_others(call)
    streams, counts = call.flag("stream"), _counts(call.body)
    what = [message.for_template() for message in messages]
    asked = ask(call, "chat", what, by_messages(messages, tools, call.session.rules), fields, tools=tools)
    answer = await answered(call, asked, "chatcmpl")
    if streams:
        return await stream(request, _events(call, answer, counts=counts))
    return web.Response(body=msgspec.json.encode(_whole(call, answer)), content_type="application/json")


def read_tools(body: Mapping[str, Any]) -> list[Any] | None:
    """The tools of a request, in the form that chat templates take; raises ApiError."""
    given = body.get("tools")
    if given is None or given == []:
        return None
    if not isinstance(given, list):
        raise refused(f"expected tools as a list, got {given!r:.80}", param="tools")
    items = cast("list[Any]", given)
    for number, tool in enumerate(items):
        function: Any = cast("Mapping[str, Any]", tool).get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(cast("Mapping[str, Any]", function).get("name"), str):
            raise refused(f"expected tools of type function with a name, got {tool!r:.80}", param=f"tools[{number}]")
    return items


def _check_others(call: Call) -> None:
    """Fields that change what is asked, at values that nobody can hold to."""
    body = call.body
    if body.get("tool_choice") not in (None, "auto") and not (body["tool_choice"] == "none" and not body.get("tools")):
        raise refused(
            f"expected tool_choice auto, got {body['tool_choice']!r:.80}",
            hint="the model chooses; leave it out, or leave the tools out",
            code="unsupported_parameter",
            param="tool_choice",
        )
    if body.get("parallel_tool_calls") not in (None, True):
        raise refused(
            "expected parallel_tool_calls true, got false",
            hint="a model is not held to one call",
            code="unsupported_parameter",
            param="parallel_tool_calls",
        )
    if body.get("modalities") not in (None, ["text"]):
        raise refused(f"expected the modality text, got {body['modalities']!r:.80}", code="unsupported_parameter", param="modalities")
    for name in ("function_call", "functions"):
        if body.get(name) is not None:
            raise refused(f"expected no {name}, which tools have replaced", code="unsupported_parameter", param=name)
    call.flag("logprobs")
    if body.get("top_logprobs"):
        raise refused(
            "expected top_logprobs 0, got more", hint="engines keep the sampled token's", code="unsupported_parameter", param="top_logprobs"
        )


def _format(given: Any) -> dict[str, Any]:
    """`response_format` as a field of sampling."""
    fields: Mapping[str, Any] = cast("Mapping[str, Any]", given) if isinstance(given, Mapping) else {}
    match fields.get("type") if given is not None else "text":
        case "text":
            return {}
        case "json_object":
            return {"json_schema": '{"type":"object"}'}
        case "json_schema":
            schema: Any = fields.get("json_schema")
            inner: Any = cast("Mapping[str, Any]", schema).get("schema") if isinstance(schema, Mapping) else None
            if isinstance(inner, Mapping):
                return {"json_schema": msgspec.json.encode(inner).decode()}
        case _:
            pass
    raise refused(f"expected a format of type text, json_object or json_schema, got {given!r:.80}", param="response_format")


def _counts(body: Mapping[str, Any]) -> bool:
    options = body.get("stream_options")
    if options is not None and not isinstance(options, Mapping):
        raise refused(f"expected stream_options as a table, got {options!r:.80}", param="stream_options")
    return bool(cast("Mapping[str, Any]", options or {}).get("include_usage"))


def finish(answer: Answer) -> str:
    """OpenAI's word for how a turn ended."""
    return "tool_calls" if answer.says.tool_calls and answer.finish_reason == "stop" else answer.finish_reason


def token_places(call: Call, answer: Answer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Token ids where vLLM has them (at the top, and in the choice) and where SGLang has them (in the choice)."""
    if not call.flag("return_token_ids"):
        return {}, {}
    ids = {"prompt_token_ids": answer.prompt_ids}
    return ids, {**ids, "token_ids": answer.token_ids}


def _logprobs(call: Call, answer: Answer) -> dict[str, Any] | None:
    if not call.flag("logprobs"):
        return None
    texts = answer.tokens
    words = answer.id_words() if call.flag("return_tokens_as_token_ids") else texts
    content = [
        {"token": word, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for word, text, logprob in zip(words, texts, answer.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    return {"id": answer.identity, "object": kind, "created": answer.created_s, "model": answer.model}


def _whole(call: Call, answer: Answer) -> dict[str, Any]:
    top, beside = token_places(call, answer)
    says = answer.says
    choice = {
        "index": 0,
        "message": message_fields(says.content, says.reasoning, says.tool_calls),
        "logprobs": _logprobs(call, answer),
        "finish_reason": finish(answer),
        **beside,
    }
    return _head(answer, "chat.completion") | {"choices": [choice], "usage": answer.usage(), **top}


def _events(call: Call, answer: Answer, *, counts: bool) -> Iterator[dict[str, Any]]:
    head = _head(answer, "chat.completion.chunk")
    top, beside = token_places(call, answer)
    says = answer.says

    def event(delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} | more
        return head | {"choices": [choice]} | ({"usage": None} if counts else {})

    yield event({"role": "assistant", "content": ""}) | top
    for piece in pieces(says.reasoning):
        yield event({"reasoning_content": piece})
    for piece in pieces(says.content):
        yield event({"content": piece})
    for number, one in enumerate(message_fields("", "", says.tool_calls).get("tool_calls", [])):
        yield event({"tool_calls": [{"index": number, **one}]})
    yield event({}, finish_reason=finish(answer), logprobs=_logprobs(call, answer), **beside)
    if counts:
        yield head | {"choices": [], "usage": answer.usage()}
