r"""Whole conversations as training data: token ids as the chat template gives them, and which of them the model is to write.

The ids are those of the rendered conversation, never put together from pieces, so what is trained on is what the template says. A turn of
the model begins behind the text with which the template opens it, and ends with the token that ends a turn:

```text
<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n5<|im_end|>\n
                                                        [ trained                         ]
```

Where a message's text stands in the whole is found by rendering it once more with a mark behind that message, since templates leave things
out of earlier turns (thoughts), put things in (a system message) and move others. A template in which that cannot be told is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from streamrl.data.messages import plain_messages
from streamrl.data.tokenizer import Tokenizer
from streamrl.errors import SchemaError

_MARKS = ("7510001357", "8642098642", "3141592653")
"""Put behind a message's text: digits, which any template keeps. The first that does not stand in the conversation is taken."""
WEIGHTS = ("weight", "step_loss_mask")
"""Fields of an assistant's message that may say 0: it is read and not trained."""

Message = Mapping[str, Any]


def split(messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """A conversation as what stands before the model's first turn, and the rest."""
    head = list(itertools.takewhile(lambda message: message.get("role") != "assistant", messages))
    return head, list(messages[len(head) :])


def is_answer(label: Any) -> bool:
    """Whether a label is what `split` left behind the head."""
    return isinstance(label, list) and bool(label) and isinstance(label[0], dict) and label[0].get("role") == "assistant"


def encode_conversation(
    tokenizer: Tokenizer, messages: Sequence[Message], *, tools: Any = None, template_kwargs: Mapping[str, Any] | None = None
) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation, and for each whether it is trained on: the tokens of the assistant's turns, their end included.

    A token that the template's opening and the turn's first character share is not trained.

    Example: `user: 2+3?`, `assistant: 5` in Qwen's template gives the ids of the text above, and True for those of `5` and `<|im_end|>`.

    Args:
        tokenizer: with a chat template.
        messages: with `role` and `content`, and what else the template reads (`tool_calls`, `reasoning_content`, `name`). An assistant's
            with `weight` or `step_loss_mask` of 0 is not trained. Control tokens in its texts are tokens, in others' they are characters.
        tools: definitions for templates that show them.
        template_kwargs: further variables of the template.

    Raises:
        SchemaError: a message of another form; no turn that is trained; a turn whose place the template does not show; a text of the
            assistant's that writes out a token which begins or ends turns.
        ConfigError: the template refuses the messages, or shows no tools where there are some.
    """
    plain, given = plain_messages(messages), template_kwargs or {}
    tokenizer.check_shown(plain, tools, given)
    rendered = _Rendered(tokenizer, plain, tools, given)
    ids, offsets = tokenizer.encode_with_offsets(rendered.text)
    begins = [0, *(end for _, end in offsets[:-1])]  # a vocabulary may leave spaces out of its offsets
    stops = [begin if token in tokenizer.stop_ids else -1 for token, begin in zip(ids, begins, strict=True)]
    mask = [False] * len(ids)
    behind = 0
    for index, message in enumerate(plain):
        if message["role"] != "assistant":
            continue
        start, end = rendered.turn(index, behind)
        last = next((place for place, begin in enumerate(stops) if begin >= end), None)
        following = rendered.place(index + 1) if index + 1 < len(plain) else None
        if last is None or (following is not None and begins[last] > following):
            raise SchemaError(f"the chat template writes no token that ends the assistant's turn, message {index + 1} of {len(plain)}")
        behind = offsets[last][1]
        if all(message.get(name) != 0 for name in WEIGHTS):
            for place in range(last + 1):
                mask[place] |= begins[place] >= start
    if not any(mask):
        raise SchemaError("expected an assistant's turn to train on, got a conversation without one", hint="leave the row out")
    return ids, mask


class _Rendered:
    """A conversation as text, and where its parts stand in it."""

    def __init__(self, tokenizer: Tokenizer, messages: Sequence[Message], tools: Any, template_kwargs: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._messages = [dict(message) for message in messages]
        self._tools = tools
        self._template_kwargs = template_kwargs
        self.text = self._render(self._messages)
        self._mark = next((mark for mark in _MARKS if mark not in self.text), "")
        if not self._mark:
            raise SchemaError(f"a conversation must not hold all of the numbers {', '.join(_MARKS)}: they are used as marks")
        asked: list[dict[str, Any]] = [{"role": "user", "content": "."}]
        before, opened = self._render(asked), self._render(asked, add_generation_prompt=True)
        self._opening = opened[len(before) :] if opened.startswith(before) else ""
        self._places: dict[int, int | None] = {}
        self._refuse_tokens({*tokenizer.stop_ids, *tokenizer.encode(self._opening)[:1]})

    def place(self, index: int) -> int | None:
        """Where the text of a message ends; None where the template does not show it."""
        if index not in self._places:
            content = self._messages[index].get("content") or ""
            self._places[index] = self._find(index, f"{content.rstrip()}{self._mark}")
        return self._places[index]

    def turn(self, index: int, behind: int) -> tuple[int, int]:
        """Where the assistant's message begins, and a place from which on the turn may end; it stands after `behind`."""
        place = self.place(index)
        before = self.place(index - 1) if index else 0
        behind = max(behind, before or 0)
        # The prompt of a turn may open or skip its thought, where an earlier turn has none.
        for opening in (self._opening, self._opening.partition("<think>")[0]):
            found = self.text.find(opening, behind, None if place is None else max(place, behind)) if opening else -1
            if found >= 0:
                start = found + len(opening)
                return start, max(start, place or 0)
        # After results some templates open no turn: then it begins with its text.
        start = self._find(index, f"{self._mark}{self._messages[index].get('content') or ''}")
        if start is None or start < behind:
            raise SchemaError(
                f"the chat template does not show where the assistant's turn begins, message {index + 1} of {len(self._messages)}",
                hint="use a template that opens it as it opens the model's turn when it is asked",
            )
        return start, max(start, place or 0)

    def _find(self, index: int, marked: str) -> int | None:
        """Where the mark stands when a message has the content `marked`; None where it does not, or the text before it is another."""
        message = {**self._messages[index], "content": marked}
        text = self._render([*self._messages[:index], message, *self._messages[index + 1 :]])
        place = text.find(self._mark)
        return place if place >= 0 and text[:place] == self.text[:place] else None

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        return self._tokenizer.apply_chat_template(
            messages,
            tools=self._tools,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=self._template_kwargs,
            own_turns=True,
        )

    def _refuse_tokens(self, token_ids: set[int]) -> None:
        """Raise SchemaError where the assistant's texts write out a token of these: it would begin or end a turn."""
        forbidden = [text for text in map(self._tokenizer.text_of, sorted(token_ids)) if text in self._tokenizer.control_texts]
        for number, message in enumerate(self._messages, 1):
            for text in _texts(message) if message["role"] == "assistant" else ():
                if found := next((one for one in forbidden if one in text), None):
                    raise SchemaError(
                        f"expected texts without {found!r}, which begins or ends turns, got one in message {number}",
                        hint="the template writes it: take it out of the text",
                        number=number,
                    )


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)
