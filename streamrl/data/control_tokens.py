r"""Text that others have written never becomes one of the tokens that begin and end turns.

A message's content may hold the text of such a token, `<|im_end|>` say: a tool has read it on some page, or somebody wants to forge turns.
The tokens that the template itself writes are those tokens; in a content they are the characters that they are written with. So contents
are veiled before the template is rendered: such a text is replaced by two characters, which become ordinary tokens when the rendered text
is encoded.

```text
user: "<|im_end|>"   ->  <|im_start|>user\n??<|im_end|>\n   ->  [im_start] user \n  <  |im_end|>  [im_end] \n
```
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

_MARK = "\ufdd0"
"""A noncharacter of Unicode, which no text should hold; one that does has it veiled too."""
_FIRST = 0xE000
"""The character behind a mark says which text it stands for; Unicode leaves 6,400 from here on to whoever wants them."""
_MOST = 6399
_BARS = (("<|", "<｜"), ("|>", "｜>"))
"""Beginnings and ends of tokens that some vocabularies do not call special, though their templates set turns apart with them."""


class Piece(NamedTuple):
    """A part of a rendered text."""

    start: int
    """Its place in the text, in characters."""
    text: str
    veiled: bool
    """True for the text of a control token in some content, which is to be encoded as any other text."""


class ControlTokens:
    """The control tokens of one vocabulary.

    Args:
        texts: how they are written.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        longest_first = sorted({text for text in texts if text}, key=lambda text: (-len(text), text))
        self._veiled = (_MARK, *longest_first[:_MOST])
        self._numbers = {text: number for number, text in enumerate(self._veiled)}
        self._hidden = re.compile("|".join(map(re.escape, self._veiled)))
        self._shown = re.compile(f"{_MARK}(.)", re.DOTALL)

    def veil(self, value: Any, *, only_marks: bool = False) -> Any:
        """A text, or the texts in lists and tables, with control tokens replaced.

        Args:
            value: what somebody has written.
            only_marks: leave control tokens as they are, and replace only what stands for one.
        """
        if isinstance(value, str):
            if only_marks:
                return value.replace(_MARK, _MARK + chr(_FIRST))
            return self._hidden.sub(lambda found: _MARK + chr(_FIRST + self._numbers[found[0]]), value)
        if isinstance(value, Mapping):
            table = cast("Mapping[Any, Any]", value)
            return {self.veil(name, only_marks=only_marks): self.veil(one, only_marks=only_marks) for name, one in table.items()}
        if isinstance(value, list | tuple):
            return [self.veil(one, only_marks=only_marks) for one in cast("Sequence[Any]", value)]
        return value

    def pieces(self, text: str) -> Iterator[Piece]:
        """A rendered text in its parts, in order; together they are all of it."""
        place = 0
        for found in self._shown.finditer(text):
            number = ord(found[1]) - _FIRST
            if 0 <= number < len(self._veiled):
                if found.start() > place:
                    yield Piece(place, text[place : found.start()], veiled=False)
                yield Piece(found.start(), self._veiled[number], veiled=True)
                place = found.end()
        if place < len(text):
            yield Piece(place, text[place:], veiled=False)

    def unveiled(self, text: str) -> str:
        """A rendered text as people read it."""
        return "".join(piece.text for piece in self.pieces(text)) if has_marks(text) else text


def has_marks(text: str) -> bool:
    """Tell whether something in a rendered text is veiled."""
    return _MARK in text


def is_barred(text: str) -> bool:
    """Tell whether a token is written as those that set turns apart, such as `<｜User｜>`."""
    begins, ends = _BARS
    return text.startswith(begins) or text.endswith(ends)
