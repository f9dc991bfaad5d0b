"""Messages and definitions of tools in the one form that chat templates are given, whatever form they came in.

| came as | becomes |
|---|---|
| a content that is a list of parts `{"type": "text", "text": ...}` | their texts, joined |
| a field that is null, at any depth outside of lists | left out: Arrow gives each table all fields of its column |
| tools as JSON text, whole or one by one | the tables that the text says |
| a content that is a number or a table, or a message that says nothing | refused: templates render these as nothing |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from streamrl.errors import SchemaError

_ABOUT = frozenset(("role", "name", "tool_call_id", "id", "weight", "step_loss_mask"))
"""Fields of a message that say something about it, and nothing that a model reads as its content."""
_IMAGES = ("image", "image_url")


def plain_messages(messages: Any, *, first: int = 1) -> list[dict[str, Any]]:
    """Messages whose contents are texts, without fields that are null.

    A content may be missing where another field says something, as `tool_calls` does.

    Args:
        messages: of a conversation, or of a part of one.
        first: number of the first one in its conversation.

    Raises:
        SchemaError: no list of messages with a role each, or a message whose content is no text (`values["message"]`, from 1).
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise SchemaError(
            f"expected a list of at least one message, got {_shown(messages)}",
            hint='write [{"role": "user", "content": "..."}]',
            got=type(messages).__name__,
        )
    return [_plain_message(message, number) for number, message in enumerate(cast("Sequence[Any]", messages), first)]


def plain_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Definitions of tools without fields that are null; None where there is none.

    Raises:
        SchemaError: neither a list of tables nor JSON text of one.
    """
    found = _of_text(tools) if isinstance(tools, str) and tools.strip() else tools or None
    if found is None:
        return None
    if isinstance(found, list | tuple):
        listed = [_of_text(one) if isinstance(one, str) else one for one in cast("Sequence[Any]", found)]
        if all(isinstance(one, Mapping) for one in listed):
            return [without_nulls(one) for one in listed] or None
    raise SchemaError(
        f"expected tools as a list of tables, or as its JSON text, got {_shown(tools)}",
        hint='write [{"type": "function", "function": {"name": "...", "parameters": {...}}}]',
        got=type(tools).__name__,
    )


def without_nulls(value: Any) -> Any:
    """The same without the fields of tables that are null; what a list holds stays in its place."""
    if isinstance(value, Mapping):
        return {name: without_nulls(one) for name, one in cast("Mapping[Any, Any]", value).items() if one is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(one) for one in cast("Sequence[Any]", value)]
    return value


def _plain_message(message: Any, number: int) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise SchemaError(
            f"expected a message with a role and a content, got {_shown(message)} as message {number}",
            hint='write {"role": "user", "content": "..."}',
            number=number,
            got=type(message).__name__,
        )
    plain = cast("dict[str, Any]", without_nulls(message))
    if "content" in plain:
        plain["content"] = _text(plain["content"], plain["role"], number)
    elif not any(value not in ("", [], {}) for name, value in plain.items() if name not in _ABOUT):
        raise SchemaError(
            f"expected a content in message {number} ({plain['role']}), got none",
            hint='write "" where it is to say nothing, or leave the message out',
            number=number,
            got="NoneType",
        )
    return plain


def _text(content: Any, role: str, number: int) -> str:
    if isinstance(content, str):
        return content
    where = f"message {number} ({role})"
    if not isinstance(content, list) or not content:
        shown = "an empty list" if content == [] else _shown(content)
        raise SchemaError(
            f"expected a text, or a list of parts of type text, as the content of {where}, got {shown}",
            hint='write numbers and tables as text: 42 as "42", a tool\'s result with json.dumps',
            number=number,
            got=type(content).__name__,
        )
    texts: list[str] = []
    for part in cast("list[Any]", content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(part, Mapping) or kind != "text" or not isinstance(part.get("text"), str):
            image = kind in _IMAGES
            raise SchemaError(
                f"expected parts of type text in {where}, got {f'a part of type {kind}' if kind else _shown(part)}",
                hint="no engine looks at images: docs/data.md says who does" if image else 'write {"type": "text", "text": "..."}',
                number=number,
                got=str(kind or type(part).__name__),
            )
        texts.append(part["text"])
    return "".join(texts)


def _of_text(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise SchemaError(
            f"expected JSON as the text of tools, got {text[:80]!r}: {error}",
            hint="write what json.dumps gives for the list of tools",
            got="str",
        ) from error


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool | int | float):
        return f"the number {value!r}"[:80]
    if isinstance(value, list | tuple) and not value:
        return "an empty list"
    return f"a {type(value).__name__}: {value!r}"[:200]
