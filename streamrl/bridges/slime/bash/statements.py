"""Statements of bash, as far as training scripts have them, from text to a tree (bash(1), SHELL GRAMMAR)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from streamrl.bridges.slime.bash.documents import Document
from streamrl.bridges.slime.bash.words import ENDS, Cursor, Text, Word

_DEEPEST = 60
"""Compound commands within one another."""
_ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)(?:\[(?P<index>[^\]\n]*)\])?(?P<append>\+?)=", re.ASCII)
_RESERVED = re.compile(rf"(?:[a-z]+|[{{}}!])(?=[{re.escape(ENDS)}]|\Z)")
_FUNCTION = re.compile(
    r"(?:function[ \t]+(?P<named>[\w.:-]+)[ \t]*(?:\([ \t]*\))?|(?P<name>[\w.:-]+)[ \t]*\([ \t]*\))[ \t\n]*(?=[{(\[a-z])"
)
_REDIRECTION = re.compile(r"(?:\d*|\{\w+\})(?:<<<|<<-|<<|<>|>>|>\||[<>]&|[<>])|&>>?")
DECLARING = frozenset({"export", "declare", "typeset", "local", "readonly"})


@dataclass(frozen=True, slots=True)
class Assignment:
    """`name=value`, `name+=value`, `name[index]=value`, or of an array `name=(words)`."""

    name: str
    value: Word | tuple[Word, ...]
    append: bool
    index: str | None
    line: int


@dataclass(frozen=True, slots=True)
class Simple:
    """Assignments and the words of a command; of redirections nothing but a here-document."""

    words: tuple[Word | Assignment, ...]
    line: int
    document: Document | None = None
    """Its input, where nothing else but the standard error is redirected."""


@dataclass(frozen=True, slots=True)
class Test:
    """`[[ words ]]`."""

    words: tuple[Word, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Calculation:
    """`(( text ))`."""

    text: str
    line: int


@dataclass(frozen=True, slots=True)
class If:
    """Conditions, each with what it guards; the last without is `else`."""

    branches: tuple[tuple[Statements, Statements], ...]
    otherwise: Statements
    line: int


@dataclass(frozen=True, slots=True)
class Loop:
    """`for`, `select`, `while`, `until`; `names` are set by its head."""

    kind: str
    names: tuple[str, ...]
    words: tuple[Word, ...]
    condition: Statements
    body: Statements
    line: int


@dataclass(frozen=True, slots=True)
class Case:
    """`case subject in patterns) body ;; esac`."""

    subject: Word
    branches: tuple[tuple[tuple[Word, ...], Statements], ...]
    line: int


@dataclass(frozen=True, slots=True)
class Group:
    """`{ ...; }`, or `( ... )`, which is a shell of its own."""

    body: Statements
    own_shell: bool
    line: int


@dataclass(frozen=True, slots=True)
class Function:
    """`name() { ...; }`."""

    name: str
    body: Command
    file: str
    """Where it is defined: its lines are of that file, whoever calls it."""
    line: int


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Commands with `|` between them; `negated` by `!`."""

    commands: tuple[Command, ...]
    negated: bool
    line: int


@dataclass(frozen=True, slots=True)
class Statement:
    """Pipelines with `&&` and `||` between them; the first has the operator `;`."""

    pipelines: tuple[tuple[str, Pipeline], ...]
    line: int
    background: bool = field(default=False)


Command = Simple | Test | Calculation | If | Loop | Case | Group | Function
Statements = tuple[Statement, ...]


def parse(text: str, file: str, first_line: int = 1) -> Statements:
    """The statements of a script.

    Raises:
        ConfigError: a quote, a bracket or a here-document without its end, or what else is no statement; names file and line.
    """
    parser = _Parser(Cursor(text, file, first_line))
    statements = parser.statements(frozenset())
    if parser.cursor.peek():
        parser.cursor.fail("a statement")
    if parser.cursor.awaited:
        parser.cursor.no_body(parser.cursor.awaited[0])
    return statements


class _Parser:
    def __init__(self, cursor: Cursor) -> None:
        self.cursor = cursor
        self._depth = 0

    def statements(self, until: frozenset[str]) -> Statements:
        """Up to a reserved word of `until`, `)`, `;;` or the end, none of which is read."""
        self._enter()
        found: list[Statement] = []
        while True:
            self.cursor.skip_blanks(lines=True)
            if not self.cursor.peek() or self.cursor.peek() == ")" or self.cursor.peek(2) == ";;" or self._reserved() in until:
                self._depth -= 1
                return tuple(found)
            found.append(self._statement())

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > _DEEPEST:
            self.cursor.fail(f"at most {_DEEPEST} commands within one another", "flatten the script")

    def _statement(self) -> Statement:
        line, operator, pipelines, background = self.cursor.line, ";", list[tuple[str, Pipeline]](), False
        while True:
            pipelines.append((operator, self._pipeline()))
            self.cursor.skip_blanks()
            operator = self.cursor.peek(2)
            if operator not in ("&&", "||"):
                break
            self.cursor.at += 2
            self.cursor.skip_blanks(lines=True)
        if self.cursor.peek(2) != ";;" and self.cursor.peek() in (";", "&"):
            background = self.cursor.peek() == "&"
            self.cursor.at += 1
        elif self.cursor.peek() not in ("", "\n", ")") and self.cursor.peek(2) != ";;":
            self.cursor.fail("an end of the command")
        return Statement(tuple(pipelines), line, background)

    def _pipeline(self) -> Pipeline:
        line, negated, commands = self.cursor.line, False, list[Command]()
        while self._reserved() == "!":
            self._take("!")
            negated = not negated
        while True:
            commands.append(self._command())
            self.cursor.skip_blanks()
            if self.cursor.peek() != "|" or self.cursor.peek(2) == "||":
                return Pipeline(tuple(commands), negated, line)
            self.cursor.at += 2 if self.cursor.peek(2) == "|&" else 1
            self.cursor.skip_blanks(lines=True)

    def _command(self) -> Command:
        line, word = self.cursor.line, self._reserved()
        if function := _FUNCTION.match(self.cursor.text, self.cursor.at):
            if self.cursor.awaited and "\n" in function[0]:
                self.cursor.fail("a here-document's body", "put the function on lines of its own")
            self.cursor.at = function.end()
            self._enter()
            body = self._command()
            self._depth -= 1
            return Function(function["named"] or function["name"], body, self.cursor.file, line)
        compound = {"if": self._if, "case": self._case, "for": self._for, "select": self._for, "while": self._while, "until": self._while}
        if self.cursor.peek(2) == "[[" and self.cursor.text[self.cursor.at + 2 : self.cursor.at + 3] in tuple(" \t\n\\"):
            command: Command = self._test(line)
        elif self.cursor.peek(2) == "((":
            inner = self.cursor.balanced("(", ")")
            command = Calculation(inner[1:-1] if inner.endswith(")") else inner, line)
        elif self.cursor.peek() == "(":
            self.cursor.at += 1
            command = Group(self._closed(")"), own_shell=True, line=line)
        elif word == "{":
            self._take("{")
            command = Group(self._closed("}"), own_shell=False, line=line)
        elif word in compound:
            command = compound[word](line)
        else:
            return self._simple(line)
        self._redirections()
        return command

    def _closed(self, end: str) -> Statements:
        body = self.statements(frozenset({end}))
        self._take(end)
        return body

    def _if(self, line: int) -> If:
        branches, word = list[tuple[Statements, Statements]](), "if"
        while word in ("if", "elif"):
            self._take(word)
            condition = self._closed("then")
            branches.append((condition, self.statements(frozenset({"elif", "else", "fi"}))))
            word = self._reserved()
        otherwise: Statements = ()
        if word == "else":
            self._take("else")
            otherwise = self.statements(frozenset({"fi"}))
        self._take("fi")
        return If(tuple(branches), otherwise, line)

    def _while(self, line: int) -> Loop:
        kind = self._reserved()
        self._take(kind)
        condition = self._closed("do")
        return Loop(kind, (), (), condition, self._closed("done"), line)

    def _for(self, line: int) -> Loop:
        self._take(self._reserved())
        self.cursor.skip_blanks()
        names, words, kind = tuple[str, ...](), list[Word](), "for"
        if self.cursor.peek(2) == "((":
            names, kind = tuple(re.findall(r"[A-Za-z_]\w*", self.cursor.balanced("(", ")"))), "count"
        else:
            names = (self.cursor.word().raw,)
            self.cursor.skip_blanks(lines=True)
            if self._reserved() == "in":
                self._take("in")
                words = self._words()
        self.cursor.skip_blanks(lines=True)
        if self.cursor.peek() == ";":
            self.cursor.at += 1
            self.cursor.skip_blanks(lines=True)
        end = "}" if self._reserved() == "{" else "done"
        self._take("{" if end == "}" else "do")
        return Loop(kind, names, tuple(words), (), self._closed(end), line)

    def _case(self, line: int) -> Case:
        self._take("case")
        self.cursor.skip_blanks()
        subject, branches = self.cursor.word(), list[tuple[tuple[Word, ...], Statements]]()
        self.cursor.skip_blanks(lines=True)
        self._take("in")
        while True:
            self.cursor.skip_blanks(lines=True)
            if self._reserved() == "esac":
                self._take("esac")
                return Case(subject, tuple(branches), line)
            if self.cursor.peek() == "(":
                self.cursor.at += 1
            patterns: list[Word] = []
            while self.cursor.peek() != ")":
                self.cursor.skip_blanks()
                patterns.append(self._nonempty())
                self.cursor.skip_blanks()
                if self.cursor.peek() == "|":
                    self.cursor.at += 1
            self.cursor.at += 1
            branches.append((tuple(patterns), self.statements(frozenset({"esac"}))))
            if self.cursor.peek(2) == ";;":
                self.cursor.at += 3 if self.cursor.peek(3) == ";;&" else 2

    def _test(self, line: int) -> Test:
        self.cursor.at += 2
        words: list[Word] = []
        while True:
            self.cursor.skip_blanks(lines=True)
            if self.cursor.peek(2) == "]]":
                self.cursor.at += 2
                return Test(tuple(words), line)
            operator = self.cursor.peek(2) if self.cursor.peek(2) in ("&&", "||") else self.cursor.peek()
            if operator in ("&&", "||", "(", ")", "<", ">"):
                words.append(Word((Text(operator, quoted=False),), self.cursor.line, operator))
                self.cursor.at += len(operator)
            else:
                words.append(self._nonempty())
                if words[-1].raw == "=~":  # a regular expression has brackets and bars of its own
                    self.cursor.skip_blanks()
                    end = re.compile(r"(?:\\.|'[^']*'|\"[^\"]*\"|[^\s\\'\"])*").match(self.cursor.text, self.cursor.at)
                    self.cursor.at = end.end() if end else self.cursor.at

    def _simple(self, line: int) -> Simple:
        words, redirections = list[Word | Assignment](), list[tuple[str, Document | None]]()
        while True:
            self.cursor.skip_blanks()
            if found := self._redirections():
                redirections += found
                continue
            if self.cursor.peek() in ("", "\n", ";", "&", "|", ")"):
                if not words and not redirections:
                    self.cursor.fail("a command")
                inputs = [document for operator, document in redirections if not operator.startswith("2")]
                return Simple(tuple(words), line, inputs[0] if len(inputs) == 1 else None)
            assignable = all(isinstance(one, Assignment) for one in words) or (isinstance(words[0], Word) and words[0].literal in DECLARING)
            words.append((self._assignment() if assignable else None) or self._nonempty())

    def _assignment(self) -> Assignment | None:
        found = _ASSIGNMENT.match(self.cursor.text, self.cursor.at)
        if found is None:
            return None
        line = self.cursor.line
        self.cursor.at = found.end()
        value: Word | tuple[Word, ...]
        if self.cursor.peek() == "(":
            self.cursor.at += 1
            value = tuple(self._words(array=True))
            self._take(")")
        else:
            value = self.cursor.word()
        return Assignment(found["name"], value, bool(found["append"]), found["index"], line)

    def _words(self, *, array: bool = False) -> list[Word]:
        """Words up to the end of the line, or of an array over several lines up to its bracket."""
        words: list[Word] = []
        while True:
            self.cursor.skip_blanks(lines=array)
            if self.cursor.peek() in ("", ")") or (not array and self.cursor.peek() in ("\n", ";")):
                return words
            words.append(self._nonempty())

    def _nonempty(self) -> Word:
        word = self.cursor.word()
        if not word.raw:
            self.cursor.fail("a word")
        return word

    def _redirections(self) -> list[tuple[str, Document | None]]:
        """Over redirections and the files that they name: the operator of each, and what stands for the standard input."""
        found: list[tuple[str, Document | None]] = []
        while redirection := _REDIRECTION.match(self.cursor.text, self.cursor.at):
            operator, document = redirection[0], None
            if operator.endswith(("<<", "<<-")):
                self.cursor.at += operator.index("<")
                self.cursor.awaited.append(self.cursor.document())
                document = self.cursor.awaited[-1] if operator.rstrip("<-") in ("", "0") else None
            else:
                self.cursor.at = redirection.end()
                self.cursor.skip_blanks()
                self.cursor.at += self.cursor.peek(2) in ("<(", ">(")
                if self.cursor.peek() == "(":  # <(commands)
                    self.cursor.balanced("(", ")")
                else:
                    self._nonempty()
            self.cursor.skip_blanks()
            found.append((operator, document))
        return found

    def _reserved(self) -> str:
        found = _RESERVED.match(self.cursor.text, self.cursor.at)
        return found[0] if found else ""

    def _take(self, word: str) -> None:
        if not self.cursor.text.startswith(word, self.cursor.at):
            self.cursor.fail(repr(word))
        self.cursor.at += len(word)
        self.cursor.skip_blanks()
