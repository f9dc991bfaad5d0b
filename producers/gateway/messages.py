"""Messages between an agent and the model, whichever API they came by, and digests that tell one that has come before."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Literal

import msgspec

from streamrl.data.tool_calls import ToolCall

ASSISTANT = "assistant"
DIGEST_BYTES = 16
Given = Literal["all calls", "first call", "no calls"]
"""Forms in which the calls of a turn are given back to the agent; with `no calls` they are part of its text."""
_encoder = msgspec.json.Encoder(order="sorted")


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One message. `reasoning` and `tool_calls` are the model's."""

    role: str
    """`system`, `user`, `assistant` or `tool`."""
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    """Of a tool's result: which call it answers."""
    name: str = ""

    def digest(self) -> bytes:
        """Equal for messages that mean the same.

        What the model said is known by its value: text without the spaces around it, calls by name and arguments. Its thinking, and the ids
        of its calls, may be left out by who gives it back.
        """
        if self.role == ASSISTANT:
            return said(self.content, self.tool_calls)
        return _digest([self.role, self.content, self.name, self.tool_call_id])

    def for_template(self) -> dict[str, Any]:
        """As chat templates take it."""
        found: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning:
            found["reasoning_content"] = self.reasoning
        if self.tool_calls:
            found["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        for name, value in (("tool_call_id", self.tool_call_id), ("name", self.name)):
            if value:
                found[name] = value
        return found


def said(content: str, tool_calls: Sequence[ToolCall]) -> bytes:
    """Digest of a model's turn by its value."""
    return _digest([ASSISTANT, content.strip(), [[call.name, call.arguments] for call in tool_calls]])


def digest_of(value: Any) -> bytes:
    """Of plain values: equal where they are."""
    return _digest(value)


def _digest(value: Any) -> bytes:
    return blake2b(_encoder.encode(value), digest_size=DIGEST_BYTES).digest()
