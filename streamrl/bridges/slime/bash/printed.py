"""What a few commands print, by their words: paths, `seq`, `cat` of a here-document. Others are not run: what they print is unknown."""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from streamrl.bridges.slime.bash.state import Budget, State
from streamrl.bridges.slime.bash.syntax import Node, Source
from streamrl.bridges.slime.bash.values import Unknown, Value

if TYPE_CHECKING:
    from streamrl.bridges.slime.bash.expansion import Expander, Pieces

_MOST = 10_000


class _Run(NamedTuple):
    """A simple command."""

    words: list[str]
    document: Node | None
    """Its input, where nothing else but the standard error is redirected."""


class Printed:
    """Of one file in a state; `expander` expands the words of the commands."""

    def __init__(self, state: State, expander: Callable[[], Expander], source: Source, budget: Budget) -> None:
        self._state, self._expander, self._source, self._budget = state, expander, source, budget

    def __call__(self, output: Node) -> Value:
        """The text in place of `$(...)`, without ends of lines behind it."""
        text, place = self._source.raw(output, 1 if output.Backquotes else 2, 1), self._source.place(output)
        self._budget.spend(len(text) // 10, place)
        unknown = Unknown(f"$({' '.join(text.split())[:80]}) is what a command prints", place, "put its text in its place")
        commands = self._commands(output.Stmts)
        if commands is None:
            return unknown
        folder = str(self._state.cwd)
        if len(commands) == 1 and (document := commands[0].document) and commands[0].words in (["cat"], ["cat", "-"]):
            value = self._body(document, output)
            return unknown if value is None else value
        for name, *words in (command.words for command in commands[:-1]):
            if name != "cd" or (changed := _path(words, folder)) is None:
                return unknown
            folder = changed
        name, *words = commands[-1].words
        return _print(name, words, folder) or unknown

    def _commands(self, statements: Sequence[Node]) -> list[_Run] | None:
        """The words of simple commands with `&&` or `;` between them; None for anything else."""
        found: list[_Run] = []
        for one in statements:
            if one.Negated or one.Background:
                return None
            if one.Cmd and one.Cmd.Type == "BinaryCmd":
                inner = self._commands([one.Cmd.X, one.Cmd.Y]) if one.Cmd.Op == "&&" and not one.Redirs else None
                if inner is None:
                    return None
                found += inner
                continue
            if not one.Cmd or one.Cmd.Type != "CallExpr" or one.Cmd.Assigns:
                return None
            fields = self._expander().fields(one.Cmd.Args)
            texts = [field.value for field in fields if isinstance(field.value, str)]
            if not texts or len(texts) != len(fields) or texts[0] in self._state.functions:
                return None
            inputs = [redirect for redirect in one.Redirs if redirect.N is None or not redirect.N.Value.startswith("2")]
            documents = [one for one in inputs if one.Op in ("<<", "<<-") and (one.N is None or one.N.Value == "0")]
            found.append(_Run(texts, documents[0] if len(inputs) == 1 and documents else None))
        return found or None

    def _body(self, document: Node, output: Node) -> Value | None:
        """The text of a here-document; None where bash takes another for its end than the parser does."""
        expander, raw = self._expander(), self._source.raw(document.Word)
        delimiter = expander.joined(expander.pieces(document.Word), self._source.place(document))
        if document.Hdoc is None:
            return "" if document.Pos.Line < output.End.Line else None
        lines = self._source.raw(document.Hdoc).splitlines()
        if document.Hdoc.End.Offset > output.End.Offset or any(re.match(rf"\t*{re.escape(str(delimiter))}.*\)", one) for one in lines):
            return None
        self._budget.spend(len(lines), self._source.place(document.Hdoc))
        pieces: Pieces = []
        for index, part in enumerate(document.Hdoc.Parts):
            if part.Type == "Lit":
                text = part.Value
                if document.Op == "<<-":
                    before = document.Hdoc.Parts[index - 1] if index else None
                    begins = before is None or (before.Type == "Lit" and before.Value.endswith("\n"))
                    text = re.sub(r"\n\t+", "\n", text.lstrip("\t") if begins else text)
                pieces.append((text if any(one in raw for one in "'\"\\") else re.sub(r"\\([$`\\])", r"\1", text), True))
            elif part.Type == "ParamExp" and part.Exp and any(one in self._source.raw(part) for one in "'\"\\"):
                why = f"{self._source.raw(part)} has quotes in a here-document"
                pieces.append((Unknown(why, self._source.place(part)), True))
            elif part.Type in ("ParamExp", "CmdSubst"):
                pieces.append((part, True))
            else:
                pieces += expander.pieces_of([part], quoted=True)
        value = expander.joined(pieces, self._source.place(document.Hdoc))
        return value.rstrip("\n") if isinstance(value, str) else value


def _print(name: str, words: list[str], folder: str) -> str | None:
    path = _path(words, folder)
    if name == "pwd" and all(one in ("-P", "-L") for one in words):
        return folder
    if name in ("dirname", "basename") and (named := [one for one in words if one != "--"]):
        text = named[0].rstrip("/") or "/"
        if name == "dirname" and len(named) == 1:
            return os.path.dirname(text) or "."
        suffix = named[1] if len(named) == 2 else ""
        base = os.path.basename(text)
        return base.removesuffix(suffix) if suffix != base and len(named) <= 2 else None
    if name in ("realpath", "readlink") and path is not None and (name == "realpath" or "-f" in words):
        return path
    if name == "seq" and 1 <= len(words) <= 3 and all(re.fullmatch(r"-?\d{1,9}", one) for one in words):
        first, step, last = {1: (1, 1, words[0]), 2: (words[0], 1, words[-1]), 3: tuple(words)}[len(words)]
        numbers = range(int(first), int(last) + (1 if int(step) > 0 else -1), int(step)) if int(step) else range(0)
        return "\n".join(map(str, numbers)) if 0 < len(numbers) <= _MOST else None
    return None


def _path(words: list[str], folder: str) -> str | None:
    """The one path among the words of a command, absolute; links are taken by name."""
    named = [one for one in words if not one.startswith("-")]
    return os.path.normpath(os.path.join(folder, named[0])) if len(named) == 1 and not named[0].startswith("~") else None
