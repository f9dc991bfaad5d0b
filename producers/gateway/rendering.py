"""Messages to tokens and a turn's tokens to what it says, in the policy's chat format."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any

import msgspec

from streamrl.data.tool_calls import NONE, ParsedTurn, ToolCall, tool_call_format
from streamrl.errors import ConfigError, SchemaError
from streamrl.producers.chat_format import ChatFormat
from streamrl.producers.completions import text_of
from streamrl.producers.gateway.content import BoundedTokenizer
from streamrl.producers.gateway.entries import Tokens
from streamrl.producers.gateway.errors import refused
from streamrl.producers.gateway.messages import ASSISTANT, Message
from streamrl.producers.protocol import Context
from streamrl.schemas.tasks import Sampling

_STAND_IN = "0123456789"


class Rendering:
    """Of one task: its row may have variables of the template of its own.

    Args:
        context: of the task.
        like: that of another task of the run, which has rendered already what is the same for both.
    """

    def __init__(self, context: Context, like: Rendering | None = None) -> None:
        self.tokenizer = context.tokenizer
        self.chat_template = context.chat_template
        self.content = BoundedTokenizer(context.tokenizer, context.max_len) if like is None else like.content
        """The same for what agents have written."""
        self._format = ChatFormat(self.content, chat_template=context.chat_template) if like is None else like._format
        self._calls = tool_call_format(context.tokenizer, context.tool_calls) if context.chat_template else NONE
        self._given = {**context.template_kwargs, **(context.task.chat_template_kwargs or {})}

    def prompt(self, messages: Sequence[Message], tools: Any) -> list[int]:
        """A conversation up to where the model begins to write; raises ApiError when the template refuses it."""
        try:
            return self._format.opening([message.for_template() for message in messages], tools, self._given)
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
                if is_turn:
                    for message in some:
                        found += self._written(message, tools)
                        self.content.check(len(found))
                else:
                    env, last = [message.for_template() for message in some], found[-1] if found else last_token
                    found += self._format.replies(env, last_token=last, tools=tools, template_kwargs=self._given)
        except (ConfigError, SchemaError) as error:
            raise refused(error.message, hint=error.hint, param="messages") from error
        return found

    def _written(self, message: Message, tools: Any) -> list[int]:
        """A turn of the assistant as the model would have written it, up to what closes it."""
        return self.content.encode(self._turn(message, tools) if self.chat_template else message.content)

    def _turn(self, message: Message, tools: Any) -> str:
        opening = [{"role": "user", "content": "."}]
        render = partial(self.content.apply_chat_template, tools=tools, template_kwargs=self._given)
        before = render(opening, add_generation_prompt=True)
        closing = render([*opening, {"role": ASSISTANT, "content": _STAND_IN}], add_generation_prompt=False)
        whole = render([*opening, message.for_template()], add_generation_prompt=False)
        end = closing.partition(_STAND_IN)[2]
        if not whole.startswith(before) or not whole.endswith(end):
            raise SchemaError(
                "the chat template does not write a turn behind what opens it, so that a rewritten turn has no tokens of its own",
                hint="keep the model's turns as they are, or replace everything behind the prompt",
            )
        return whole[len(before) : len(whole) - len(end)]

    def text(self, tokens: Tokens, sampling: Sampling) -> str:
        """A turn's text, its stop token left out, up to the first of its stop strings."""
        return text_of(tokens.segment(sampling), tokens.finish_reason, self.tokenizer)

    def parsed(self, text: str, tools: Any, prompt_ids: Sequence[int], call_ids: str = "") -> ParsedTurn:
        """What a turn of this `text` says after a prompt; its calls have the ids `<call_ids><number>`."""
        thinking = self._format.opens_thought(prompt_ids) if self.chat_template else False
        found = self._calls.parse(text, tools, thinking=thinking or None)
        calls = tuple(ToolCall(call.name, call.arguments, f"{call_ids}{number}") for number, call in enumerate(found.tool_calls))
        return msgspec.structs.replace(found, tool_calls=calls) if calls else found
