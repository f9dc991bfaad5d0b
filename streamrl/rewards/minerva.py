r"""Answers of mathematics as short texts, compared letter by letter (Minerva, arXiv 2206.14858, appendix D.1), and as numbers."""

from __future__ import annotations

import re
from fractions import Fraction

from streamrl.rewards.notation import LONGEST
from streamrl.rewards.statements import Equality, value_of

_REPLACED = (
    (re.compile(r"\ban?\s"), ""),
    (re.compile(r"\.\$"), "$"),
    (re.compile(r"\\\$|\\[,;: !]|\\\s|\s|~"), ""),
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
_WRAPPED = re.compile(r"\\(?:text|textbf|overline|boxed|mathrm|mathbf|textrm|textit|mathbb)\{([^{}]*)\}")
_SHORT_FRACTION = re.compile(r"frac([^{\\])([^{\\])")
_SHORT_ROOT = re.compile(r"sqrt([^{\\])")
_FRACTION = re.compile(r"([-+]?)\\[dt]?frac\{(-?\d{1,60}(?:\.\d{1,60})?)\}\{(\d{1,60}(?:\.\d{1,60})?)\}")
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d*)?")
_NUMBER = re.compile(r"[-+]?(?:\d{1,60}(?:\.\d{0,60})?|\.\d{1,60})(?:/\d{1,60}(?:\.\d{1,60})?)?")
_POWER_OF_TEN = re.compile(r"(?:\\times|\\cdot|\*|x|(?=[eE]))(?:10\^\{?|[eE])([-+]?\d{1,2})\}?$")
_MONEY = re.compile(r"^([-+]?)(?:US|HK|C|A|R|Rs\.?)?\$?(?:USD|EUR|GBP|INR|CNY|JPY|RMB|Rs\.?|\$)?(?=[-+.\d])")
_AMOUNT = re.compile(
    r"(?P<number>[-+]?\s?\$?\s?[-+]?(?:\d[\d,]{0,60}(?:\.\d{0,60})?|\.\d{1,60})(?:\s?/\s?\d{1,60})?|[-+]?\s?\\frac\{\d{1,60}\}\{\d{1,60}\})"
    r"\s{0,4}-?(?P<unit>(?:\s|\\(?:text|mathrm|textrm|mbox|textbf)\s?\{|[a-zA-Z.\u00b5/\u2126]|\}|\(|\)|\^\{?-?[1-4]\}?|\$|\\cdot){1,60})"
)
_DOLLARS = re.compile(r"[-+]?\$\s?[-+]?[\d.,]{1,60}")
_SCALES = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_NO_UNITS = re.compile(
    r"pi|sqrt|squared|cubed|factorial|times|plus|minus|hal(?:f|ves)|(?:third|quarter|fourth|fifth|sixth|tenth|hundred|hundredth)s?|dozen|mod|and|or|not"
    r"|to|less|more|over|by|base|e|i|per|percent|log|ln|sin|cos|tan|divided|power|root",
    re.IGNORECASE,
)
_UNIT_NAMES = {
    "m": "metre meter metres meters",
    "cm": "centimeter centimetre centimeters centimetres",
    "mm": "millimeter millimetre millimeters millimetres",
    "km": "kilometer kilometre kilometers kilometres",
    "in": "inch inches",
    "ft": "foot feet",
    "yd": "yard yards",
    "mi": "mile miles",
    "g": "gram grams gm",
    "kg": "kilogram kilograms",
    "mg": "milligram milligrams",
    "lb": "pound pounds lbs",
    "oz": "ounce ounces",
    "l": "liter litre liters litres",
    "ml": "milliliter millilitre milliliters millilitres",
    "s": "second seconds sec secs",
    "min": "minute minutes mins",
    "h": "hour hours hr hrs",
    "day": "days",
    "week": "weeks",
    "month": "months",
    "year": "years",
    "dollar": "dollars usd",
    "cent": "cents",
    "degree": "degrees",
    "celsius": "",
    "fahrenheit": "",
    "radian": "radians rad",
}
_SIDE_BY_SIDE = re.compile(r"(?<![\w.^_{}])-?\d[\d.]*\s+\d")
_KNOWN_UNITS = {name: unit for unit, names in _UNIT_NAMES.items() for name in (unit, *names.split())}


def normalized(answer: str) -> str:
    """Without what is no part of the value (units, spaces, dollar signs, the name that it is given); short LaTeX written out."""
    return _normalized(value_of(answer))


def _normalized(text: str) -> str:
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
    r"""The exact value of a normalized text that is a number: `-3`, `0.5`, `1/2`, `\frac{1}{2}`, `2\times10^3`; else None."""
    text = _FRACTION.sub(r"\1\2/\3", _MONEY.sub(r"\1", text))
    scale = 0
    if power := _POWER_OF_TEN.search(text):
        text, scale = text[: power.start()], int(power[1])
    if not _NUMBER.fullmatch(text):
        return None
    top, _, bottom = text.partition("/")
    try:
        return Fraction(top) / Fraction(bottom or 1) * Fraction(10) ** scale
    except (ValueError, ZeroDivisionError):
        return None


def same(label: str, answer: str) -> bool:
    """Tell whether an answer states what the label does, where values are the same once they are normalized, or the same number."""
    return len(answer) <= LONGEST and _EQUALITY.holds(label, answer)


def same_value(label: str, answer: str) -> bool:
    """The same of single values in plain notation."""
    if label.strip() == answer.strip() != "":
        return True
    if is_torn(answer) or units_differ(label, answer):
        return False
    one, other = _normalized(label), _normalized(answer)
    if one == other:
        return bool(one)
    if (value := number_in(label)) is None or (found := number_in(answer)) is None:
        return False
    percent, given = (text.rstrip().rstrip(".").endswith(_PERCENT) for text in (label, answer))
    if value == found:
        return True
    return percent != given and (found / 100 == value if given else value / 100 == found)


_PERCENT = ("%", "percent", "percent}")


def number_in(text: str) -> Fraction | None:
    """The exact value of a number, in plain notation, that may have a unit, a currency or a percent sign."""
    text = text.strip().rstrip(".").strip()
    for sign in ("%", "percent", r"\text{percent}", r"\text{ percent}"):
        text = text.removesuffix(sign).rstrip()
    if (value := number(_normalized(text))) is not None:
        return value
    amount = _AMOUNT.fullmatch(text)
    if amount is None:
        return None
    words = re.findall(r"[a-zA-Z]+", re.sub(r"\\[a-zA-Z]+", " ", amount["unit"]))
    scale = 0
    if words and words[0].lower() in _SCALES:
        scale, words = _SCALES[words[0].lower()], words[1:]
    # A letter alone may be a variable unless it stands in words.
    wordy = "\\text" in amount["unit"] or "\\mathrm" in amount["unit"] or "\\mbox" in amount["unit"]
    if (
        (not words and "^" in amount["unit"])
        or len(words) > 4
        or any(_NO_UNITS.fullmatch(word) or (len(word) < 2 and not wordy) for word in words)
    ):
        return None
    value = number(_normalized(amount["number"]))
    return None if value is None else value * 10**scale


def is_torn(text: str) -> bool:
    """Tell whether numbers stand side by side with a space between them and nothing that joins them."""
    return _SIDE_BY_SIDE.search(text) is not None


def units_differ(label: str, answer: str) -> bool:
    """Tell whether both say a unit, and not the same one: `5 cm` is not `5 m`."""
    one, other = _unit(label), _unit(answer)
    return bool(one and other) and one != other


def _unit(text: str) -> tuple[str, ...]:
    text = text.strip().rstrip(".")
    if _DOLLARS.fullmatch(text):
        return ("dollar",)
    amount = _AMOUNT.fullmatch(text)
    if amount is None:
        return ()
    words = re.findall(r"\^\{?-?\d|[a-zA-Z]+", re.sub(r"\\[a-zA-Z]+", " ", amount["unit"]))
    known = tuple(_KNOWN_UNITS.get(word.lower(), "") if word[0] != "^" else word.replace("{", "") for word in words)
    return known if known and all(known) else ()


def _same_equation(label: tuple[str, str], answer: tuple[str, str]) -> bool:
    one, other = ([_normalized(side) for side in sides] for sides in (label, answer))
    return other in (one, one[::-1])


_EQUALITY = Equality(same_value, _same_equation)
"""The comparison of texts and numbers, without algebra."""
