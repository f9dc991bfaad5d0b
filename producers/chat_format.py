"""What stands between a model's turn and its next one, as tokens: the environment's messages in the tokenizer's chat format.

A chat template renders whole conversations, but the model's tokens must stay as they were sampled. So a stand-in conversation is
rendered with and without the new messages, and only the text that they add is tokenised. What a template does to earlier turns (Qwen3
leaves their thoughts out) therefore changes no token that is there already.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from streamrl.data.messages import plain_messages
from streamrl.errors import ConfigError, SchemaError
from streamrl.producers.protocol import Tokenizer

_STAND_INS = ("0123456789", "9876543210", "1357924680", "8642097531")
"""Content of the stand-in assistant turn: plain characters, so that any vocabulary and any template keeps it as it is. The first that
does not stand in the tools is taken."""
_ROLES = 64
"""Sequences of roles of which is remembered that the template shows them; so many closings are remembered too."""

Message = Mapping[str, Any]


class ChatFormat:
    """Tokens that carry messages from the environment, for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, *, chat_template: bool) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._shown: set[tuple[Any, ...]] = set()
        self._closings: dict[bytes, tuple[str, list[int]]] = {}
        """What closes a turn, and its first token, by the key of the rendering: nothing else decides on it."""

    def prompt(self, messages: Sequence[Message], tools: Any = None, template_kwargs: Mapping[str, Any] | None = None) -> list[int]:
        """A conversation's opening up to where the model begins to write."""
        text = self._tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, template_kwargs=template_kwargs)
        return self._tokenizer.encode(text)

    def opening(self, messages: Sequence[Message], tools: Any = None, template_kwargs: Mapping[str, Any] | None = None) -> list[int]:
        """`prompt`; or the contents themselves, behind what the tokenizer begins a text with, where prompts are not chat messages."""
        if self._chat_template:
            return self.prompt(messages, tools, template_kwargs)
        return self._tokenizer.encode("".join(message.get("content", "") for message in plain_messages(messages)), add_special_tokens=True)

    def text_prompt(self, text: str, template_kwargs: Mapping[str, Any] | None = None) -> list[int]:
        """A text as a prompt: one user message, or the text itself, as `opening`, where prompts are not chat messages."""
        if not self._chat_template:
            return self._tokenizer.encode(text, add_special_tokens=True)
        return self.prompt([{"role": "user", "content": text}], template_kwargs=template_kwargs)

    def opens_thought(self, token_ids: Sequence[int]) -> bool:
        """Whether the model's turn after these tokens begins within a thought, which its template has opened."""
        return opens_thought(self._tokenizer, token_ids)

    def reply(self, role: str, content: str, *, last_token: int) -> list[int]:
        """`replies` of one message."""
        return self.replies([{"role": role, "content": content}], last_token=last_token)

    def replies(
        self,
        messages: Sequence[Message],
        *,
        last_token: int,
        tools: Any = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Tokens from the end of a model's turn to where it begins to write again.

        Args:
            messages: one or several, each with `role` (`tool`, `user` or `system`) and `content`
                (text, or its parts); those of tools may have `name` and `tool_call_id`.
            last_token: the turn's last token; when it closes the turn, nothing closes it again.
            tools: as in the prompt; for templates in which they change more than its beginning.
            template_kwargs: variables of the template, which decide how the next turn begins (`enable_thinking`).

        Raises:
            SchemaError: messages of another form; the template does not render messages one after the other.
            ConfigError: it knows no such role, or reads no such variable.
        """
        messages = plain_messages(messages)
        for message in messages:
            _check(message)
        if not self._chat_template:
            return self._tokenizer.encode("".join(message["content"] for message in messages))
        stand_in = _Rendering(self._tokenizer, tools, template_kwargs or {})
        closing, closes = self._closing(stand_in)
        ids = self._tokenizer.encode(closing + self._added(stand_in, messages, closing))
        if closes and ids[:1] == closes:
            stops = self._tokenizer.stop_ids
            # A turn may have ended with another of the tokens that do (`<|eom_id|>`).
            if last_token == ids[0] or (last_token in stops and ids[0] in stops):
                return ids[1:]
        return ids

    def _closing(self, stand_in: _Rendering) -> tuple[str, list[int]]:
        if (known := self._closings.get(stand_in.key)) is not None:
            return known
        closing = stand_in.after(stand_in.turn(), [])
        found = closing, self._tokenizer.encode(closing)[:1]
        if len(self._closings) < _ROLES:
            self._closings[stand_in.key] = found
        return found

    def _added(self, stand_in: _Rendering, messages: Sequence[Message], closing: str) -> str:
        """What the template writes for the messages, after all that closes the turn before them."""
        refused: ConfigError | SchemaError | None = None
        for turn in stand_in.turns(messages):
            try:
                closed = stand_in.after(turn, []) if "tool_calls" in turn else closing
                answered = stand_in.after(turn, messages)
                if answered.startswith(closed) and self._shows(stand_in, turn, messages):
                    return answered[len(closed) :]
            except (ConfigError, SchemaError) as error:  # some templates know results only after calls
                refused = refused or error
        if refused is not None:
            raise refused
        roles = " and ".join(dict.fromkeys(f"{message['role']!r}" for message in messages))
        raise SchemaError(
            f"the chat template does not append a {roles} message to what stands before it, so its tokens cannot be told apart",
            hint="append the tokens with chat.append(token_ids), or use a template that renders messages one after the other",
        )

    def _shows(self, stand_in: _Rendering, turn: Message, messages: Sequence[Message]) -> bool:
        """Whether the template writes each message once, in their order."""
        key = (*(message["role"] for message in messages), "tool_calls" in turn, stand_in.key)
        if key in self._shown:
            return True
        marks = [f"75{10_000 + number}57" for number in range(len(messages))]
        text = stand_in.after(turn, [{**message, "content": mark} for message, mark in zip(messages, marks, strict=True)])
        places = [text.find(mark) for mark in marks]
        shown = places[0] >= 0 and places == sorted(places) and all(text.count(mark) == 1 for mark in marks)
        if shown and len(self._shown) < _ROLES:
            self._shown.add(key)
        return shown


def opens_thought(tokenizer: Tokenizer, token_ids: Sequence[int]) -> bool:
    """Tell whether what follows these tokens begins within a thought."""
    return tokenizer.decode(token_ids[-16:]).rstrip().endswith("<think>")


class _Rendering:
    """A conversation of a question and a stand-in turn, and what the template writes after that turn."""

    def __init__(self, tokenizer: Tokenizer, tools: Any, template_kwargs: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._tools = tools
        self._template_kwargs = template_kwargs
        given = repr((tools, sorted(template_kwargs.items())))
        self.key = hashlib.sha256(given.encode(errors="replace")).digest()
        """Equal for renderings that differ in nothing."""
        self._content = next((text for text in _STAND_INS if text not in given), _STAND_INS[0])

    def turn(self) -> Message:
        """The stand-in turn."""
        return {"role": "assistant", "content": self._content}

    def turns(self, messages: Sequence[Message]) -> Iterator[Message]:
        """The stand-in turn, and for results the same with the calls that they answer."""
        yield self.turn()
        results = [message for message in messages if message["role"] == "tool"]
        if results:
            calls = [
                {
                    "id": message.get("tool_call_id") or f"call{number:05}",
                    "type": "function",
                    "function": {"name": message.get("name") or "tool", "arguments": {}},
                }
                for number, message in enumerate(results)
            ]
            yield {**self.turn(), "tool_calls": calls}

    def after(self, turn: Message, messages: Sequence[Message]) -> str:
        """What the template writes after the stand-in's content; what stands before it may change with the messages."""
        text = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": "."}, turn, *messages],
            tools=self._tools,
            add_generation_prompt=bool(messages),
            template_kwargs=self._template_kwargs,
        )
        _, found, after = text.partition(self._content)
        if not found:
            raise SchemaError("the chat template leaves an assistant's content out", hint="append the tokens with chat.append(token_ids)")
        return after


def _check(message: Message) -> None:
    if "content" not in message:
        raise SchemaError(f"expected a message with role and content, got {message!r}"[:300])
    if message["role"] == "assistant":
        raise SchemaError(
            "an assistant's message is the model's turn, got one from the environment",
            hint="let the model write it with chat.generate(), or give what it is to read as a user message",
        )
