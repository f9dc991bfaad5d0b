"""Calls of tools in the text of a model's turn: `tool_call_format(tokenizer).parse(text)`."""

from streamrl.data.tool_calls.formats import MAX_CALLS, NONE, ToolCallFormat, tool_call_format
from streamrl.data.tool_calls.turns import Malformed, ParsedTurn, ToolCall

__all__ = ["MAX_CALLS", "NONE", "Malformed", "ParsedTurn", "ToolCall", "ToolCallFormat", "tool_call_format"]
