"""What a few commands print, by their words: paths, `seq`, `cat` of a here-document. Others are not run: what they print is unknown."""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from streamrl.bridges.slime.bash.documents import Document
from streamrl.bridges.slime.bash.state import Budget, State
from streamrl.bridges.slime.bash.statements import Simple, parse
from streamrl.bridges.slime.bash.values import Place, Unknown, Value
from streamrl.bridges.slime.bash.words import Cursor, Output, Text, Word

if TYPE_CHECKING:
    from streamrl.bridges.slime.bash.expansion import Expander

_MOST = 10_000


class _Run(NamedTuple):
    """A simple command."""

    words: list[str]
    document: Document | None


class Printed:
    """Of one file in a state; `expander` expands the words of the commands."""

    def __init__(self, state: State, expander: Callable[[], Expander], file: str, budget: Budget) -> None:
        self._state, self._expander, self._file, self._budget = state, expander, file, budget

    def __call__(self, output: Output) -> Value:
        """The text in place of `$(...)`, without ends of lines behind it."""
        place = Place(self._file, output.line)
        self._budget.spend(len(output.text) // 10, place)
        shown = " ".join(output.text.split())
        unknown = Unknown(f"$({shown[:80]}) is what a command prints", place, "put its text in its place")
        commands = self._commands(output.text, output.line)
        if commands is None:
            return unknown
        folder = str(self._state.cwd)
        if len(commands) == 1 and (document := commands[0].document) and commands[0].words in (["cat"], ["cat", "-"]):
            return self._body(document)
        for name, *words in (command.words for command in commands[:-1]):
            if name != "cd" or (changed := _path(words, folder)) is None:
                return unknown
            folder = changed
        name, *words = commands[-1].words
        return _print(name, words, folder) or unknown

    def _commands(self, text: str, line: int) -> list[_Run] | None:
        """The words of simple commands with `&&` or `;` between them; None for anything else."""
        found: list[_Run] = []
        for statement in parse(text, self._file, line):
            for operator, pipeline in statement.pipelines:
                [command, *others] = pipeline.commands
                if operator == "||" or others or pipeline.negated or statement.background or not isinstance(command, Simple):
                    return None
                words = [one for one in command.words if isinstance(one, Word)]
                fields = self._expander().fields(words)
                if len(words) != len(command.words) or not fields:
                    return None
                texts = [one.value for one in fields if isinstance(one.value, str)]
                if len(texts) != len(fields) or texts[0] in self._state.functions:
                    return None
                found.append(_Run(texts, command.document))
        return found or None

    def _body(self, document: Document) -> Value:
        if document.literal:
            word = Word((Text(document.body, quoted=True),), document.line, document.body)
        else:
            self._budget.spend(len(document.body) // 5, Place(self._file, document.line))
            word = Cursor(document.body, self._file, document.line, document.breaks).body()
        value = self._expander().whole(word)
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
