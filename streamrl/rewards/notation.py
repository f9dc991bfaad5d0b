r"""One notation for the ways in which people write an answer: numbers, signs and LaTeX that have the same meaning become the same text.

Everything here is text in, text out, in time linear in its length.
"""

from __future__ import annotations

import re
import unicodedata

LONGEST = 2000
"""Characters. No answer is longer."""
_SIGNS = {
    "\N{MINUS SIGN}": "-",
    "\N{EN DASH}": "-",
    "\N{NON-BREAKING HYPHEN}": "-",
    "\N{MULTIPLICATION SIGN}": r"\times ",
    "\N{DOT OPERATOR}": r"\cdot ",
    "\N{MIDDLE DOT}": r"\cdot ",
    "\N{DIVISION SIGN}": "/",
    "\N{FRACTION SLASH}": "/",
    "\N{DIVISION SLASH}": "/",
    "\N{RATIO}": ":",
    "\N{DEGREE SIGN}": r"^\circ",
    "\N{INFINITY}": r"\infty ",
    "\N{PLUS-MINUS SIGN}": r"\pm ",
    "\N{LESS-THAN OR EQUAL TO}": r"\le ",
    "\N{GREATER-THAN OR EQUAL TO}": r"\ge ",
    "\N{NOT EQUAL TO}": r"\ne ",
    "\N{ALMOST EQUAL TO}": r"\approx ",
    "\N{ELEMENT OF}": r"\in ",
    "\N{UNION}": r"\cup ",
    "\N{INTERSECTION}": r"\cap ",
    "\N{EMPTY SET}": r"\emptyset ",
    "\N{GREEK SMALL LETTER PI}": r"\pi ",
    "\N{GREEK SMALL LETTER THETA}": r"\theta ",
    "\N{GREEK SMALL LETTER ALPHA}": r"\alpha ",
    "\N{GREEK SMALL LETTER BETA}": r"\beta ",
    "\N{RIGHT SINGLE QUOTATION MARK}": "'",
    "\N{RIGHTWARDS DOUBLE ARROW}": r"\Rightarrow ",
    "\N{FULLWIDTH COMMA}": ", ",
    "\N{IDEOGRAPHIC COMMA}": ", ",
    "\N{EURO SIGN}": "$",
    "\N{POUND SIGN}": "$",
    "\N{YEN SIGN}": "$",
    "\N{INDIAN RUPEE SIGN}": "$",
}
_SUPERSCRIPTS = "\N{SUPERSCRIPT ZERO}\N{SUPERSCRIPT ONE}\N{SUPERSCRIPT TWO}\N{SUPERSCRIPT THREE}" + "".join(
    chr(0x2070 + digit) for digit in range(4, 10)
)
_POWER = re.compile(f"[\N{SUPERSCRIPT MINUS}]?[{_SUPERSCRIPTS}]+")
_POWER_DIGITS = {ord(sign): str(digit) for digit, sign in enumerate(_SUPERSCRIPTS)} | {ord("\N{SUPERSCRIPT MINUS}"): "-"}
_ROOT = re.compile("\N{SQUARE ROOT}\\s?(?:\\(([^()]{1,80})\\)|(\\d{1,40}|[a-zA-Z]))")
_INVISIBLE = re.compile("[\u200b-\u200f\u2060-\u2064\ufeff\u00ad]")
_STRONG = re.compile(r"(?<![\w)}\]*])\*\*(?=[^\s*])([^*\n]{1,400})(?<!\s)\*\*(?!\*)")
_EMPHASIS = re.compile(r"\*\*|(?<![\w_])__|__(?![\w_])|`")
_LAYOUT = re.compile(r"\\(?:displaystyle|textstyle|limits|[bB]igg?[lr]?|(?:left|right)\s?\.?)(?![a-zA-Z])")
_DELIMITERS = re.compile(r"\\[()\[\]]")
_DOTS = re.compile(r"\\(?:ldots|cdots|dotsc|dots)(?![a-zA-Z])|\u2026|\.\.\.")
_SPACES = re.compile(r"(?<!\\)\\[,;: !]|~|\\(?:thinspace|enspace|hspace\{[^{}]{0,9}\})(?![a-zA-Z])")
_TEMPERATURE = re.compile(r"\s?\^\{?\\circ\}?\s?(?:\\(?:text|mathrm)\s?\{\s?)?([CF])(?![a-zA-Z])\}?")
_SCALES = {"C": r"\text{ celsius}", "F": r"\text{ fahrenheit}"}
_FRACTIONS = re.compile(r"\\[dtc]frac(?![a-zA-Z])")
_POWERS_PYTHON = re.compile(r"(?<=[\w)}])\s?\*\*\s?(?=[\w({-])")
_GROUPED = re.compile(
    r"(?<![\d.,])(?<!\d[ '_~])[1-9]\d{0,2}(?P<by>\\[,;: !]|\\thinspace\s?|~|\{\\?,\}|,\\!|['_ ])\d{3}(?:(?P=by)\d{3}){0,20}"
    r"(?P<decimals>,\d{1,2}(?![\d,]))?(?!\d|(?P=by)\d|\s?/)"
)
_DOTTED = re.compile(r"(?<![\d.,])(\d{1,3}(?:\.\d{3})+),(\d{1,60})(?![\d.,])")
_COMMAS = ("{,}", r",\!")
_NO_DIGIT = re.compile(r"\D")
_SHORT_FRACTION = re.compile(r"\\frac\s?(\d)\s?(\d)")
_HALF_SHORT_FRACTION = re.compile(r"\\frac\s?(?:\{(\w{1,20})\}\s?(\d)|(\d)\s?\{(\w{1,20})\})")
_MIXED = re.compile(
    r"(?<![\w.}\\^_/])(?P<whole>\d{1,9})(?:(?:\\[,;: ]|~|\s){0,3}\{?\\frac\s?\{\s?(?P<top>\d{1,9})\s?\}\s?\{\s?(?P<bottom>\d{1,9})\s?\}\}?"
    r"|(?:(?:\s|\\[,; ]){1,3}|\s?-\s?and\s?-\s?|\sand\s|\s?\+\s?(?=\d+/\d+\s?$))(?P<upper>\d{1,9})\s?/\s?(?P<lower>\d{1,9})(?![\d/.]))"
)


def plain(answer: str) -> str:
    r"""An answer in plain notation, at most LONGEST characters of it.

    Digits and signs are ASCII or LaTeX; numbers have no separators but a decimal point; mixed fractions are fractions; what only decides
    on the look (`\left`, `\displaystyle`, emphasis, delimiters of mathematics) is gone. Commas between digits stay: `1,234` may be a list.
    """
    return tidied(answer[:LONGEST], spaced=True)


def tidied(text: str, *, spaced: bool = False) -> str:
    """A text of any length in plain notation; `spaced`: digits in groups of three with spaces between them are one number."""
    text = _INVISIBLE.sub("", text)
    if not text.isascii():
        text = _ascii(text)
    text = _POWERS_PYTHON.sub("^", _STRONG.sub(r"\1", text))
    text = _EMPHASIS.sub("", text)
    text = _DELIMITERS.sub("", _LAYOUT.sub("", text))
    text = _TEMPERATURE.sub(lambda match: _SCALES[match[1]], text)
    text = _DOTS.sub(r"\\dots ", text)
    text = _FRACTIONS.sub(r"\\frac", text).replace(r"\%", "%").replace(r"\$", "$")
    text = _GROUPED.sub(lambda match: match[0] if match["by"] == " " and not spaced else _ungrouped(match), text)
    text = _DOTTED.sub(lambda match: f"{match[1].replace('.', '')}.{match[2]}", text)
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    text = _HALF_SHORT_FRACTION.sub(lambda match: rf"\frac{{{match[1] or match[3]}}}{{{match[2] or match[4]}}}", text)
    return _SPACES.sub(" ", _MIXED.sub(_improper, text)).replace(r"\varnothing", r"\emptyset").strip()


def _ascii(text: str) -> str:
    text = _ROOT.sub(lambda match: rf"\sqrt{{{match[1] or match[2]}}}", text)
    text = _POWER.sub(lambda match: f"^{{{match[0].translate(_POWER_DIGITS)}}}", text)
    return "".join(map(_character, text))


def _character(sign: str) -> str:
    if sign.isascii():
        return sign
    if (found := _SIGNS.get(sign)) is not None:
        return found
    if sign.isspace():
        return r"\," if sign in "\u2009\u202f\u00a0\u2007\u2008" else " "
    if unicodedata.category(sign) == "Nd":
        return str(unicodedata.decimal(sign))
    if 0xFF01 <= ord(sign) <= 0xFF5E:
        return chr(ord(sign) - 0xFEE0)
    if unicodedata.decomposition(sign).startswith("<fraction>"):
        return " " + unicodedata.normalize("NFKC", sign).replace("\N{FRACTION SLASH}", "/")
    return sign


def _ungrouped(match: re.Match[str]) -> str:
    decimals = match["decimals"]
    if decimals is None:
        return _NO_DIGIT.sub("", match[0])
    whole = _NO_DIGIT.sub("", match[0].removesuffix(decimals))
    return f"{whole}{decimals if match['by'] in _COMMAS else '.' + decimals[1:]}"


def _improper(match: re.Match[str]) -> str:
    whole, top, bottom = int(match["whole"]), int(match["top"] or match["upper"]), int(match["bottom"] or match["lower"])
    if not 0 < top < bottom:
        return match[0]  # a product, or no number at all
    return rf"\frac{{{whole * bottom + top}}}{{{bottom}}}"
