"""Text that others have written, to tokens: it says nothing in the template's name, and no more of it is read than the model could.

A message's content may hold the text of a special token, `<|im_end|>` say, because an agent wants to forge turns, or because a tool has
read it on some page. The template's own special tokens are those tokens; in content they are the characters that they are written with. So
content is veiled before the template is rendered: such a text is replaced by a mark, which becomes ordinary tokens afterwards.

Whoever wants to write special tokens asks with token ids or with a text (`/v1/completions`), where that is what the words mean. Neither way
is anything of it trained: what an agent says is context, and only what engines have sampled is a turn.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

from streamrl.producers.gateway.errors import too_long
from streamrl.producers.protocol import Tokenizer

_MARK = "\ufdd0"
"""A noncharacter of Unicode, which no text should hold; one that does has it veiled too."""
_FIRST = 0xE000
"""The character behind a mark says which text it stands for; Unicode leaves 6,400 from here on to whoever wants them."""
_CHARS_A_TOKEN = 8
"""Of a text that may be too long, so many for each token that there is room for are looked at first, then twice as many."""


class HasSpecials(Protocol):
    """The part of a tokenizer that is looked at."""

    @property
    def special_texts(self) -> Sequence[str]:
        """How its special tokens are written."""
        ...


class ContentTokenizer:
    """A tokenizer for messages that anybody may have written.

    Args:
        tokenizer: of the policy.
        max_len: longest sequence in tokens; 0: any.
    """

    def __init__(self, tokenizer: Tokenizer, max_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_len = max_len
        texts = cast("HasSpecials", tokenizer).special_texts
        self._veiled = (_MARK, *sorted((text for text in texts if text), key=len, reverse=True))
        self._hidden = re.compile("|".join(map(re.escape, self._veiled)))
        self._shown = re.compile(f"{_MARK}(.)", re.DOTALL)

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
        """As the tokenizer does, with content veiled."""
        veiled = [{name: value if name == "role" else self._veil(value) for name, value in message.items()} for message in messages]
        return self._tokenizer.apply_chat_template(
            veiled, tools=self._veil(tools), add_generation_prompt=add_generation_prompt, template_kwargs=template_kwargs
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of a text that was rendered here, or of any other; raises ApiError where there are more than the model can read."""
        pieces = self._shown.split(text)
        found = self._within(pieces[0])
        for which, piece in zip(pieces[1::2], pieces[2::2], strict=True):
            number = ord(which) - _FIRST
            plain = self._veiled[number] if 0 <= number < len(self._veiled) else _MARK + which
            # In two parts it is no special token.
            found += self._tokenizer.encode(plain[:1]) + self._tokenizer.encode(plain[1:]) + self._within(piece)
            self.check(len(found))
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """As the tokenizer does."""
        return self._tokenizer.decode(ids)

    def check(self, length: int) -> None:
        """Raise ApiError where so many tokens are more than the model can read."""
        if self._max_len and length >= self._max_len:
            raise too_long(length, self._max_len)

    def _within(self, text: str) -> list[int]:
        """Tokenising is slow, and holds up everybody else: a text of megabytes is refused by its beginning."""
        looked_at = _CHARS_A_TOKEN * self._max_len
        while self._max_len and looked_at < len(text):
            self.check(len(self._tokenizer.encode(text[:looked_at])) - 1)  # its last token may become part of a longer one
            looked_at *= 2
        found = self._tokenizer.encode(text) if text else []
        self.check(len(found))
        return found

    def _veil(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._hidden.sub(lambda found: _MARK + chr(_FIRST + self._veiled.index(found[0])), value)
        if isinstance(value, Mapping):
            return {self._veil(name): self._veil(one) for name, one in cast("Mapping[Any, Any]", value).items()}
        if isinstance(value, list | tuple):
            return [self._veil(one) for one in cast("list[Any]", value)]
        return value
