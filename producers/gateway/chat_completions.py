"""`/v1/chat/completions`: OpenAI's chat API, with what vLLM and SGLang add to it for those who want tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from aiohttp import web

from streamrl.producers.gateway.blocks import format_of
from streamrl.producers.gateway.errors import refused
from streamrl.producers.gateway.fields import CHAT, sampled
from streamrl.producers.gateway.front import Answer, Call, answered, ask, given_back, replied
from streamrl.producers.gateway.placing import by_messages
from streamrl.producers.gateway.sse import pieces, stream
from streamrl.producers.gateway.wire_messages import message_fields, plain_tool, read_messages


async def chat_completions(call: Call, request: web.Request) -> web.StreamResponse:
    """Answer a call of messages."""
    messages = read_messages(call.body.get("messages"), "messages")
    tools = read_tools(call.body)
    fields = sampled(call.body, CHAT) | _format(call.body.get("response_format"))
    given = given_back(call.body.get("tool_choice"), call.body.get("parallel_tool_calls"))
    check_template(call)
    call.flag("logprobs")
    streams, counts = call.flag("stream"), _counts(call.body)
    what = [message.for_template() for message in messages]
    asked = ask(call, "chat", what, by_messages(messages, tools, call.session.rules), fields, tools=tools)
    answer = await answered(call, asked, "chatcmpl", given)
    if streams:
        return await stream(request, _events(call, answer, counts=counts), headers=call.headers)
    return replied(call, _whole(call, answer))


def read_tools(body: Mapping[str, Any]) -> list[Any] | None:
    """The tools of a request, in the form that chat templates take; raises ApiError."""
    given = body.get("tools")
    if given is None or given == []:
        return None
    if not isinstance(given, list):
        raise refused(f"expected tools as a list, got {given!r:.80}", param="tools")
    found: list[Any] = []
    for number, tool in enumerate(cast("list[Any]", given)):
        function: Any = cast("Mapping[str, Any]", tool).get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(cast("Mapping[str, Any]", function).get("name"), str):
            raise refused(f"expected tools of type function with a name, got {tool!r:.80}", param=f"tools[{number}]")
        found.append(plain_tool(cast("Mapping[str, Any]", tool)))
    return found


def check_template(call: Call) -> None:
    """Raise ApiError where a call wants other variables of the chat template than its task has."""
    given = call.body.get("chat_template_kwargs")
    if given is None:
        return
    if not isinstance(given, Mapping):
        raise refused(f"expected chat_template_kwargs as a table, got {given!r:.80}", param="chat_template_kwargs")
    context = call.session.context
    there = {**context.template_kwargs, **(context.task.chat_template_kwargs or {})}
    for name, value in cast("Mapping[str, Any]", given).items():
        if name not in there or there[name] != value:
            raise refused(
                f"expected {f'{name} = {there[name]!r:.80}' if name in there else f'no {name}'}, got {value!r:.80}",
                hint="prompts are the run's: set data.chat_template_kwargs there, or leave it out",
                code="unsupported_parameter",
                param=f"chat_template_kwargs.{name:.80}",
            )


def _format(given: Any) -> dict[str, Any]:
    """`response_format` as a field of sampling."""
    fields: Any = cast("Mapping[str, Any]", given) if isinstance(given, Mapping) else {"type": "text" if given is None else ""}
    nested = fields.get("json_schema")
    inner: Any = cast("Mapping[str, Any]", nested).get("schema") if isinstance(nested, Mapping) else None
    return format_of(fields.get("type"), inner, given, "response_format")


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
