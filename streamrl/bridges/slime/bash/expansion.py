"""From words to the fields that bash makes of them, where the text alone decides (bash(1), EXPANSION). Nothing is run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from streamrl.bridges.slime.bash.arithmetic import calculate
from streamrl.bridges.slime.bash.conditions import matches
from streamrl.bridges.slime.bash.state import LONGEST, Budget, State
from streamrl.bridges.slime.bash.values import Field, Place, Unknown, Value
from streamrl.bridges.slime.bash.words import Arithmetic, Cursor, Opaque, Output, Parameter, Part, Text, Word
from streamrl.errors import ConfigError

_LONGEST_CUT = 4096
"""Of a text that a pattern is taken off, and of arithmetic."""
_CHANGED = re.compile(r"\b([A-Za-z_]\w*+)\s*+(?:\+\+|--|(?:[-+*/%&|^]|<<|>>)?=(?!=))|(?:\+\+|--)([A-Za-z_]\w*+)", re.ASCII)
"""A name that arithmetic assigns to."""


class Expander:
    """Expands the words of one file in a state.

    Args:
        state: what is known.
        file: where the words stand.
        budget: bounds the work.
        printed: what a command substitution prints, where that is known from its text.
    """

    def __init__(self, state: State, file: str, budget: Budget, printed: Callable[[Output], Value]) -> None:
        self.state, self.file = state, file
        self.defaults: dict[str, tuple[str, Place]] = {}
        """Variables that are not set, and what the script takes instead."""
        self._budget, self._printed = budget, printed

    def fields(self, words: Iterable[Word]) -> list[Field]:
        """All fields of several words."""
        return [field for word in words for field in self.split(word)]

    def split(self, word: Word) -> list[Field]:
        """The fields of one word: none, one, or several where an array or an unquoted variable is in it."""
        place, done, begun = Place(self.file, word.line), list[Field](), False
        pieces: list[Value] = []

        def flush() -> None:
            nonlocal begun
            if begun:
                value = _joined(pieces)
                printed = len(word.parts) == 1 and isinstance(word.parts[0], Output) and not word.parts[0].quoted
                done.append(Field(value, place, word.raw, many=isinstance(value, Unknown) and printed))
            pieces.clear()
            begun = False

        def add(value: Value, *, quoted: bool) -> None:
            nonlocal begun
            if isinstance(value, Unknown) or quoted:
                pieces.append(value)
                begun = True
                return
            if value[:1].isspace():
                flush()
            for index, piece in enumerate(cut := value.split()):
                if index:
                    flush()
                pieces.append(piece)
                begun = True
            if cut and value[-1:].isspace():
                flush()

        def take(part: Part, *, alone: bool) -> None:
            quoted = isinstance(part, Opaque) or part.quoted
            if isinstance(part, Parameter) and self._all_elements(part):
                elements = self._elements(part, place)
                if isinstance(elements, Unknown):
                    flush()
                    done.append(Field(elements, place, word.raw, many=True))
                elif alone:
                    done.extend(elements if quoted else [one for field in elements for one in _cut(field)])
                else:
                    for index, field in enumerate(elements):
                        if index:
                            flush()
                        add(field.value, quoted=quoted)
            elif isinstance(part, Parameter) and not quoted and (operand := self._used_operand(part, place)) is not None:
                with self._budget.deeper(place):
                    for inner in operand.parts:
                        take(inner, alone=False)
            else:
                add(self._value(part), quoted=quoted)

        for part in word.parts:
            take(part, alone=len(word.parts) == 1)
        flush()
        characters = sum(len(one.value) for one in done if isinstance(one.value, str))
        self._budget.spend(len(word.parts) // 10 + len(done) + characters // 100, place)
        return done

    def whole(self, word: Word, *, pattern: bool = False) -> Value:
        """One text, as right of `=`. For a `pattern` quoted characters stand for themselves."""
        pieces: list[Value] = []
        for part in word.parts:
            if isinstance(part, Parameter) and self._all_elements(part):
                elements = self._elements(part, Place(self.file, word.line))
                value = elements if isinstance(elements, Unknown) else _joined([one for f in elements for one in (" ", f.value)][1:])
            else:
                value = self._value(part)
            quoted = getattr(part, "quoted", True)
            pieces.append(re.sub(r"([*?[])", r"[\1]", value) if pattern and quoted and isinstance(value, str) else value)
        joined = _joined(pieces)
        self._budget.spend(1 + len(word.parts) // 10 + (len(joined) if isinstance(joined, str) else 0) // 100, Place(self.file, word.line))
        return joined

    def _all_elements(self, part: Parameter) -> bool:
        return part.index in ("@", "*") and not part.length and not (part.index == "*" and part.quoted)

    def _elements(self, part: Parameter, place: Place) -> list[Field] | Unknown:
        if part.name in ("@", "*"):
            found: list[Field] | Unknown | None = self.state.arguments
        else:
            found = self.state.fields(part.name)
        if isinstance(found, Unknown):
            return found
        if part.operator in (":-", "-", ":+", "+"):
            instead = not found if part.operator in (":-", "-") else bool(found)
            if instead or not found:
                return self.split(self._operand(part)) if instead else []
        elif part.operator:
            return self._odd(part)
        return [field if field.place.line else field._replace(place=place) for field in found or ()]

    def _value(self, part: Part) -> Value:
        place = Place(self.file, part.line) if not isinstance(part, Text) else Place(self.file, 0)
        if isinstance(part, Text):
            return part.text
        if isinstance(part, Opaque):
            return Unknown(part.why, place)
        with self._budget.deeper(place):
            if isinstance(part, Output):
                return self._printed(part)
            return self.calculated(part.text, place) if isinstance(part, Arithmetic) else self._parameter(part, place)

    def calculated(self, text: str, place: Place) -> Value:
        """The number that `$((text))` stands for."""
        for name in map("".join, _CHANGED.findall(text)):
            self.state.forget(name, Unknown(f"(({text})) changes {name}", place), array=False)
        if len(text) > _LONGEST_CUT:
            return Unknown(f"$(({text[:20]}...)) is too long for arithmetic", place)
        inner = self.whole(_inner_word(text, self.file, place.line))
        if isinstance(inner, Unknown):
            return inner
        missing: list[Unknown] = []

        def number_of(name: str) -> int | None:
            value = self.state.get(name)
            if isinstance(value, str) and re.fullmatch(r"-?(0|[1-9]\d{0,18})", value):
                return int(value)
            missing.append(value if isinstance(value, Unknown) else _not_set(name, place))
            return None

        number = calculate(inner, number_of)
        if number is not None:
            return str(number)
        return missing[0] if missing else Unknown(f"$(({text})) is arithmetic that is not read", place)

    def _parameter(self, part: Parameter, place: Place) -> Value:
        name, value = part.name, self._found(part)
        if part.length:
            if part.index in ("@", "*"):
                fields = self.state.fields(name)
                return fields if isinstance(fields, Unknown) else str(len(fields or ()))
            return value if isinstance(value, Unknown) else str(len(value or ""))
        if (operand := self._used_operand(part, place)) is not None:
            return self.whole(operand)
        if part.operator in (":+", "+"):
            return value if isinstance(value, Unknown) else ""
        if value is None:
            # bash makes the empty text of it, but the environment may have set it.
            return "" if name.isdigit() else _not_set(name, place)
        if isinstance(value, Unknown) or part.operator in ("", ":-", "-", ":=", "=", ":?", "?"):
            return value
        if part.operator in ("%", "%%", "#", "##"):
            return self._without(value, part, place)
        return self._odd(part)

    def _used_operand(self, part: Parameter, place: Place) -> Word | None:
        """The word in `${name:-word}` and its like, where it is what counts; a default is noted, and with `=` assigned."""
        if part.length or part.operator not in (":-", "-", ":=", "=", ":+", "+"):
            return None
        value = self._found(part)
        if isinstance(value, Unknown) or (part.operator in (":+", "+")) == (value is None or (value == "" and ":" in part.operator)):
            return None
        operand = self._operand(part)
        if part.operator in (":+", "+"):
            return operand
        default = self.whole(operand)
        if isinstance(default, str) and not part.name.isdigit() and value is None:
            self.defaults.setdefault(part.name, (default, place))
        if "=" in part.operator:
            self.state.set(part.name, default, place)
        return operand

    def _found(self, part: Parameter) -> Value | None:
        name, arguments = part.name, self.state.arguments
        if name == "0":
            return self.state.script
        if name == "BASH_SOURCE" and part.index in (None, "0"):
            return self.file
        if name == "#":
            many = [one for one in arguments if isinstance(one.value, Unknown)]
            return many[0].value if many else str(len(arguments))
        if name.isdigit():
            return arguments[int(name) - 1].value if 0 < int(name[:6]) <= len(arguments) else None
        if name == "PWD" and "PWD" not in self.state.scalars:
            return str(self.state.cwd)
        if part.index is None or part.index in ("@", "*"):
            if part.index == "*" and not isinstance(fields := self.state.fields(name), Unknown):
                return None if fields is None else _joined([one for field in fields for one in (" ", field.value)][1:])
            return self.state.get(name)
        fields = self.state.fields(name)
        if not isinstance(fields, list):
            return fields
        number = self.calculated(part.index, Place(self.file, part.line))
        if isinstance(number, Unknown):
            return number
        return fields[int(number)].value if -len(fields) <= int(number) < len(fields) else None

    def _without(self, value: str, part: Parameter, place: Place) -> Value:
        """`%` and `#` take the shortest match of a pattern off an end, `%%` and `##` the longest."""
        pattern = self.whole(self._operand(part), pattern=True)
        if isinstance(pattern, Unknown) or len(value) > _LONGEST_CUT:
            return pattern if isinstance(pattern, Unknown) else Unknown(f"{part.name} is too long for a pattern", place)
        self._budget.spend(len(value) ** 2 // 1000, place)  # each length is tried, and a try reads the whole
        lengths = range(len(value) + 1) if len(part.operator) == 1 else range(len(value), -1, -1)
        for length in lengths:
            cut = len(value) - length if part.operator[0] == "%" else length
            if matches(value[cut:] if part.operator[0] == "%" else value[:cut], pattern):
                return value[:cut] if part.operator[0] == "%" else value[cut:]
        return value

    def _operand(self, part: Parameter) -> Word:
        self._budget.spend(len(part.operand) // 10, Place(self.file, part.line))
        return _inner_word(part.operand, self.file, part.line, quoted=part.quoted)

    def _odd(self, part: Parameter) -> Unknown:
        return Unknown(f"${{{part.name}{part.operator}{part.operand}}} is an expansion that is not read", Place(self.file, part.line))


def _not_set(name: str, place: Place) -> Unknown:
    return Unknown(f"{name} is not set in the script", place, f"give it with --var {name}=VALUE; the environment is not read")


def _inner_word(text: str, file: str, line: int, *, quoted: bool = False) -> Word:
    """An operand as one word: blanks in it are characters."""
    cursor, parts = Cursor(text if quoted else text.strip(), file, line), list[Part]()
    while cursor.peek():
        parts += cursor.word().parts
        if ends := re.compile(r"[ \t\n;&|<>()]+").match(cursor.text, cursor.at):
            parts.append(Text(ends[0], quoted=False))
            cursor.at = ends.end()
    return Word(tuple(parts), line, text)


def _joined(pieces: Iterable[Value]) -> Value:
    known = list(pieces)
    for piece in known:
        if isinstance(piece, Unknown):
            return piece
    text = "".join(str(piece) for piece in known)
    if len(text) > LONGEST:
        raise ConfigError(
            f"expected at most {LONGEST:,} characters in a word, got {len(text):,}", hint="a script that builds such texts is not read"
        )
    return text


def _cut(field: Field) -> list[Field]:
    """An element of an array that is not quoted: its blanks cut it."""
    return [field._replace(value=piece) for piece in field.value.split()] if isinstance(field.value, str) else [field]
