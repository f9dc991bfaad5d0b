r"""Values and equations by algebra: the library math-verify, on sympy. Comparing two expressions may take for ever, or all memory.

What is known to explode is wrong before anything is computed (`explodes`); for the rest, callers run in processes that are killed.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from streamrl.errors import ConfigError
from streamrl.rewards import minerva
from streamrl.rewards.statements import INEQUALITY, OR, Equality

if TYPE_CHECKING:
    from collections.abc import Sequence

_DEEPEST = 12
_TALL = re.compile(
    # A number to the power of a power of a number, an exponent of four digits.
    r"\^\s*\{[^{}^]{0,40}[\d)]\s*\^|\^\s*\([^()^]{0,40}[\d}]\s*\^|\^\s*-?\d+\s*\^|\*\*[^*]{0,20}\*\*|(?:\^|\*\*)\s*\{?\s*-?\(?\d{4,}"
    r"|[)\]}]\s*(?:\^|\*\*)\s*\{?\s*-?\(?\d{2,}"  # a large power of more than one thing
    r"|\d{4,}\s*\)?\s*!|!\s*\)*\s*!|\d{200,}"  # a factorial of a large number, or of a factorial
)
_BRACED_NUMBER = re.compile(r"[{(]\s{0,4}(-?\d{1,200})\s{0,4}[)}]")
_OPERATORS = re.compile(r"\\(?:int|iint|oint|sum|prod|lim)(?![a-zA-Z])")
_ROUNDED_DIGITS = 6
_TIMES = re.compile(r"(?<=[\d)])\s?(?=\(\s?-?\d)")
_NEGATED = re.compile(r"\\(?:neq?|not|notin)(?![a-zA-Z])|(?<![a-zA-Z])(?:not|never|isn't|except|no)(?![a-zA-Z])", re.IGNORECASE)
_TEXT = re.compile(r"\\(?:text|mathrm|textrm|textbf|mbox)\s?\{([^{}]*)\}|([a-zA-Z]{4,}(?:\s[a-zA-Z]+)*)")
_LETTERS = re.compile(r"(?=.*[aeiouAEIOU])[a-zA-Z]{3}\s*")
_DEGREES = re.compile(r"(?P<function>\\?(?:sin|cos|tan|cot|sec|csc)\s?[({]?\s?)(?P<degrees>\d{1,4})\s?\^\{?\\circ\}?")
_BASE = re.compile(r"(\d{1,60})_\{?\(?(\d{1,2})\)?\}?")
_POINTS = (
    (0.7310585, 1.3862943, 0.5671432, 2.2360679),
    (1.6180339, -0.4812118, 2.6651441, 0.9159655),
    (-1.2020569, 0.2614972, 1.9021605, -0.6434105),
)
"""Values of the unknowns at which equations are compared."""
_TOLERANCE = 1e-9
_SAME = 1e-6


def explodes(text: str) -> bool:
    """Tell whether computing with it may take for ever; no row's label is expected to."""
    depth = deepest = 0
    for character in text:
        depth += (character in "{([") - (character in "})]")
        deepest = max(deepest, depth)
    tall = _TALL.search(text) or _TALL.search(_BRACED_NUMBER.sub(r"\1 ", text))
    return deepest > _DEEPEST or tall is not None or len(_OPERATORS.findall(text)) > 2


def same_value(label: str, answer: str) -> bool:
    """Tell whether two single values, in plain notation, are the same; numbers exactly, or a fraction to six decimals and more."""
    if minerva.same_value(label, answer):
        return True
    if minerva.is_torn(answer) or minerva.units_differ(label, answer) or (_NEGATED.search(answer) and not _NEGATED.search(label)):
        return False
    one, other = minerva.number_in(label), minerva.number_in(answer)
    if one is not None and other is not None:
        return _is_rounded(one, label, other) or _is_rounded(other, answer, one)
    if any(_TEXT.fullmatch(text.strip()) for text in (label, answer)) or all(_LETTERS.fullmatch(text) for text in (label, answer)):
        return _words(label) == _words(answer) != ""
    if (based := _BASE.fullmatch(answer)) or _BASE.fullmatch(label):
        return _same_in_base(label, answer) if based else bool(_BASE.fullmatch(label)) and _same_in_base(label, answer)
    return _verify(label, answer) or _same_region(label, answer)


def same_equation(label: tuple[str, str], answer: tuple[str, str]) -> bool:
    """Tell whether two equations have the same solutions: the differences of their sides are the same, up to a factor that is not 0.

    Of fractions the numerator counts. Both differences are evaluated at fixed points; nothing is expanded.
    """
    one, other = _numerator(label), _numerator(answer)
    if one is None or other is None or one.free_symbols != other.free_symbols:
        return False
    symbols = sorted(one.free_symbols, key=str)
    if not symbols or len(symbols) > len(_POINTS[0]):
        return False
    factors: list[complex] = []
    for point in _POINTS:
        values = dict(zip(symbols, point, strict=False))
        try:
            top, bottom = (complex(found.subs(values).evalf()) for found in (one, other))
        except (TypeError, ValueError, ArithmeticError, AttributeError):
            return False
        if not abs(top) > _TOLERANCE or not abs(bottom) > _TOLERANCE or abs(top) > 1e100 or abs(bottom) > 1e100:
            return False
        factors.append(top / bottom)
    return all(abs(factor - factors[0]) <= _TOLERANCE * abs(factors[0]) for factor in factors)


EQUALITY = Equality(same_value, same_equation)
"""The comparison of answers of mathematics, with algebra."""


def found_in(label: str, text: str) -> bool:
    """Tell whether what math-verify finds in a text has the label's value."""
    found = library()
    answers = found.parse(text, found.targets, parsing_timeout=None)
    return bool(answers) and found.verify(_parsed(label), answers, timeout_seconds=None)


def _verify(label: str, answer: str) -> bool:
    # No limits of the library's own: they are alarms of the main thread, and what hangs here is killed.
    expected, given = _parsed(label), _parsed(answer)
    if not given or not library().verify(expected, given, timeout_seconds=None):
        return False
    # Numbers are compared to six decimals there, so that all small ones are the same.
    return "%" in label + answer or not _are_far(expected[0], given[0])


def _are_far(one: Any, other: Any) -> bool:
    if not (getattr(one, "is_number", False) and getattr(other, "is_number", False)):
        return False
    try:
        first, second = complex(one.evalf()), complex(other.evalf())
    except (TypeError, ValueError, ArithmeticError):
        return False
    return not abs(first - second) <= _SAME * max(abs(first), abs(second)) and first != second


@lru_cache(maxsize=256)
def _parsed(value: str) -> Sequence[Any]:
    found = library()
    text = _TIMES.sub(r"\\cdot ", _DEGREES.sub(r"\g<function>\\frac{\g<degrees>\\pi}{180}", value.strip().rstrip(".")))
    return found.parse(f"\\boxed{{{text}}}", found.targets, parsing_timeout=None)


def _is_rounded(value: Any, text: str, other: Any) -> bool:
    """Tell whether a number, as written, is another one rounded to that many decimals."""
    decimals = len(re.sub(r"\D.*", "", text.partition(".")[2]))
    return decimals >= _ROUNDED_DIGITS and "/" not in text and abs(value - other) * 2 * 10**decimals <= 1


def _words(text: str) -> str:
    return " ".join(re.sub(r"\\[a-z]+\s?\{|\}", " ", text).lower().strip(" .()").split())


def _same_in_base(label: str, answer: str) -> bool:
    """A number in another base: of a label's base nothing needs to be said."""
    one, other = _BASE.fullmatch(label), _BASE.fullmatch(answer)
    if one is not None and other is not None:
        return one.groups() == other.groups()
    if one is not None:
        return answer.strip() == one[1]
    if other is None or not 2 <= int(other[2]) <= 10:
        return False
    try:
        return minerva.number_in(label) == int(other[1], int(other[2]))
    except ValueError:
        return False


def _same_region(label: str, answer: str) -> bool:
    """Tell whether inequalities, also such that are joined by `or`, and intervals hold for the same numbers."""
    if not any(INEQUALITY.search(text) for text in (label, answer)):
        return False
    one, other = _region(label), _region(answer)
    return one is not None and one == other


def _region(text: str) -> Any:
    import sympy

    pieces: list[Any] = []
    for piece in OR.split(text):
        expression: Any = next((found for found in _parsed(piece) if not isinstance(found, str)), None)
        if isinstance(expression, sympy.Set):
            pieces.append(expression)
        elif getattr(expression, "is_Relational", False) or isinstance(expression, sympy.And):
            try:
                pieces.append(expression.as_set())
            except (NotImplementedError, ValueError, TypeError):
                return None
        else:
            return None
    return sympy.Union(*pieces)


def _numerator(sides: tuple[str, str]) -> Any:
    import sympy

    parsed = [found for side in sides for found in _parsed(side)[:1] if isinstance(found, sympy.Expr)]
    if len(parsed) != 2:
        return None
    return sympy.fraction(sympy.together(parsed[0] - parsed[1]))[0]


class Library:
    """What is used of math-verify, which takes half a second to load."""

    def __init__(self) -> None:
        try:
            import math_verify
        except ImportError as error:
            raise ConfigError(
                f"expected the package math-verify for the rewards math and deepscaler, got: {error}",
                hint="pip install math-verify",
                key="reward.kind",
            ) from error
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the limits that it is not given
        self.parse: Any = math_verify.parse
        self.verify: Any = math_verify.verify
        self.targets = (math_verify.LatexExtractionConfig(boxed_match_priority=0), math_verify.ExprExtractionConfig())


@lru_cache(maxsize=1)
def library() -> Library:
    """Loaded once a process; raises ConfigError where it is not installed."""
    return Library()
