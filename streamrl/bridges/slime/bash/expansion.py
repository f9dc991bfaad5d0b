"""From words to the fields that bash makes of them, where the text alone decides (bash(1), EXPANSION). Nothing is run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from streamrl.bridges.slime.bash.arithmetic import calculate
from streamrl.bridges.slime.bash.conditions import matches
from streamrl.bridges.slime.bash.state import LONGEST, Budget, State
from streamrl.bridges.slime.bash.syntax import Node, Source
from streamrl.bridges.slime.bash.values import Field, Place, Unknown, Value
from streamrl.errors import ConfigError

_LONGEST_CUT = 4096
"""Of a text that a pattern is taken off, and of arithmetic."""
_CHANGED = re.compile(r"\b([A-Za-z_]\w*+)\s*+(?:\+\+|--|(?:[-+*/%&|^]|<<|>>)?=(?!=))|(?:\+\+|--)([A-Za-z_]\w*+)", re.ASCII)
"""A name that arithmetic assigns to."""
_BRACES = re.compile(r"\{[^{}\s]*+\}")
_ESCAPE = re.compile(r"\\(.?)", re.DOTALL)
_QUOTED_ESCAPE = re.compile(r'\\([$`"\\])')
_ANSI_ESCAPES = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"'}
_DEFAULTS = (":-", "-", ":=", "=", ":+", "+")
"""Operators that put a word in place of a value."""

Piece = str | Unknown | Node
"""Characters of a word, or a part that is still to be expanded: a parameter, a command substitution, arithmetic."""
Pieces = list[tuple[Piece, bool]]
"""Each with whether it is quoted."""


class Expander:
    """Expands the words of one file in a state.

    Args:
        state: what is known.
        source: where the words stand.
        budget: bounds the work.
        printed: what a command substitution prints, where that is known from its text.
    """

    def __init__(self, state: State, source: Source, budget: Budget, printed: Callable[[Node], Value]) -> None:
        self.state, self.source = state, source
        self.defaults: dict[str, tuple[str, Place]] = {}
        """Variables that are not set, and what the script takes instead."""
        self._budget, self._printed = budget, printed

    def fields(self, words: Iterable[Node]) -> list[Field]:
        """All fields of several words."""
        return [field for word in words for field in self.split(word)]

    def pieces(self, word: Node | None, *, quoted: bool = False) -> Pieces:
        """A word without its quotes; `quoted` if it stands within double quotes."""
        found = list(self.pieces_of(word.Parts if word else (), quoted))
        bare = "".join(piece if isinstance(piece, str) and not inner else "\0" for piece, inner in found)
        if word and any("," in braces or ".." in braces for braces in _BRACES.findall(bare)):
            return [(Unknown(f"{self.source.raw(word)} is a brace expansion", self.source.place(word)), False)]
        return found

    def pieces_of(self, parts: Iterable[Node], quoted: bool) -> Iterator[tuple[Piece, bool]]:
        for part in parts:
            if part.Type == "Lit" and quoted:
                yield _QUOTED_ESCAPE.sub(r"\1", part.Value), True
            elif part.Type == "Lit":
                for index, text in enumerate(_ESCAPE.split(part.Value)):
                    if text:
                        yield text, index % 2 == 1
            elif part.Type == "SglQuoted":
                yield self._single(part, quoted), True
            elif part.Type == "DblQuoted":
                # Around an empty array alone quotes make no word; around nothing they do.
                yield from self.pieces_of(part.Parts, True) if part.Parts else [("", True)]
            elif part.Type not in ("ParamExp", "CmdSubst", "ArithmExp"):
                yield Unknown(f"{self.source.raw(part)} is an expansion that is not read", self.source.place(part)), True
            else:
                yield part, quoted

    def _single(self, part: Node, quoted: bool) -> str | Unknown:
        if quoted:  # there a single quote is a letter
            return self.source.raw(part)
        if not part.Dollar:
            return part.Value or ""
        if any(escape not in _ANSI_ESCAPES for escape in _ESCAPE.findall(part.Value or "")):
            return Unknown(f"{self.source.raw(part)} has escapes that are not read", self.source.place(part))
        return _ESCAPE.sub(lambda one: _ANSI_ESCAPES[one[1]], part.Value or "")

    def split(self, word: Node) -> list[Field]:
        """The fields of one word: none, one, or several where an array or an unquoted variable is in it."""
        printed = len(word.Parts) == 1 and word.Parts[0].Type == "CmdSubst"
        return self._split(self.pieces(word), self.source.place(word), self.source.raw(word), printed=printed)

    def _split(self, pieces: Pieces, place: Place, raw: str, *, printed: bool = False) -> list[Field]:
        done, begun = list[Field](), False
        values: list[Value] = []

        def flush() -> None:
            nonlocal begun
            if begun:
                value = _joined(values)
                done.append(Field(value, place, raw, many=isinstance(value, Unknown) and printed))
            values.clear()
            begun = False

        def add(value: Value, *, quoted: bool) -> None:
            nonlocal begun
            if isinstance(value, Unknown) or quoted:
                values.append(value)
                begun = True
                return
            if value[:1].isspace():
                flush()
            for index, piece in enumerate(cut := value.split()):
                if index:
                    flush()
                values.append(piece)
                begun = True
            if cut and value[-1:].isspace():
                flush()

        def take(piece: Piece, quoted: bool, *, alone: bool) -> None:
            parameter = parameter_of(piece)
            if parameter and self._all_elements(parameter, quoted):
                elements = self._elements(parameter, place, quoted)
                if isinstance(elements, Unknown):
                    flush()
                    done.append(Field(elements, place, raw, many=True))
                elif alone:
                    done.extend(elements if quoted else [one for field in elements for one in _cut(field)])
                else:
                    for index, field in enumerate(elements):
                        if index:
                            flush()
                        add(field.value, quoted=quoted)
            elif parameter and not quoted and (operand := self._used_operand(parameter, place, quoted)) is not None:
                with self._budget.deeper(place):
                    for inner in operand:
                        take(*inner, alone=False)
            else:
                add(self._value(piece, quoted), quoted=quoted)

        for piece in pieces:
            take(*piece, alone=len(pieces) == 1)
        flush()
        characters = sum(len(one.value) for one in done if isinstance(one.value, str))
        self._budget.spend(len(pieces) // 10 + len(done) + characters // 100, place)
        return done

    def whole(self, word: Node | None, *, pattern: bool = False) -> Value:
        """One text, as right of `=`. For a `pattern` quoted characters stand for themselves."""
        return self.joined(self.pieces(word), self.source.place(word) if word else Place(self.source.file, 0), pattern=pattern)

    def joined(self, pieces: Pieces, place: Place, *, pattern: bool = False) -> Value:
        """The text of pieces, one behind another."""
        values: list[Value] = []
        for piece, quoted in pieces:
            if (parameter := parameter_of(piece)) and self._all_elements(parameter, quoted):
                elements = self._elements(parameter, place, quoted)
                value = elements if isinstance(elements, Unknown) else _joined([one for f in elements for one in (" ", f.value)][1:])
            else:
                value = self._value(piece, quoted)
            values.append(re.sub(r"([*?[])", r"[\1]", value) if pattern and quoted and isinstance(value, str) else value)
        joined = _joined(values)
        self._budget.spend(1 + len(pieces) // 10 + (len(joined) if isinstance(joined, str) else 0) // 100, place)
        return joined

    def _index(self, part: Node) -> str | None:
        if part.Param.Value in ("@", "*"):
            return part.Param.Value
        return self.source.raw(part.Index) if part.Index else None

    def _all_elements(self, part: Node, quoted: bool) -> bool:
        index = self._index(part)
        return index in ("@", "*") and not part.Length and not (index == "*" and quoted)

    def _elements(self, part: Node, place: Place, quoted: bool) -> list[Field] | Unknown:
        name, operator = part.Param.Value, _operator(part)
        if name in ("@", "*"):
            found: list[Field] | Unknown | None = self.state.arguments
        else:
            found = self.state.fields(name)
        if isinstance(found, Unknown):
            return found
        if operator in (":-", "-", ":+", "+"):
            instead = not found if operator in (":-", "-") else bool(found)
            if instead or not found:
                return self._split(self._operand(part, quoted), self.source.place(part), self.source.raw(part)) if instead else []
        elif operator:
            return self._odd(part)
        return [field if field.place.line else field._replace(place=place) for field in found or ()]

    def _value(self, piece: Piece, quoted: bool) -> Value:
        if isinstance(piece, str | Unknown):
            return piece
        place = self.source.place(piece)
        with self._budget.deeper(place):
            if piece.Type == "CmdSubst":
                return self._printed(piece)
            if piece.Type == "ArithmExp":
                return self.calculated(piece.X, self.source.raw(piece, 3, 2), place)
            return self._parameter(piece, place, quoted)

    def calculated(self, expression: Node | None, text: str, place: Place) -> Value:
        """The number that `$((text))` stands for."""
        for name in map("".join, _CHANGED.findall(text)):
            self.state.forget(name, Unknown(f"(({text})) changes {name}", place), array=False)
        if len(text) > _LONGEST_CUT:
            return Unknown(f"$(({text[:20]}...)) is too long for arithmetic", place)
        inner = self._expression(expression)
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

    def _expression(self, one: Node | None) -> Value:
        """The text of an expression whose parameters are expanded."""
        if one is None or one.Type == "Word":
            return self.whole(one)
        if one.Type == "BinaryArithm":
            return _joined([self._expression(one.X), f" {one.Op} ", self._expression(one.Y)])
        inner = self._expression(one.X)
        if one.Type == "ParenArithm":
            return _joined(["(", inner, ")"])
        return _joined([inner, one.Op] if one.Post else [one.Op, inner])

    def _parameter(self, part: Node, place: Place, quoted: bool) -> Value:
        name, operator = part.Param.Value, _operator(part)
        value = self._odd(part) if part.Excl else self._found(part)
        if part.Length:
            if self._index(part) in ("@", "*"):
                fields = self.state.fields(name)
                return fields if isinstance(fields, Unknown) else str(len(fields or ()))
            return value if isinstance(value, Unknown) else str(len(value or ""))
        if (operand := self._used_operand(part, place, quoted)) is not None:
            return self.joined(operand, place)
        if operator in (":+", "+"):
            return value if isinstance(value, Unknown) else ""
        if value is None:
            # bash makes the empty text of it, but the environment may have set it.
            return "" if name.isdigit() else _not_set(name, place)
        if isinstance(value, Unknown) or operator in ("", ":-", "-", ":=", "=", ":?", "?"):
            return value
        if operator in ("%", "%%", "#", "##"):
            return self._without(value, part, place)
        return self._odd(part)

    def _used_operand(self, part: Node, place: Place, quoted: bool) -> Pieces | None:
        """The word in `${name:-word}` and its like, where it is what counts; a default is noted, and with `=` assigned."""
        name, operator = part.Param.Value, _operator(part)
        if part.Length or part.Excl or operator not in _DEFAULTS:
            return None
        value = self._found(part)
        if isinstance(value, Unknown) or (operator in (":+", "+")) == (value is None or (value == "" and ":" in operator)):
            return None
        operand = self._operand(part, quoted)
        if operator in (":+", "+"):
            return operand
        default = self.joined(operand, place)
        if isinstance(default, str) and not name.isdigit() and value is None:
            self.defaults.setdefault(name, (default, place))
        if "=" in operator:
            self.state.set(name, default, place)
        return operand

    def _found(self, part: Node) -> Value | None:
        name, index, arguments = part.Param.Value, self._index(part), self.state.arguments
        if name == "0":
            return self.state.script
        if name == "BASH_SOURCE" and index in (None, "0"):
            return self.source.file
        if name == "#":
            many = [one for one in arguments if isinstance(one.value, Unknown)]
            return many[0].value if many else str(len(arguments))
        if name.isdigit():
            return arguments[int(name) - 1].value if 0 < int(name[:6]) <= len(arguments) else None
        if name == "PWD" and "PWD" not in self.state.scalars:
            return str(self.state.cwd)
        if index is None or index in ("@", "*"):
            if index == "*" and not isinstance(fields := self.state.fields(name), Unknown):
                return None if fields is None else _joined([one for field in fields for one in (" ", field.value)][1:])
            return self.state.get(name)
        fields = self.state.fields(name)
        if not isinstance(fields, list):
            return fields
        number = self.calculated(part.Index, index, self.source.place(part))
        if isinstance(number, Unknown):
            return number
        return fields[int(number)].value if -len(fields) <= int(number) < len(fields) else None

    def _without(self, value: str, part: Node, place: Place) -> Value:
        """`%` and `#` take the shortest match of a pattern off an end, `%%` and `##` the longest."""
        pattern, operator = self.joined(self._operand(part, False), place, pattern=True), _operator(part)
        if isinstance(pattern, Unknown) or len(value) > _LONGEST_CUT:
            return pattern if isinstance(pattern, Unknown) else Unknown(f"{part.Param.Value} is too long for a pattern", place)
        self._budget.spend(len(value) ** 2 // 1000, place)  # each length is tried, and a try reads the whole
        lengths = range(len(value) + 1) if len(operator) == 1 else range(len(value), -1, -1)
        for length in lengths:
            cut = len(value) - length if operator[0] == "%" else length
            if matches(value[cut:] if operator[0] == "%" else value[:cut], pattern):
                return value[:cut] if operator[0] == "%" else value[cut:]
        return value

    def _operand(self, part: Node, quoted: bool) -> Pieces:
        self._budget.spend(len(self.source.raw(part)) // 10, self.source.place(part))
        return self.pieces(part.Exp.Word if part.Exp else None, quoted=quoted)

    def _odd(self, part: Node) -> Unknown:
        return Unknown(f"{self.source.raw(part)} is an expansion that is not read", self.source.place(part))


def parameter_of(piece: Piece) -> Node | None:
    """The piece, if it is `$name` or `${name...}`."""
    return piece if isinstance(piece, Node) and piece.Type == "ParamExp" else None


def _operator(part: Node) -> str:
    return part.Exp.Op if part.Exp else "/" if part.Slice or part.Repl else ""


def _not_set(name: str, place: Place) -> Unknown:
    return Unknown(f"{name} is not set in the script", place, f"give it with --var {name}=VALUE; the environment is not read")


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
