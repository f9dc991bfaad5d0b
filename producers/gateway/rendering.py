"""Messages to tokens and a turn's tokens to what it says, in the policy's chat format."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, cast

import msgspec

from streamrl.data.tool_calls import NONE, ParsedTurn, ToolCall, tool_call_format
from streamrl.data.tool_calls.formats import HasTemplate
from streamrl.errors import ConfigError, SchemaError
from streamrl.producers.chat_format import ChatFormat
from streamrl.producers.gateway.content import ContentTokenizer
from streamrl.producers.gateway.entries import Tokens
from streamrl.producers.gateway.errors import refused
from streamrl.producers.gateway.messages import ASSISTANT, Message
from streamrl.producers.protocol import Tokenizer

_STAND_IN = "0123456789"


class Rendering:
    """One tokenizer's.

    Args:
        tokenizer: of the policy.
        chat_template: whether prompts are chat messages (`data.chat_template`).
        max_len: longest sequence in tokens; 0: any.
    """

    def __init__(self, tokenizer: Tokenizer, *, chat_template: bool, max_len: int) -> None:
        self.tokenizer = tokenizer
        self.content = ContentTokenizer(tokenizer, max_len)
        """The same for what agents have written."""
        self.chat_template = chat_template
        self._format = ChatFormat(self.content, chat_template=chat_template)
        self._calls = tool_call_format(cast("HasTemplate", tokenizer)) if chat_template else NONE

    def prompt(self, messages: Sequence[Message], tools: Any) -> list[int]:
        """A conversation up to where the model begins to write; raises ApiError when the template refuses it."""
        try:
            return self._format.prompt([message.for_template() for message in messages], tools)
        except (ConfigError, SchemaError) as error:
            raise refused(error.message, hint=error.hint, param="messages") from error

    def replies(self, messages: Sequence[Message], tools: Any, *, last_token: int) -> list[int]:
        """From the end of a model's turn, over these messages, to where it begins to write again.

        Among them may be turns of the assistant that no model has said here, which an agent has put in place of others: they are context
        like the rest.

        Raises:
            ApiError: the template does not render messages one after the other.
        """
        found: list[int] = []
        try:
            for is_turn, some in groupby(messages, key=lambda message: message.role == ASSISTANT):
                for message in some:
                    if is_turn:
                        found += self.content.encode(self._written(message, tools))
                    else:
                        found += self._format.reply(message.role, message.content, last_token=found[-1] if found else last_token)
                    self.content.check(len(found))
        except (ConfigError, SchemaError) as error:
            raise refused(error.message, hint=error.hint, param="messages") from error
        return found

    def _written(self, message: Message, tools: Any) -> str:
        """A turn of the assistant as the model would have written it, up to what closes it."""
        if not self.chat_template:
            return message.content
        opening = [{"role": "user", "content": "."}]
        render = self.content.apply_chat_template
        before = render(opening, tools=tools, add_generation_prompt=True)
        closing = render([*opening, {"role": ASSISTANT, "content": _STAND_IN}], tools=tools, add_generation_prompt=False)
        whole = render([*opening, message.for_template()], tools=tools, add_generation_prompt=False)
        end = closing.partition(_STAND_IN)[2]
        if not whole.startswith(before) or not whole.endswith(end):
            raise SchemaError(
                "the chat template does not write a turn behind what opens it, so that a rewritten turn has no tokens of its own",
                hint="keep the model's turns as they are, or replace everything behind the prompt",
            )
        return whole[len(before) : len(whole) - len(end)]

    def text(self, tokens: Tokens) -> str:
        """A turn's text, its stop token left out."""
        ids = tokens.token_ids
        return self.tokenizer.decode(ids[:-1] if tokens.finish_reason == "stop" else ids)

    def parsed(self, tokens: Tokens, tools: Any, call_ids: str) -> ParsedTurn:
        """What a turn says; its calls have the ids `<call_ids><number>`."""
        found = self._calls.parse(self.text(tokens), tools)
        calls = tuple(ToolCall(call.name, call.arguments, f"{call_ids}{number}") for number, call in enumerate(found.tool_calls))
        return msgspec.structs.replace(found, tool_calls=calls) if calls else found
