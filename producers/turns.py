"""One completion of the model within a chat, and what its text says."""

from __future__ import annotations

from typing import Any

import msgspec

from streamrl.data.tool_calls import Malformed, ToolCall, ToolCallFormat


class Turn(msgspec.Struct, frozen=True, omit_defaults=True):
    """One completion of the model within a chat."""

    text: str
    """Decoded, without the stop token."""
    token_ids: tuple[int, ...]
    """As sampled; a stop token is the last."""
    finish_reason: str
    """`stop` or `length`."""
    content: str = ""
    """The text without thoughts and calls."""
    reasoning: str = ""
    """What stands between `<think>` and `</think>`."""
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: tuple[Malformed, ...] = ()
    """What begins like a call and is none, each with its problem; part of the content too."""

    def parsed(self, format: ToolCallFormat, tools: Any, *, thinking: bool) -> Turn:
        """With what its text says filled in; `thinking` says that the prompt has opened its thought."""
        said = format.parse(self.text, tools, thinking=thinking or None)
        return msgspec.structs.replace(
            self, content=said.content, reasoning=said.reasoning, tool_calls=said.tool_calls, malformed=said.malformed
        )

    def bare(self) -> Turn:
        """Without that: it can be read again."""
        return Turn(self.text, self.token_ids, self.finish_reason)
