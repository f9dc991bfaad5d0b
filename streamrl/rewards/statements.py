r"""Values, assignments (`x = 1, y = 2`), alternatives (`x = 2 or x = 3`) and equations that an answer states, and when two state the same.

How single values compare, and equations, is the caller's: `dapo` compares them as texts and numbers, `math` with algebra. A statement is
never reduced to a part of it: several values are equal to as many values, and an equation only to an equation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import msgspec

from streamrl.rewards.notation import plain

MOST = 24
"""Values of an answer that are compared one by one."""
_WORD = r"\\(?:text|mathrm|textrm|textbf|mathbf|mbox|textit)\s?\{[^{}]{0,80}\}"
_SUBSCRIPT = r"(?:_(?:\w|\{[^{}]{1,20}\}))?"
_SYMBOL = rf"(?:[a-zA-Z]|\\[a-zA-Z]{{2,10}}){_SUBSCRIPT}'{{0,3}}"
_NAME = re.compile(
    rf"(?:{_SYMBOL}(?:\^\{{-1\}})?(?:\([^()=]{{1,20}}\))?|(?:m\s?)?\\?angle\s?[A-Z\d]{{1,3}}|[A-Z]{{2,4}}'?|\\(?:overline|overrightarrow|vec|hat|bar)\{{[^{{}}]{{1,10}}\}}"
    rf"|(?:\\[lr]?[vV]ert|\|)\s?{_SYMBOL}[A-Z]?\s?(?:\\[lr]?[vV]ert|\|)|(?:{_WORD}|[A-Za-z][a-z]{{2,20}}|\s){{1,12}}{_SUBSCRIPT})"
)
_NOT_NAMES = re.compile(r"\\(?:frac|sqrt|sin|cos|tan|log|ln|exp|pi|infty|cdot|times|div|pm|mp|le|ge|sum|int|prod|lim)(?![a-z])|^(?:e|i)$")
_OPAQUE = re.compile(
    r"[<>]|\\(?:leq?|geq?|leqslant|geqslant|lt|gt|neq?|not|in|notin|cup|cap|setminus|subset\w*|begin|mid|equiv|forall|exists|mapsto|to|bmod|pmod)"
    r"(?![a-zA-Z])|!=|\\\||:\s?x\s|&"
)
_ARROW = re.compile(r"\\(?:Rightarrow|implies|Longrightarrow|therefore|iff|Leftrightarrow)(?![a-zA-Z])|=>(?!=)|\\to(?=\s?[a-z]\s?=)")
_LINES = re.compile(r"\\begin\s?\{(cases|aligned|align\*?|gathered)\}(.{1,400}?)\\end\s?\{\1\}", re.DOTALL)
_MEMBER = re.compile(r"\\in(?=\s?\\\{)(?![^{}]*(?:\\mid|\||:))")
_ALMOST = re.compile(r"\\(?:approx|simeq)(?![a-zA-Z])|:=|==")
OR = re.compile(r"\\(?:text|mathrm|textrm|mbox)\s?\{[\s,]{0,8}(?:or|oder|ou)[\s,]{0,8}\}|(?<![\w\\])or(?!\w)|\\(?:lor|vee)(?![a-zA-Z])")
_SEMICOLON = re.compile(";")
_AND = re.compile(
    r"\\(?:text|mathrm|textrm|mbox)\s?\{[\s,]{0,8}(?:and|und|et)[\s,]{0,8}\}|(?<![\w\\])and(?!\w)|\\(?:land|wedge|quad|qquad)(?![a-zA-Z])|,"
)
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3}){1,20}(?!\d|,\d)")
_PLUS_MINUS = re.compile(r"\\(pm|mp)(?![a-zA-Z])\s?")
_LETTERS = re.compile(r"\\[a-zA-Z]+|[a-zA-Z]")
_WORDS = re.compile(rf"{_WORD}|\\[a-zA-Z]+|[a-zA-Z]{{3,}}")
_AROUND = re.compile(r"(?<!\d)\s+|\s+(?!\d)")
_CALCULATION = re.compile(r"(?:[\d\s.,+\-*/^(){}%!:$]|\\(?:times|cdot|div|frac|sqrt|left|right|pi|binom|,)(?![a-zA-Z])){1,400}")

Compare = Callable[[str, str], bool]
"""Compares a value of the label with one of an answer."""


class Statement(msgspec.Struct, frozen=True):
    """One value, which may have a name, or an equation of two expressions."""

    value: str
    """The text behind the last equals sign."""
    name: str = ""
    """The name of the value, as `x`; empty: it is not said."""
    left: str = ""
    """The left side of an equation that is not solved for a name."""

    @property
    def difference(self) -> tuple[str, str] | None:
        """Both sides of the equation that it is; None: it is a value alone."""
        return (self.left or self.name, self.value) if self.left or self.name else None


class Equality(msgspec.Struct, frozen=True):
    """Compares what two answers state."""

    value: Compare
    equation: Callable[[tuple[str, str], tuple[str, str]], bool]
    """Compares two equations, each as its two sides: have they the same solutions?"""

    def holds(self, label: str, answer: str) -> bool:
        """Tell whether an answer states what the label does; both in any notation."""
        label, answer = plain(label), plain(answer)
        if not answer:
            return False
        if _bare(label) == _bare(answer):
            return True
        pairs = [(_joined(label), _joined(answer))]
        if pairs[0] != (label, answer):
            pairs.append((label, answer))  # `100,200` may be a number or a list, but for both in the same way
        return any(self._same(one, other) for one, other in pairs)

    def _same(self, label: str, answer: str) -> bool:
        label, answer = _conclusion(label), _conclusion(answer)
        if _OPAQUE.search(label) or _OPAQUE.search(answer):
            return self._opaque(label, answer)
        expected, given = _alternatives(label), _alternatives(answer)
        if max(len(expected), len(given)) > MOST:
            return False
        if any(_assigns(one) for one in (*expected, *given)) and (len(expected) > 1 or len(given) > 1):
            return _cover(expected, given, self._all)
        return self._all(_flat(expected), _flat(given))

    def _opaque(self, label: str, answer: str) -> bool:
        """Inequalities, sets by a condition, matrices: as a whole, but an answer is not less definite than its label."""
        relations = [bool(INEQUALITY.search(text)) for text in (label, answer)]
        if relations[1] and not relations[0] and not _RANGE.search(label):
            return False
        return self.value(label, answer)

    def _all(self, expected: Sequence[Statement], given: Sequence[Statement]) -> bool:
        if len(expected) == len(given) == 1:
            values = expected[0].value, given[0].value
            if any(map(_is_set, values)) and any(map(_tuple, values)):
                return False
        expected, given = _expanded(expected), _expanded(given)
        if max(len(expected), len(given)) > MOST or not given:
            return False
        if any(one.left for one in expected):
            return _cover(expected, given, self._equations)
        if len(expected) == 1 and len(given) == 1:
            return self._one(expected[0], given[0])
        if len(expected) == 1 or len(given) == 1:
            # A tuple may be written as its values.
            alone, several = (expected, given) if len(expected) == 1 else (given, expected)
            parts = _tuple(alone[0].value)
            if len(parts) != len(several) or any(one.left for one in several) or (several[0].name and len(_names(several)) < len(several)):
                return False
            split = [Statement(part) for part in parts]
            return self._in_order(split, several) if alone is expected else self._in_order(several, split)
        if any(one.left for one in given):
            return False
        expected, given = _without_numbers(expected, given), _without_numbers(given, expected)
        named, others = len(_names(expected)), len(_names(given))
        if named > 1 and others > 1:
            return _cover(expected, given, lambda one, other: one.name == other.name and self.value(one.value, other.value))
        if named > 1 or others > 1:
            known = given if named > 1 else expected
            return not any(one.name for one in known) and self._in_order(expected, given)
        return _cover(expected, given, lambda one, other: self.value(one.value, other.value))

    def _one(self, label: Statement, answer: Statement) -> bool:
        if answer.left:
            if label.name:
                return self._equations(label, answer)
            return not _is_curve(answer) and self.value(label.value, answer.value)
        if label.name and answer.name and label.name != answer.name:
            functions = all(name == "y" or "(" in name for name in (label.name, answer.name))
            if label.name.lower() == answer.name.lower() or functions or not all(map(_is_short, (label.name, answer.name))):
                return self.value(label.value, answer.value)
            return bool(_LETTERS.search(label.value)) and self._equations(label, answer)
        if self.value(label.value, answer.value):
            return True
        return bool(label.name and answer.name) and self._equations(label, answer)

    def _equations(self, label: Statement, answer: Statement) -> bool:
        one, other = label.difference, answer.difference
        return one is not None and other is not None and self.equation(one, other)

    def _in_order(self, expected: Sequence[Statement], given: Sequence[Statement]) -> bool:
        if len(expected) != len(given):
            return False
        return all(self.value(one.value, other.value) for one, other in zip(expected, given, strict=True))


INEQUALITY = re.compile(r"[<>]|\\(?:leq?|geq?|leqslant|geqslant|lt|gt|neq?|not|notin)(?![a-zA-Z])|!=")
_RANGE = re.compile(r"[\[(][^\[\]()]{1,200},[^\[\]()]{1,200}[\])]|\\mathbb|\\cup|\\setminus")


def value_of(answer: str) -> str:
    """The value of an answer that states one; else the whole answer. In plain notation."""
    text = _joined(plain(answer))
    if _OPAQUE.search(text):
        return text
    found = _flat(_alternatives(text))
    return found[0].value if len(found) == 1 and not found[0].left else text


def _bare(text: str) -> str:
    return _AROUND.sub("", text.replace("$", "")).strip().rstrip(".")


def _joined(text: str) -> str:
    """With thousands outside of brackets as one number."""
    if "," not in text:
        return text
    return _THOUSANDS.sub(lambda match: match[0] if _depth(text, match.start()) else match[0].replace(",", ""), text)


def _depth(text: str, end: int) -> int:
    return sum((character in "([{") - (character in ")]}") for character in text[:end])


def _conclusion(text: str) -> str:
    """Return what stands behind the last arrow; a system's lines are joined, and a member of a set has its values."""
    text = _LINES.sub(lambda match: match[0] if "&" in (lines := match[2].replace("&=", "=")) else lines, _MEMBER.sub("=", text))
    if r"\begin" not in text:
        text = text.replace(r"\\", ", ")
    last = 0
    for match in _ARROW.finditer(text):
        last = match.end()
    return text[last:] if text[last:].strip() else text


def _cover(expected: Sequence[object], given: Sequence[object], same: Callable[..., bool]) -> bool:
    """Tell whether each of both has its like among the others."""
    left = list(given)
    for one in expected:
        found = [other for other in given if same(one, other)]
        if not found:
            return False
        left = [other for other in left if all(other is not like for like in found)]
    return not left


def _split(text: str, separator: re.Pattern[str]) -> list[str]:
    """Split where no bracket is open."""
    pieces: list[str] = []
    begin = depth = seen = 0
    for match in separator.finditer(text):
        for place in range(seen, match.start()):
            escaped = place > 0 and text[place - 1] == "\\" and text[place] not in "{}"
            depth += 0 if escaped else (text[place] in "([{") - (text[place] in ")]}")
        seen = match.start()
        if depth == 0:
            pieces.append(text[begin : match.start()])
            begin = match.end()
            seen = match.end()
    pieces.append(text[begin:])
    return [found for piece in pieces if (found := piece.strip().strip("$").strip())]


def _alternatives(text: str) -> list[list[Statement]]:
    """Solutions, each of them the statements that hold together; of values alone each is a solution of its own."""
    text = _ALMOST.sub("=", text.strip().strip("$").strip()).rstrip(".;, ")
    found: list[list[Statement]] = []
    for alternative in _solutions(text):
        together: list[Statement] = []
        for piece in _split(alternative, _AND):
            for one in _stated(piece):
                name = together[-1].name if together and not one.name and not one.left else one.name
                together.append(Statement(one.value, name, one.left))
        if together:
            if found and not together[0].name and not together[0].left and len({one.name for one in found[-1]}) == 1:
                together = [Statement(one.value, one.name or found[-1][0].name, one.left) for one in together]
            found.append(together)
    return found


def _solutions(text: str) -> list[str]:
    """Return what `or` parts; and semicolons, but for those between one assignment each: `x = 1; y = 2`."""
    found: list[str] = []
    for piece in _split(text, OR):
        parts = _split(piece, _SEMICOLON)
        names = [name for part in parts if len(sides := _split(part, _EQUALS)) == 2 and (name := _name(sides[0]))]
        joined = len(parts) > 1 and len(set(names)) == len(parts) and not any(_split(part, _AND)[1:] for part in parts)
        found += [", ".join(parts)] if joined else parts
    return found


def _assigns(statements: Sequence[Statement]) -> bool:
    """Tell whether they give values to different names."""
    return len(_names(statements)) > 1


def _names(statements: Sequence[Statement]) -> set[str]:
    return {one.name for one in statements if one.name}


def _without_numbers(statements: Sequence[Statement], others: Sequence[Statement]) -> list[Statement]:
    """Give numbered values, as `x_1 = 2, x_2 = 3`, one name for all where the others have no numbers."""
    if any("_" in one.name for one in others):
        return list(statements)
    return [Statement(one.value, re.sub(r"_\{?\d\}?$", "", one.name), one.left) for one in statements]


def _flat(alternatives: Sequence[Sequence[Statement]]) -> list[Statement]:
    return [one for together in alternatives for one in together]


def _stated(piece: str) -> list[Statement]:
    sides = [side.strip() for side in _split(piece, _EQUALS)]
    if len(sides) < 2:
        return [Statement(sides[0])] if sides else []
    first, value = sides[0], sides[-1]
    names = [_name(side) for side in sides[:-1]]
    if all(names):
        return [Statement(value, name) for name in names]
    if len(sides) == 2 and _name(value) and not names[0]:
        return [Statement(first, _name(value))]
    if names[0]:
        return [Statement(value, names[0])]
    if len(sides) == 2 and (left := _tuple(first)) and len(right := _tuple(value)) == len(left) and all(map(_name, left)):
        return [Statement(one, _name(name)) for name, one in zip(left, right, strict=True)]
    if (inner := _tuple(first)) and all(map(_name, inner)):
        return [Statement(value, "".join(first.split()))]
    if all(map(_CALCULATION.fullmatch, sides[:-1])) and not _LETTERS.search(_WORDS.sub("", value)):
        return [Statement(value)]
    return [Statement(value, left=first)]


_EQUALS = re.compile("=")


def _name(side: str) -> str:
    """The name that a side of an equation is, without spaces; empty where it is none."""
    side = side.strip()
    if not side or _NOT_NAMES.search(side) or not _NAME.fullmatch(side):
        return ""
    return "".join(re.sub(r"\\(?:text|mathrm|textrm|textbf|mathbf|mbox|textit)\s?\{([^{}]*)\}", r"\1", side).split())


def _is_short(name: str) -> bool:
    return len(re.sub(r"_.*|\\", "", name)) == 1 or name.startswith("\\")


def _is_curve(statement: Statement) -> bool:
    """Tell whether an equation is one of coordinates, as `3x - y + 13 = 0`; of `a + b = 5`, 5 may be asked for."""
    letters = {letter for letter in _LETTERS.findall(statement.left) if letter[0] != "\\"}
    return bool(_LETTERS.search(statement.value)) or (statement.value.strip() == "0" and bool(letters & set("xyz")))


def _tuple(value: str) -> list[str]:
    """The values of `(a, b)`; empty: it is no tuple."""
    value = value.strip()
    if not (value.startswith("(") and value.endswith(")")) or _closing(value) != len(value) - 1:
        return []
    parts = _split(value[1:-1], _COMMA)
    return parts if len(parts) > 1 else []


_COMMA = re.compile(r",|;")


def _is_set(value: str) -> bool:
    value = value.strip()
    return value.startswith(r"\{") and value.endswith(r"\}") and _closing(value[1:]) == len(value) - 2


def _closing(value: str) -> int:
    """Where the first bracket of a text is closed."""
    depth = 0
    for place, character in enumerate(value):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0:
            return place
    return -1


def _expanded(statements: Sequence[Statement]) -> list[Statement]:
    """Sets as their elements, and both values of a plus-minus."""
    found: list[Statement] = []
    for one in statements:
        value = one.value.strip()
        elements = _split(value[2:-2], _COMMA) if _is_set(value) else [value]
        for element in elements:
            if _PLUS_MINUS.search(element) and not one.left:
                both = [_PLUS_MINUS.sub(lambda match, up=up: "+" if (match[1] == "pm") == up else "-", element) for up in (True, False)]
                found += [Statement(each.removeprefix("+"), one.name) for each in both]
            else:
                found.append(Statement(element, one.name, one.left))
    return found
