r"""Answers of mathematics as short texts that can be compared letter by letter (Minerva, arXiv 2206.14858, appendix D.1)."""

from __future__ import annotations

import re
from fractions import Fraction

LONGEST = 2000
"""Characters. No answer is longer."""
_REPLACED = (
    (re.compile(r"\ban?\s"), ""),
    (re.compile(r"\.\$"), "$"),
    (re.compile(r"\\\$|\\\s|\s"), ""),
    (re.compile(r"mbox"), "text"),
    (re.compile(r",?\\text\{and\}"), ","),
    (re.compile(r"\\text\{m\}"), ""),
)
_UNITS = (
    "childrentickets|multiples|integers|students|dollars|minutes|degrees|square|inches|points|digits|pounds|meters|meals|edges|units|hours"
    "|cents|feet|ways|mph|ft|km|cm|gm"
)
_REMOVED = re.compile(
    "|".join(
        [
            rf"(?<![a-zA-Z\\])(?:{_UNITS})+(?![a-zA-Z])",
            r"\\text\{[.s]?\}(?:\^[23])?",
            r"\\mathrm\{th\}",
            r"\^\\circ|\^\{\\circ\}",
            r"\\;|,?\\!|\{,\}",
            r"\\l?dots",
            '"',
        ]
    )
)
_MATHEMATICS = re.compile(r"\$([^$]*)\$")
_WRAPPED = re.compile(r"\\(?:text|textbf|overline|boxed|mathrm|mathbf)\{([^{}]*)\}")
_SHORT_FRACTION = re.compile(r"frac([^{\\])([^{\\])")
_SHORT_ROOT = re.compile(r"sqrt([^{\\])")
_FRACTION = re.compile(r"(-?)\\[dt]?frac\{(-?\d{1,60})\}\{(\d{1,60})\}")
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d*)?")
_NUMBER = re.compile(r"[-+]?(?:\d{1,60}(?:\.\d{0,60})?|\.\d{1,60})(?:/\d{1,60})?")


def normalized(answer: str) -> str:
    """Without what is no part of the value (units, spaces, dollar signs, what stands before the last `=`); short LaTeX written out."""
    text = answer[:LONGEST].rpartition("=")[2]
    for pattern, by in _REPLACED:
        text = pattern.sub(by, text)
    text = _REMOVED.sub("", text)
    if found := _MATHEMATICS.search(text):
        text = found[1]
    text = _WRAPPED.sub(r"\1", text)
    text = _SHORT_FRACTION.sub(r"frac{\1}{\2}", text)
    text = _SHORT_ROOT.sub(r"sqrt{\1}", text).replace("$", "")
    return (text.replace(",", "") if _THOUSANDS.fullmatch(text) else text).rstrip(".")


def number(text: str) -> Fraction | None:
    r"""The exact value of a normalized text that is a number and nothing else: `-3`, `0.5`, `1/2`, `\frac{1}{2}`; else None."""
    text = _FRACTION.sub(r"\1\2/\3", text)
    if not _NUMBER.fullmatch(text):
        return None
    top, _, bottom = text.partition("/")
    try:
        return Fraction(top) / Fraction(bottom or 1)
    except (ValueError, ZeroDivisionError):
        return None


def same(one: str, other: str) -> bool:
    """Whether two answers are the same text once they are normalized, or the same number."""
    one, other = normalized(one), normalized(other)
    if one == other:
        return bool(one)
    value = number(one)
    return value is not None and value == number(other)
