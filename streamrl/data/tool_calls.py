"""Calls of tools in the text of a model's turn. For now every text is content."""

from __future__ import annotations

from typing import Any

import msgspec


class ToolCall(msgspec.Struct, frozen=True):
    """One call of a tool."""

    name: str
    arguments: dict[str, Any]
    id: str = ""


class ParsedTurn(msgspec.Struct, frozen=True):
    """What a turn says."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


class ToolCallFormat:
    """How one family of models writes calls."""

    def parse(self, text: str, tools: Any = None) -> ParsedTurn:
        """What a turn says."""
        return ParsedTurn(text)


def tool_call_format(tokenizer: Any, name: str = "auto") -> ToolCallFormat:
    """The format of a tokenizer."""
    return ToolCallFormat()
