"""Messages to tokens, no more of them than the model can read, and a turn's tokens to what it says, in the policy's chat format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import msgspec

from streamrl.data.tool_calls import NONE, ParsedTurn, ToolCall, tool_call_format
from streamrl.errors import ConfigError, SchemaError
from streamrl.producers.chat_format import ChatFormat
from streamrl.producers.completions import text_of
from streamrl.producers.gateway.entries import Tokens
from streamrl.producers.gateway.errors import refused, too_long
from streamrl.producers.gateway.messages import ASSISTANT, Given, Message, said
from streamrl.producers.protocol import Context, Tokenizer
from streamrl.schemas.tasks import Sampling

_STAND_IN = "0123456789"
_CHARS_A_TOKEN = 8
"""A text that may be too long is looked at up to so many characters for each token that there is room for, then up to twice as many."""


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

    def parsed(self, text: str, tools: Any, prompt_ids: Sequence[int], call_ids: str = "", *, given: Given = "all calls") -> ParsedTurn:
        """What a turn of this `text` says after a prompt; its calls have the ids `<call_ids><number>`."""
        thinking = self._format.opens_thought(prompt_ids) if self.chat_template else False
        calls_format = NONE if given == "no calls" else self._calls
        found = calls_format.parse(text, tools, thinking=thinking or None)
        calls = tuple(ToolCall(call.name, call.arguments, f"{call_ids}{number}") for number, call in enumerate(found.tool_calls))
        return msgspec.structs.replace(found, tool_calls=calls[:1] if given == "first call" else calls) if calls else found

    def said(self, text: str, tools: Any, prompt_ids: Sequence[int]) -> list[bytes]:
        """Digests of a turn in each form in which it may be given back, that of the whole one first."""
        whole = self.parsed(text, tools, prompt_ids)
        others: list[Given] = ["first call", "no calls"] if whole.tool_calls else []
        turns = [whole, *(self.parsed(text, tools, prompt_ids, given=given) for given in others)]
        return list(dict.fromkeys(said(turn.content, turn.tool_calls) for turn in turns))


class BoundedTokenizer:
    """A tokenizer for messages that anybody may have written.

    What they say is context, and never one of the template's own tokens (`streamrl.data.tokenizer`). Whoever wants to write those asks
    with token ids or with a text (`/v1/completions`), where that is what the words mean. Neither way is anything of it trained: only what
    engines have sampled is a turn.

    Args:
        tokenizer: of the policy.
        max_len: longest sequence in tokens; 0: any.
    """

    def __init__(self, tokenizer: Tokenizer, max_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_len = max_len

    @property
    def chat_template(self) -> str:
        """The tokenizer's."""
        return self._tokenizer.chat_template

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokenizer's."""
        return self._tokenizer.stop_ids

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Any = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """As the tokenizer does."""
        return self._tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, template_kwargs=template_kwargs
        )

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text that was rendered here, or of any other; raises ApiError where there are more than the model can read.

        Tokenising is slow, and holds up everybody else: a text of megabytes is refused by its beginning.
        """
        looked_at = _CHARS_A_TOKEN * self._max_len
        while self._max_len and looked_at < len(text):
            self.check(len(self._tokenizer.encode(text[:looked_at])) - 1)  # its last token may become part of a longer one
            looked_at *= 2
        found = self._tokenizer.encode(text, add_special_tokens=add_special_tokens) if text else []
        self.check(len(found))
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """As the tokenizer does."""
        return self._tokenizer.decode(ids)

    def check(self, length: int) -> None:
        """Raise ApiError where so many tokens are more than the model can read."""
        if self._max_len and length >= self._max_len:
            raise too_long(length, self._max_len)
