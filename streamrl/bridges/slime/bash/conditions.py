"""`[ ... ]` and `[[ ... ]]`: true, false, or not to be told from the text. Files are not looked at (bash(1), CONDITIONAL EXPRESSIONS)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from streamrl.bridges.slime.bash.values import Unknown, Value

_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
_LONGEST = 256
"""Of a pattern that is matched."""


def matches(text: str, pattern: str) -> bool | None:
    """Whether a glob fits the whole text; None for one that is too long to be tried."""
    if pattern == text:
        return True
    return fnmatchcase(text, pattern) if len(pattern) <= _LONGEST and len(text) <= 16 * _LONGEST else None


def holds(words: Sequence[Value], *, patterns: bool) -> bool | None:
    """What the words between the brackets say; None where that is not known.

    Args:
        words: expanded.
        patterns: `[[`: what stands right of `=` and `!=` is a pattern.
    """
    return _Condition(words, patterns).whole()


class _Condition:
    """By falling precedence: brackets, `!`, `&&` and `-a`, `||` and `-o`."""

    def __init__(self, words: Sequence[Value], patterns: bool) -> None:
        self._words, self._patterns, self._at = words, patterns, 0

    def whole(self) -> bool | None:
        if not self._words:
            return False
        value = self._any()
        return value if self._at == len(self._words) else None

    def _next(self) -> Value | None:
        return self._words[self._at] if self._at < len(self._words) else None

    def _any(self) -> bool | None:
        value = self._all()
        while self._next() in ("||", "-o"):
            self._at += 1
            other = self._all()
            value = True if value or other else None if value is None or other is None else False
        return value

    def _all(self) -> bool | None:
        value = self._not()
        while self._next() in ("&&", "-a"):
            self._at += 1
            other = self._not()
            value = False if value is False or other is False else None if value is None or other is None else True
        return value

    def _not(self) -> bool | None:
        odd = False
        while self._next() == "!":
            self._at += 1
            odd = not odd
        value = self._one()
        return value if value is None or not odd else not value

    def _one(self) -> bool | None:
        words = self._words[self._at : self._at + 3]
        if words and words[0] == "(" and self._patterns and ")" in self._words[self._at :]:
            # No brackets within brackets: what is read of them is what `&&` and `||` cut.
            end = self._at + list(self._words[self._at :]).index(")")
            inner = _Condition(self._words[self._at + 1 : end], self._patterns).whole()
            self._at = end + 1
            return inner
        if len(words) == 3 and isinstance(words[1], str) and words[1] in ("=", "==", "!=", "<", ">", "=~", "-ef", "-nt", "-ot", *_NUMBERS):
            self._at += 3
            return self._compared(words[0], words[1], words[2])
        if len(words) >= 2 and isinstance(words[0], str) and len(words[0]) == 2 and words[0].startswith("-"):
            self._at += 2
            if words[0] not in ("-z", "-n") or isinstance(words[1], Unknown):
                return None
            return (words[1] == "") == (words[0] == "-z")
        self._at += 1
        return None if not words or isinstance(words[0], Unknown) else words[0] != ""

    def _compared(self, left: Value, sign: str, right: Value) -> bool | None:
        if isinstance(left, Unknown) or isinstance(right, Unknown):
            return None
        if sign in _NUMBERS:
            try:
                return _NUMBERS[sign](int(left), int(right))
            except ValueError:
                return None
        if sign not in ("=", "==", "!="):
            return None
        equal = matches(left, right) if self._patterns else left == right
        return equal if equal is None else equal == (sign != "!=")
