"""Messages in the form of OpenAI's chat API, and tools, to neutral ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from streamrl.data.tool_calls import ToolCall
from streamrl.producers.gateway.errors import refused
from streamrl.producers.gateway.fields import MESSAGE, sampled
from streamrl.producers.gateway.messages import ASSISTANT, Message

MAX_MESSAGES = 10_000
_ROLES = ("system", "developer", "user", ASSISTANT, "tool")


def read_messages(given: Any, param: str) -> list[Message]:
    """A list of messages; raises ApiError that names the first that cannot be used."""
    if not isinstance(given, list) or not given:
        raise refused(f"expected {param} as a list of at least one message, got {_shown(given)}", param=param)
    items = cast("list[Any]", given)
    if len(items) > MAX_MESSAGES:
        raise refused(f"expected at most {MAX_MESSAGES} messages, got {len(items)}", param=param)
    return [_message(item, f"{param}[{number}]") for number, item in enumerate(items)]


def _message(given: Any, where: str) -> Message:
    if not isinstance(given, Mapping):
        raise refused(f"expected a message as a table, got {_shown(given)}", param=where)
    fields = cast("Mapping[str, Any]", given)
    for name, value in sampled(fields, MESSAGE, f"{where}.").items():
        raise refused(f"expected no field {name} in a message, got {_shown(value)}", param=f"{where}.{name}")
    role = fields.get("role")
    if role not in _ROLES:
        raise refused(f"expected a role of {', '.join(_ROLES)}, got {_shown(role)}", param=f"{where}.role")
    calls = fields.get("tool_calls") or ()
    if calls and role != ASSISTANT:
        raise refused(f"expected tool_calls of the assistant only, got some of {role}", param=f"{where}.tool_calls")
    return Message(
        role="system" if role == "developer" else role,
        content=_content(fields.get("content"), f"{where}.content"),
        reasoning=_text(fields.get("reasoning_content") or fields.get("reasoning"), f"{where}.reasoning_content"),
        tool_calls=tuple(_call(call, f"{where}.tool_calls[{number}]") for number, call in enumerate(calls)),
        tool_call_id=_text(fields.get("tool_call_id"), f"{where}.tool_call_id"),
        name=_text(fields.get("name"), f"{where}.name"),
    )


def _content(given: Any, where: str) -> str:
    if not isinstance(given, list):
        return _text(given, where)
    parts: list[str] = []
    for number, part in enumerate(cast("list[Any]", given)):
        at = f"{where}[{number}]"
        if not isinstance(part, Mapping) or cast("Mapping[str, Any]", part).get("type") != "text":
            raise refused(f"expected parts of type text, got {_shown(part)}", hint="images and sound are not supported", param=at)
        parts.append(_text(cast("Mapping[str, Any]", part).get("text"), f"{at}.text"))
    return "".join(parts)


def _call(given: Any, where: str) -> ToolCall:
    function: Any = cast("Mapping[str, Any]", given).get("function") if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping):
        raise refused(f"expected a call of a function, got {_shown(given)}", param=where)
    fields = cast("Mapping[str, Any]", function)
    arguments = fields.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except (msgspec.MsgspecError, RecursionError) as error:
            raise refused(f"expected the arguments of a call as JSON: {error}", param=f"{where}.function.arguments") from error
    if not isinstance(arguments, dict):
        raise refused(f"expected the arguments of a call as a JSON object, got {_shown(arguments)}", param=f"{where}.function.arguments")
    name = _text(fields.get("name"), f"{where}.function.name")
    identity = _text(cast("Mapping[str, Any]", given).get("id"), f"{where}.id")
    return ToolCall(name, cast("dict[str, Any]", arguments), identity)


def _text(given: Any, where: str) -> str:
    if given is None:
        return ""
    if not isinstance(given, str):
        raise refused(f"expected a text, got {_shown(given)}", param=where)
    return given


def plain_tool(tool: Any) -> Any:
    """Return the definition of a function without nulls and without `strict`, to which no engine is held; any other value as it is."""
    fields: Mapping[str, Any] = cast("Mapping[str, Any]", tool) if isinstance(tool, Mapping) else {}
    function = fields.get("function")
    if not isinstance(function, Mapping):
        return tool
    plain = {name: value for name, value in cast("Mapping[str, Any]", function).items() if value is not None and name != "strict"}
    return {name: value for name, value in fields.items() if value is not None} | {"function": plain}


def message_fields(content: str, reasoning: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """What the model says, in the form of the chat API."""
    found: dict[str, Any] = {"role": ASSISTANT, "content": content if content or not calls else None}
    if reasoning:
        found["reasoning_content"] = reasoning
    if calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": msgspec.json.encode(call.arguments).decode()},
            }
            for call in calls
        ]
    return found


def messages_fields(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages of a prompt, in the form of the chat API."""
    found: list[dict[str, Any]] = []
    for message in messages:
        fields = message_fields(message.content, message.reasoning, message.tool_calls) | {"role": message.role}
        for name, value in (("tool_call_id", message.tool_call_id), ("name", message.name)):
            if value:
                fields[name] = value
        found.append(fields)
    return found


def _shown(value: Any) -> str:
    return repr(value)[:80]
