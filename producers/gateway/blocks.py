"""What the APIs of blocks and items share: checks of what came in, and assistants' messages put together from their parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from streamrl.data.tool_calls import ToolCall
from streamrl.producers.gateway.errors import refused
from streamrl.producers.gateway.messages import ASSISTANT, Message
from streamrl.producers.gateway.wire_messages import MAX_MESSAGES


class Conversation:
    """Messages in the making.

    What an assistant says in several parts, with nobody between, is one message, and so are a user's texts within one.
    """

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._whole = 0
        """So many of them belong to messages that have ended."""

    def end(self) -> None:
        """The message of the request has ended whose parts were added."""
        self._whole = len(self._messages)

    def add(self, message: Message) -> None:
        """The next part."""
        last = self._messages[-1] if self._messages else None
        begun = message.role == "user" and len(self._messages) > self._whole
        if last is not None and last.role == message.role and (message.role == ASSISTANT or begun):
            message = msgspec.structs.replace(
                last,
                content=last.content + message.content,
                reasoning=last.reasoning + message.reasoning,
                tool_calls=last.tool_calls + message.tool_calls,
            )
            self._messages.pop()
        self._messages.append(message)

    def done(self, param: str) -> list[Message]:
        """All of them; raises ApiError for none."""
        if not any(message.role != "system" for message in self._messages):
            raise refused("expected at least one message", param=param)
        return self._messages


def table(given: Any, where: str, known: Sequence[str]) -> Mapping[str, Any]:
    """A table with no other fields than `known`; raises ApiError."""
    if not isinstance(given, Mapping):
        raise refused(f"expected a table, got {given!r:.80}", param=where)
    fields = cast("Mapping[str, Any]", given)
    for name, value in fields.items():
        if name not in known and value is not None:
            raise refused(f"expected no field {name} here, got {value!r:.80}", code="unsupported_parameter", param=f"{where}.{name}")
    return fields


def items(given: Any, where: str) -> list[Any]:
    """A list that is not too long; raises ApiError."""
    if not isinstance(given, list):
        raise refused(f"expected a list, got {given!r:.80}", param=where)
    found = cast("list[Any]", given)
    if len(found) > MAX_MESSAGES:
        raise refused(f"expected at most {MAX_MESSAGES} of them, got {len(found)}", param=where)
    return found


def text(given: Any, where: str) -> str:
    """A text, empty where there is none; raises ApiError."""
    if given is None:
        return ""
    if not isinstance(given, str):
        raise refused(f"expected a text, got {given!r:.80}", param=where)
    return given


def texts(given: Any, where: str, types: Sequence[str], known: Sequence[str]) -> str:
    """A text, or a list of parts of these types that have one; raises ApiError."""
    if not isinstance(given, list):
        return text(given, where)
    found: list[str] = []
    for number, part in enumerate(items(cast("Any", given), where)):
        at = f"{where}[{number}]"
        fields = table(part, at, known)
        if fields.get("type") not in types:
            raise refused(
                f"expected parts of type {', '.join(types)}, got {fields.get('type')!r:.80}",
                hint="images, files and sound are not supported",
                param=at,
            )
        found.append(text(fields.get("text"), f"{at}.text"))
    return "".join(found)


def call_of(name: Any, arguments: Any, identity: Any, where: str) -> ToolCall:
    """A call that an assistant has made, its arguments a table or a text of JSON; raises ApiError."""
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except (msgspec.MsgspecError, RecursionError) as error:
            raise refused(f"expected the arguments of a call as JSON: {error}", param=where) from error
    if not isinstance(arguments, dict):
        raise refused(f"expected the arguments of a call as a JSON object, got {arguments!r:.80}", param=where)
    return ToolCall(text(name, where), cast("dict[str, Any]", arguments), text(identity, where))


def tool_of(name: Any, description: Any, parameters: Any, where: str) -> dict[str, Any]:
    """A tool in the form that chat templates take; raises ApiError."""
    if not isinstance(name, str) or not name:
        raise refused("expected a tool with a name", param=where)
    if parameters is not None and not isinstance(parameters, Mapping):
        raise refused(f"expected the tool's parameters as a JSON schema, got {parameters!r:.80}", param=where)
    given = {"name": name, "description": text(description, where), "parameters": parameters}
    return {"type": "function", "function": {field: value for field, value in given.items() if value}}


def format_of(kind: Any, schema: Any, given: Any, where: str) -> dict[str, Any]:
    """The format of an answer as a field of sampling: none for a text; raises ApiError."""
    match kind:
        case None | "text":
            return {}
        case "json_object":
            return {"json_schema": '{"type":"object"}'}
        case "json_schema" if isinstance(schema, Mapping):
            return {"json_schema": msgspec.json.encode(schema).decode()}
        case _:
            raise refused(f"expected a format of type text, json_object or json_schema, got {given!r:.80}", param=where)
