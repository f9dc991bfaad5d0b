"""Words of bash: quotes, parameters, arithmetic, command substitutions, as parts that are not expanded yet (bash(1), QUOTING)."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from typing import NoReturn

from streamrl.bridges.slime.bash.documents import Document
from streamrl.bridges.slime.bash.values import Place
from streamrl.errors import ConfigError

ENDS = " \t\n;&|<>()"
"""Characters that end a word where they are not quoted."""
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_PARAMETER = re.compile(
    r"(?P<length>#(?=.))?(?P<name>[A-Za-z_]\w*|\d+|[@*#?$!-])(?:\[(?P<index>[^\]]*)\])?(?P<rest>.*)", re.ASCII | re.DOTALL
)
_OPERATOR = re.compile(r":[-=?+]|[-=?+]|%%|%|##|#|//|/|\^\^|\^|,,|,|:|@")
_BACKTICKS = re.compile(r"`((?:[^`\\]|\\.)*+)`", re.DOTALL)
_BRACES = re.compile(r"\{[^{}\s]*+\}")
_ESCAPES = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"'}


@dataclass(frozen=True, slots=True)
class Text:
    """Characters as they are."""

    text: str
    quoted: bool


@dataclass(frozen=True, slots=True)
class Parameter:
    """`$name` and `${name[index]OP...}`; `length` for `${#name}`."""

    name: str
    line: int
    quoted: bool
    index: str | None = None
    length: bool = False
    operator: str = ""
    operand: str = ""


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """`$((...))`."""

    text: str
    line: int
    quoted: bool


@dataclass(frozen=True, slots=True)
class Output:
    """What the commands in `$(...)` or backticks print."""

    text: str
    line: int
    quoted: bool


@dataclass(frozen=True, slots=True)
class Opaque:
    """Syntax whose value is not looked for."""

    why: str
    line: int
    quoted: bool = False


Part = Text | Parameter | Arithmetic | Output | Opaque


@dataclass(frozen=True, slots=True)
class Word:
    """Parts one behind another, without blanks between them."""

    parts: tuple[Part, ...]
    line: int
    raw: str

    @property
    def literal(self) -> str | None:
        """The text of a word without quotes and expansions; None for another."""
        if len(self.parts) == 1 and isinstance(part := self.parts[0], Text) and not part.quoted:
            return part.text
        return None


class Cursor:
    """A place in a text, and words from there on."""

    def __init__(self, text: str, file: str, first_line: int = 1, breaks: list[int] | None = None) -> None:
        self.text, self.file, self.at = text, file, 0
        self._first = first_line
        self._breaks = [found.start() for found in re.finditer("\n", text)] if breaks is None else breaks
        self.awaited: list[Document] = []
        """Here-documents whose bodies begin behind this line."""

    @property
    def line(self) -> int:
        """The line of the file that the next character is on."""
        return self._first + bisect_right(self._breaks, self.at - 1)

    def peek(self, length: int = 1) -> str:
        """The next characters; empty at the end."""
        return self.text[self.at : self.at + length]

    def skip_blanks(self, *, lines: bool = False) -> None:
        """Over blanks, continued lines and comments; with `lines` over the ends of lines too."""
        while self.at < len(self.text):
            character = self.text[self.at]
            if character == "\n" and lines:
                self._bodies(self.awaited, closes=False)
            elif character in " \t":
                self.at += 1
            elif self.peek(2) == "\\\n":
                self.at += 2
            elif character == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                return

    def document(self) -> Document:
        """The here-document whose operator is here; its body is still to be read."""
        at, tabs_off = self.at, self.peek(3) == "<<-"
        self.at += 3 if tabs_off else 2
        self.skip_blanks()
        word = self.word()
        texts = [part for part in word.parts if isinstance(part, Text)]
        if not word.raw or len(texts) < len(word.parts) or any(character in word.raw for character in "$`\n"):
            self.at = at
            self.fail("a plain word that ends the here-document", "write <<EOF, or <<'EOF' for a text without expansions")
        return Document("".join(part.text for part in texts), any(part.quoted for part in texts), tabs_off, at)

    def _bodies(self, documents: list[Document], *, closes: bool) -> None:
        """Over the end of a line and the bodies behind it."""
        self.at += 1
        for document in documents:
            document.line = self.line
            end = document.read(self.text, self.at, closes=closes)
            if end is None:
                self.no_body(document)
            self.at = end
        documents.clear()

    def no_body(self, document: Document) -> NoReturn:
        """Raise ConfigError for a here-document without its end."""
        self.at = document.at
        hint = "the delimiter stands alone on its line, without blanks; behind <<- tabs may be before it"
        self.fail(f"a line {document.delimiter!r} that ends the here-document", hint)

    def fail(self, expected: str, hint: str = "") -> NoReturn:
        """Raise ConfigError that names the line."""
        got = repr(self.peek(12)) if self.at < len(self.text) else "the end"
        raise ConfigError(
            f"expected {expected}, got {got} at {Place(self.file, self.line)}",
            hint=hint or "`bash -n` says whether bash reads it",
            path=self.file,
            line=self.line,
        )

    def word(self) -> Word:
        """The word that begins here; it may be empty."""
        start, line, parts, plain = self.at, self.line, list[Part](), list[str]()

        def flush() -> None:
            if plain:
                parts.append(Text("".join(plain), quoted=False))
                plain.clear()

        while self.at < len(self.text) and (character := self.text[self.at]) not in ENDS:
            if character == "\\":
                after = self.text[self.at + 1 : self.at + 2]
                self.at += 2
                if after not in ("", "\n"):  # bash reads none of the two, nor a backslash that nothing follows
                    flush()
                    parts.append(Text(after, quoted=True))
            elif character in "'\"`$":
                flush()
                parts += self._special(character, quoted=False)
            else:
                plain.append(character)
                self.at += 1
        flush()
        raw = self.text[start : self.at]
        bare = "".join(part.text if isinstance(part, Text) and not part.quoted else "\0" for part in parts)
        if any("," in braces or ".." in braces for braces in _BRACES.findall(bare)):
            return Word((Opaque(f"{raw} is a brace expansion", line),), line, raw)
        return Word(tuple(parts), line, raw)

    def _special(self, character: str, *, quoted: bool) -> list[Part]:
        if character == "'":
            return [self._single()]
        if character == '"':
            return self._double()
        return [self._backticks(quoted=quoted) if character == "`" else self._dollar(quoted=quoted)]

    def _single(self) -> Text:
        end = self.text.find("'", self.at + 1)
        if end < 0:
            self.fail("an end of the quote that begins here")
        text = self.text[self.at + 1 : end]
        self.at = end + 1
        return Text(text, quoted=True)

    def _double(self) -> list[Part]:
        begin = self.at
        self.at += 1
        parts = self._expanded('"')
        if self.at >= len(self.text):
            self.at = begin
            self.fail("an end of the quote that begins here")
        self.at += 1
        # Around an empty array alone quotes make no word; around nothing they do.
        return parts or [Text("", quoted=True)]

    def body(self) -> Word:
        """The whole text as the body of a here-document, in which quotes are characters."""
        line, parts = self.line, self._expanded("")
        for index, part in enumerate(parts):
            if isinstance(part, Parameter) and any(character in part.operand for character in "'\"\\"):
                parts[index] = Opaque(f"${{{part.name}{part.operator}{part.operand}}} has quotes in a here-document", part.line)
        return Word(tuple(parts), line, self.text)

    def _expanded(self, end: str) -> list[Part]:
        """Up to the character `end`, or of a here-document to the end of the text: what is expanded in double quotes."""
        parts, plain = list[Part](), list[str]()

        def flush() -> None:
            if text := "".join(plain):
                parts.append(Text(text, quoted=True))
            plain.clear()

        while self.at < len(self.text) and (character := self.text[self.at]) != end:
            if character == "\\":
                after = self.text[self.at + 1 : self.at + 2]
                # A backslash is one before these only.
                plain.append("" if after == "\n" else after if after in "$`\\" + end else "\\" + after)
                self.at += 2
            elif character in "`$":
                flush()
                parts += self._special(character, quoted=True)
            else:
                plain.append(character)
                self.at += 1
        flush()
        return parts

    def _backticks(self, *, quoted: bool) -> Output:
        line, found = self.line, _BACKTICKS.match(self.text, self.at)
        if found is None:
            self.fail("an end of the backticks that begin here")
        self.at = found.end()
        return Output(re.sub(r"\\([$`\\])", r"\1", found[1]), line, quoted)

    def _dollar(self, *, quoted: bool) -> Part:
        line, after = self.line, self.text[self.at + 1 : self.at + 2]
        if after == "(":
            self.at += 1
            inner = self.balanced("(", ")")
            if inner.startswith("(") and inner.endswith(")"):
                return Arithmetic(inner[1:-1], line, quoted)
            return Output(inner, line, quoted)
        if after == "{":
            self.at += 1
            return parameter(self.balanced("{", "}", quoted=quoted), line, quoted=quoted)
        if after == "'" and not quoted:
            self.at += 1
            return self._ansi(line)
        if name := _NAME.match(self.text, self.at + 1):
            self.at = name.end()
            return Parameter(name[0], line, quoted)
        if after and after in "0123456789@*#?$!-":
            self.at += 2
            return Parameter(after, line, quoted, index=after if after in "@*" else None)
        self.at += 1
        return Text("$", quoted=True)

    def _ansi(self, line: int) -> Part:
        """`$'...'` (bash(1), QUOTING)."""
        found = re.compile(r"'((?:[^'\\]|\\.)*)'", re.DOTALL).match(self.text, self.at)
        if found is None:
            self.fail("an end of the quote that begins here")
        self.at = found.end()
        if any(escape not in _ESCAPES for escape in re.findall(r"\\(.)", found[1], re.DOTALL)):
            return Opaque(f"${found[0]} has escapes that are not read", line, quoted=True)
        return Text(re.sub(r"\\(.)", lambda one: _ESCAPES[one[1]], found[1], flags=re.DOTALL), quoted=True)

    def balanced(self, opening: str, closing: str, *, quoted: bool = False) -> str:
        """What stands between the bracket here and the one that closes it, quotes and inner brackets passed over.

        Within `quoted`, double quotes, a single quote is a letter.
        """
        begin, brackets = self.at, list[list[Document]]()  # of each open one: here-documents whose bodies follow
        commands = opening == "(" and self.peek(2) != "(("  # in arithmetic << is a shift
        while self.at < len(self.text):
            character = self.text[self.at]
            if character == "\\":
                self.at += 1
            elif character == "'" and not quoted:
                self.at = max(self.at, self.text.find("'", self.at + 1))
            elif character == '"':
                self._pass_double()
                continue
            elif not commands and self.peek(2) == "$(":
                self._pass_substitution()
                continue
            elif commands and self.peek(2) == "((":
                self.balanced("(", ")")
                continue
            elif character == opening and (opening == "(" or not brackets or self.text[self.at - 1] == "$"):
                brackets.append([] if not brackets or self.text[self.at - 1] in "$<>" else brackets[-1])
            elif character == closing:
                if (left := brackets.pop()) and (not brackets or left is not brackets[-1]):
                    self.no_body(left[0])
                if not brackets:
                    self.at += 1
                    return self._inner(begin, arithmetic=opening == "(" and not commands)
            elif commands and character in "#<\n" and self._pass_of_commands(brackets[-1]):
                continue
            self.at += 1
        self.at = begin
        self.fail(f"an end ({closing}) of what begins here")

    def _inner(self, begin: int, *, arithmetic: bool) -> str:
        inner = self.text[begin + 1 : self.at - 1]
        if arithmetic and "<<" in inner and not inner.endswith(")"):
            self.at = begin
            self.fail("no here-document within ((", "put a blank between the two brackets")
        return inner

    def _pass_of_commands(self, awaited: list[Document]) -> bool:
        """Over what only commands have: a comment, a here-document's operator, a line's end with bodies behind it; whether it was one."""
        if self.peek() == "#" and self.text[self.at - 1] in ENDS:
            self.skip_blanks()
        elif self.peek(3) == "<<<":
            self.at += 3
        elif self.peek(2) == "<<":
            awaited.append(self.document())
        elif self.peek() == "\n":
            self._bodies(awaited, closes=True)
        else:
            return False
        return True

    def _pass_substitution(self) -> None:
        self.at += 1
        self.balanced("(", ")")

    def _pass_double(self) -> None:
        """Over a string in double quotes, with strings of substitutions within it."""
        begin = self.at
        self.at += 1
        while self.at < len(self.text):
            character = self.text[self.at]
            if character == "\\":
                self.at += 1
            elif self.peek(2) == "$(":
                self._pass_substitution()
                continue
            elif character == '"':
                self.at += 1
                return
            self.at += 1
        self.at = begin
        self.fail("an end of the quote that begins here")


def parameter(inner: str, line: int, *, quoted: bool) -> Part:
    """What stands in `${...}`."""
    found = _PARAMETER.fullmatch(inner)
    rest = found["rest"] if found else ""
    operator = _OPERATOR.match(rest)
    if found is None or (rest and operator is None) or (found["length"] and rest):
        return Opaque(f"${{{inner}}} is an expansion that is not read", line, quoted)
    name, index = found["name"], found["index"]
    return Parameter(
        name,
        line,
        quoted,
        index=name if name in "@*" else index,
        length=bool(found["length"]),
        operator=operator[0] if operator else "",
        operand=rest[operator.end() :] if operator else "",
    )
