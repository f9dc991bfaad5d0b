r"""Numbers in text: the final answer of a worked solution, and its value.

Where the answer stands: in the last `\boxed{}`, after the last `####` (GSM8K, arXiv 2110.14168), after the last `answer is` or `Answer:`;
whichever comes last and has a number. Words such as "the answer is right" behind a box or `####` are a remark. Without any of them, the
last number of the text. Reasoning up to `</think>` is left out.
"""

from __future__ import annotations

import re
from fractions import Fraction

import msgspec

from streamrl.rewards.answers import without_reasoning
from streamrl.rewards.notation import plain, tidied

_MARKER = re.compile(r"####|\\boxed\s?\{|\\fbox\s?\{|\banswer\s?(?:is|=|:)", re.IGNORECASE)
_REMARK = re.compile(
    r"\s*(?:in)?(?:not|correct|right|wrong|valid|reasonable|consistent|accurate|plausible|verified|confirmed|clear|obvious|sound"
    r"|(?:as follows|below|above|given|found|obtained|shown)\b)",
    re.IGNORECASE,
)
_NOT = re.compile(r"\s*(?:not|n't|never)\b", re.IGNORECASE)
_SENTENCE = re.compile(r"(?<!Rs)(?<!approx)(?<!No)[.!?]\s")
_HEADING = re.compile(r"[^\d\n]{0,40}\b(?:answer|result|solution)\b[^\d\n]{0,20}\n", re.IGNORECASE)
_LEADING = re.compile(r"(?:[\s*_$:~(\u2248]|\\approx|approximately|about|equal to|exactly){0,6}(?=[-+.\d\u00a3\u20ac\u00a5$\\])")
_BARE = re.compile(r"[-+$\d.,/\s]{1,80}")
_WORDS = re.compile(
    r"(?:[%.,;:*_$\s]|\(){0,6}(?<![a-zA-Z\d])(?:[A-Za-z]{2,}|[aAI](?![a-zA-Z]))?(?:[\s.,;:()'\"?*_$-]{1,4}(?:[A-Za-z]{2,}|[aAI](?![a-zA-Z])|$)){0,200}"
)
_OTHERWISE = re.compile(
    r"\b(?:or|not|pi|squared|cubed|factorial|times|plus|minus|half|halves|thirds?|quarters?|hundred|thousand|million|billion|dozen|mod|over|"
    r"power|root|wrong|incorrect|more|less|fewer|than|and)\b",
    re.IGNORECASE,
)
_CALCULATION = re.compile(r"(?:[\d\s.,+\-*/x\u00f7()%$^]|\\(?:times|cdot|div|frac|left|right)(?![a-zA-Z])|[{}]){1,400}")
_FACTOR = re.compile(r"\d[a-zA-Z]")
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
_LINE = 2000
"""Characters behind a marker, and of the end of a text without one, that are looked at."""
_MOST_MARKERS = 50
_MAX_DIGITS = 60
"""A longer row of digits is no answer, and would only cost time."""


class Answer(msgspec.Struct, frozen=True):
    """What a text gives as its final answer."""

    value: Fraction
    marked: bool
    """Whether it stood behind a marker; else it is the last number of the text."""


def final_answer(text: str) -> Answer | None:
    """The final number of a solution; None where there is none. Markers with no number behind any of them give none."""
    text = without_reasoning(text) or ""
    markers = list(_MARKER.finditer(text))
    remarked: Fraction | None = None
    firm = next((place for place, marker in enumerate(markers) if _is_firm(marker)), len(markers))
    for place in range(len(markers) - 1, max(-1, len(markers) - 1 - _MOST_MARKERS), -1):
        marker = markers[place]
        behind = _behind(text, marker)
        if not _is_firm(marker):
            behind = _SENTENCE.split(behind, maxsplit=1)[0]
        if not _is_firm(marker) and _NOT.match(behind):
            continue
        if not _is_firm(marker) and firm < place and not _LEADING.match(behind):
            continue  # a remark on what has been marked
        if (value := _first_number(behind)) is not None:
            if _is_firm(marker) or not _REMARK.match(behind):
                return Answer(value, True)
            remarked = value if remarked is None else remarked
    if remarked is not None:
        return Answer(remarked, True)
    if markers and not (firm == len(markers) and all(_REMARK.match(_behind(text, marker)) for marker in markers[-_MOST_MARKERS:])):
        return None
    found = numbers(text[-_LINE:])
    return Answer(found[-1], False) if found else None


def begins_with(label: str, text: str) -> bool:
    """Tell whether a text is the number of the label with a remark in words behind it: `18 (as shown above)`, but not `18 or so`."""
    wanted, text = numbers(label), plain(text)
    if len(wanted) != 1 or not _BARE.fullmatch(plain(label)):
        return False
    begins = _LEADING.match(text)
    found = _NUMBER.match(text, begins.end() if begins else 0)
    if found is None or numbers(text) != wanted:
        return False
    remark = text[found.end() :]
    return bool(_WORDS.fullmatch(remark)) and not _OTHERWISE.search(remark)


def _is_firm(marker: re.Match[str]) -> bool:
    """Tell whether it is a box or `####`, which stand for nothing else."""
    return marker[0][0] in "#\\"


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
    text = tidied(text).replace("{,}", ",")
    text = text.replace("\\$", "$").replace("\\%", "%").replace("\N{FULLWIDTH DOLLAR SIGN}", "$")
    text = _LATEX_FRACTION.sub(lambda m: f"{m['sign']}{m['top']}/{m['bottom']}", text)
    return _LATEX_SPACES.sub("", _LATEX_WORDS.sub(lambda m: " " + m["inside"], text))


def _behind(text: str, marker: re.Match[str]) -> str:
    """Return what a marker points to: the inside of its braces, or the rest of its line, or the next line of a heading."""
    begin = marker.end()
    if not marker[0].endswith("{"):
        rest = text[begin : begin + _LINE]
        if (heading := _HEADING.match(rest)) and marker[0][0] == "#":
            rest = rest[heading.end() :]
        return rest.lstrip().partition("\n")[0]
    depth = 1
    for place in range(begin, min(len(text), begin + _LINE)):
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return text[begin:place]
    return ""


def _first_number(text: str) -> Fraction | None:
    """The first number; of a calculation (`3 * 4 = 12`) its result, and of `x = 3` what stands behind the sign."""
    sides = plain(text).split("=")
    for place, side in enumerate(sides[:-1]):
        found = numbers(side)
        ends = place + 2 == len(sides)
        if len(found) != 1 or _FACTOR.search(side) or not _LEADING.match(side):
            continue
        if not _CALCULATION.fullmatch(side) or (ends and len(numbers(sides[-1])) > 1 and _CALCULATION.fullmatch(sides[-1].rstrip(". "))):
            return found[0]
    found = numbers(sides[-1]) or numbers(text)
    return found[0] if found else None
