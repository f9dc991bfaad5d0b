"""What stands between a model's turn and its next one, as tokens: the environment's message in the tokenizer's chat format.

A chat template renders whole conversations, but the model's tokens must stay as they were sampled. So a stand-in conversation is
rendered with and without the new message, and only the text that the message adds is tokenised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streamrl.errors import SchemaError
from streamrl.producers.protocol import Tokenizer

_STAND_IN = "0123456789"
"""Content of the stand-in assistant turn: plain characters, so that any vocabulary and any template keeps it as it is."""


class ChatFormat:
    """Tokens that carry a message from the environment, for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, *, chat_template: bool) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template

    def prompt(self, messages: Sequence[dict[str, Any]], tools: Any = None) -> list[int]:
        """A conversation's opening up to where the model begins to write."""
        return self._tokenizer.encode(self._tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True))

    def text_prompt(self, text: str) -> list[int]:
        """A text as a prompt: one user message, or the text itself where prompts are not chat messages."""
        return self.prompt([{"role": "user", "content": text}]) if self._chat_template else self._tokenizer.encode(text)

    def reply(self, role: str, content: str, *, last_token: int) -> list[int]:
        """Tokens from the end of a model's turn to where it begins to write again.

        Args:
            role: `tool`, `user` or `system`.
            content: the message.
            last_token: the turn's last token; when it is the token that closes a turn it is not repeated.

        Raises:
            SchemaError: the template does not render messages one after the other.
            ConfigError: it knows no such role.
        """
        if not self._chat_template:
            return self._tokenizer.encode(content)
        closing, answered = self._after_turn(None), self._after_turn({"role": role, "content": content})
        shown = answered != self._after_turn({"role": role, "content": content + "."})
        if not (shown and answered.startswith(closing)):
            raise SchemaError(
                f"the chat template does not append a {role!r} message to what stands before it, so its tokens cannot be told apart",
                hint="append the tokens with chat.append(token_ids), or use a template that renders messages one after the other",
            )
        closing_ids = self._tokenizer.encode(closing)
        if closing_ids and closing_ids[0] == last_token:
            closing_ids = closing_ids[1:]
        return closing_ids + self._tokenizer.encode(answered[len(closing) :])

    def _after_turn(self, message: dict[str, Any] | None) -> str:
        """What the template writes after the content of the stand-in turn; what stands before it may change with the message."""
        messages: list[dict[str, Any]] = [{"role": "user", "content": "."}, {"role": "assistant", "content": _STAND_IN}]
        if message is not None:
            messages.append(message)
        text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=message is not None)
        _, found, after = text.partition(_STAND_IN)
        if not found:
            raise SchemaError("the chat template leaves an assistant's content out", hint="append the tokens with chat.append(token_ids)")
        return after
