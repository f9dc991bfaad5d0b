"""What a model's turn says, read from its text: thoughts, content, calls of tools, and calls that are broken."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec


class ToolCall(msgspec.Struct, frozen=True):
    """One call of a tool."""

    name: str
    arguments: dict[str, Any]
    """What JSON can say: at most `streamrl.data.tool_calls.json_calls.MAX_DEPTH` deep, numbers finite, texts valid UTF-8."""
    id: str = ""
    """Given by who hands the call on; no format here has one in its text."""


class Malformed(msgspec.Struct, frozen=True):
    """What begins like a call and is none."""

    text: str
    """As the model wrote it; it is part of the content too."""
    problem: str


class ParsedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A turn's text in parts. Nothing of it is lost: what is no thought and no call is content."""

    content: str
    """Blank space beside thoughts and calls is left out."""
    reasoning: str = ""
    """What stands between `<think>` and `</think>`."""
    tool_calls: tuple[ToolCall, ...] = ()
    """In the order of the text."""
    malformed: tuple[Malformed, ...] = ()


class Piece(NamedTuple):
    """A part of a turn's text: content, calls, or a broken call."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    problem: str = ""
    """Of a broken call."""
