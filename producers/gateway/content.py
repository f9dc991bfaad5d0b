"""Text that agents have written, to tokens: no more of it is read than the model could."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from streamrl.producers.gateway.errors import too_long
from streamrl.producers.protocol import Tokenizer

_CHARS_A_TOKEN = 8
"""Of a text that may be too long, so many for each token that there is room for are looked at first, then twice as many."""


class BoundedTokenizer:
    """A tokenizer for messages that anybody may have written.

    What they say is context, and never one of the template's own tokens (`streamrl.data.control_tokens`). Whoever wants to write those asks
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

    def encode(self, text: str) -> list[int]:
        """Token ids of a text that was rendered here, or of any other; raises ApiError where there are more than the model can read.

        Tokenising is slow, and holds up everybody else: a text of megabytes is refused by its beginning.
        """
        looked_at = _CHARS_A_TOKEN * self._max_len
        while self._max_len and looked_at < len(text):
            self.check(len(self._tokenizer.encode(text[:looked_at])) - 1)  # its last token may become part of a longer one
            looked_at *= 2
        found = self._tokenizer.encode(text) if text else []
        self.check(len(found))
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """As the tokenizer does."""
        return self._tokenizer.decode(ids)

    def check(self, length: int) -> None:
        """Raise ApiError where so many tokens are more than the model can read."""
        if self._max_len and length >= self._max_len:
            raise too_long(length, self._max_len)
