r"""Numbers in text: the final answer of a worked solution, and its value.

Where the answer stands: in the last `\boxed{}`, after the last `####` (GSM8K, arXiv 2110.14168), after the last `answer is` or `Answer:`;
whichever comes last. Without any of them, the last number of the text. Reasoning up to `</think>` is left out.
"""

from __future__ import annotations

import re
from fractions import Fraction

import msgspec

_MARKER = re.compile(r"####|\\boxed\s?\{|\\fbox\s?\{|\banswer\s?(?:is|=|:)", re.IGNORECASE)
_NUMBER = re.compile(
    r"""(?P<sign>[-+](?:\s?(?=[$€£¥]))?)?  # before a currency sign, as in -$5
    (?:[$€£¥]\s?)?
    (?P<inner>(?<=[$€£¥])[-+])?            # behind it, as in $-5
    (?P<whole>\d{1,3}(?:,\d{3})+(?!\d)|\d+)?
    (?P<decimals>\.\d+)?
    (?:\s?/\s?(?P<divisor>\d+(?:\.\d+)?))?""",
    re.VERBOSE,
)
_LATEX_FRACTION = re.compile(r"(?P<sign>[-+]?)\\[dt]?frac\s?\{\s?(?P<top>[-+]?[\d.,]+)\s?\}\s?\{\s?(?P<bottom>[\d.,]+)\s?\}")
_LATEX_WORDS = re.compile(r"\\(?:text|mathrm|mbox|textbf|mathbf)\s*\{(?P<inside>[^{}]*)\}")
_LATEX_SPACES = re.compile(r"\\[,;:!\s]|\\(?:left|right|quad)(?![a-zA-Z])|~")
_MAX_DIGITS = 60
"""A longer row of digits is no answer, and would only cost time."""


class Answer(msgspec.Struct, frozen=True):
    """What a text gives as its final answer."""

    value: Fraction
    marked: bool
    """Whether it stood behind a marker; else it is the last number of the text."""


def final_answer(text: str) -> Answer | None:
    """The final number of a solution; None where there is none. A marker with no number behind it gives none."""
    if "</think>" in text:
        text = text.rpartition("</think>")[2]
    elif "<think>" in text:
        return None
    markers = list(_MARKER.finditer(text))
    if markers:
        value = _first_number(_behind(text, markers[-1]))
        return None if value is None else Answer(value, True)
    found = numbers(text)
    return Answer(found[-1], False) if found else None


def numbers(text: str) -> list[Fraction]:
    r"""All numbers of a text in order, exactly: `1,234.50`, `-$5`, `$-5`, `3/4`, `\frac{3}{4}`, `.5`.

    What stands around a number (currency, percent, units, a full stop) is not part of it: `50%` is 50. A hyphen right behind a number, a
    letter or a closing bracket is no sign, and neither is one with a space behind it.
    """
    plain = _plain(text)
    found: list[Fraction] = []
    for match in _NUMBER.finditer(plain):
        if match["whole"] is None and match["decimals"] is None:
            continue
        value = _value(match)
        if value is None:
            continue
        before = plain[max(match.start() - 1, 0) : match.start()]
        sign = match["inner"] or match["sign"]
        subtracts = sign == "-" and match["inner"] is None and (before.isalnum() or before in (")", "]", "}", "%"))
        found.append(-value if sign == "-" and not subtracts else value)
    return found


def _value(match: re.Match[str]) -> Fraction | None:
    digits = (match["whole"] or "0").replace(",", "") + (match["decimals"] or "")
    if len(digits) > _MAX_DIGITS:
        return None
    value = Fraction(digits)
    if match["divisor"]:
        divisor = Fraction(match["divisor"]) if len(match["divisor"]) <= _MAX_DIGITS else Fraction(0)
        return value / divisor if divisor else None
    return value


def _plain(text: str) -> str:
    """LaTeX that changes how a number is written, taken out; typographic minus signs as hyphens."""
    text = text.replace("\N{MINUS SIGN}", "-").replace("\N{EN DASH}", "-").replace("{,}", ",")
    text = text.replace("\\$", "$").replace("\\%", "%").replace("\N{FULLWIDTH DOLLAR SIGN}", "$")
    text = _LATEX_FRACTION.sub(lambda m: f"{m['sign']}{m['top']}/{m['bottom']}", text)
    return _LATEX_SPACES.sub("", _LATEX_WORDS.sub(lambda m: " " + m["inside"], text))


def _behind(text: str, marker: re.Match[str]) -> str:
    """What a marker points to: the inside of its braces, or the rest of its line."""
    rest = text[marker.end() :]
    if not marker[0].endswith("{"):
        return rest.lstrip().partition("\n")[0]
    depth = 1
    for place, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[:place]
    return ""


def _first_number(text: str) -> Fraction | None:
    """The first number; of a calculation (`3 * 4 = 12`) the first behind the last equals sign."""
    found = numbers(text.rpartition("=")[2]) or numbers(text)
    return found[0] if found else None
