"""Reads a training script from its first line on, as bash would go through it, up to the command that starts the training.

Nothing is run and no environment is read. What a command prints, a file holds, or a condition on such things decides is unknown, and stays
so in whatever is made of it; it matters only where it gets into the words of the training command.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from streamrl.bridges.slime.bash import builtins
from streamrl.bridges.slime.bash.conditions import holds, matches
from streamrl.bridges.slime.bash.expansion import Expander
from streamrl.bridges.slime.bash.files import read_text
from streamrl.bridges.slime.bash.printed import Printed
from streamrl.bridges.slime.bash.state import Budget, State
from streamrl.bridges.slime.bash.statements import (
    DECLARING,
    Assignment,
    Calculation,
    Case,
    Command,
    Function,
    If,
    Loop,
    Pipeline,
    Simple,
    Statement,
    Statements,
    Test,
    parse,
)
from streamrl.bridges.slime.bash.training import Script, Training, training_of
from streamrl.bridges.slime.bash.values import Field, Place, Unknown, Value
from streamrl.bridges.slime.bash.words import Parameter, Word
from streamrl.errors import ConfigError

_ELEMENT = re.compile(r"\[[^\]]*\]\+?=")
"""Of an array, by its index."""
_MOST_FILES = 64
_DEEPEST_CALL = 32


class _Exit(Exception):
    """No error: `exit` and `return` of the script."""

    def __init__(self, place: Place, *, whole: bool) -> None:
        super().__init__()
        self.place, self.whole = place, whole


def read_script(path: Path, *, arguments: Sequence[str] = (), variables: Mapping[str, str], cwd: Path) -> Script:
    """Find the training command of a script.

    Args:
        path: the script.
        arguments: what it would be started with.
        variables: set before its first line, in place of the environment.
        cwd: the folder that it would be started in.

    Raises:
        ConfigError: no such file; no text, too long, or not bash; files that source each other; a script that builds too much.
    """
    reader = _Reader(State.first(path, variables, arguments, cwd))
    ended = None
    try:
        reader.run_file(path, Place(str(path), 1))
    except _Exit as stop:
        ended = stop.place if stop.whole else None
    except RecursionError as error:
        hint = "hand over the script that has the arguments, without what is around it"
        raise ConfigError(f"expected a training script, got one of too many layers: {path}", hint=hint, path=str(path)) from error
    return Script(tuple(reader.trainings), reader.defaults, tuple(reader.unread), ended)


class _Reader:
    def __init__(self, state: State) -> None:
        self.state, self.budget = state, Budget()
        self.trainings: list[Training] = []
        self.defaults: dict[str, tuple[str, Place]] = {}
        self.unread: list[Unknown] = []
        self._files: list[str] = []
        """Those that are being gone through, each sourced by the one before it."""
        self._file = ""
        """Of the line at hand: in a function, the one that defines it."""
        self._num_files = self._calls = 0
        self._missing: Unknown | None = None
        """What the newest condition would have had to know."""
        self._doubts: list[tuple[Unknown, bool]] = []
        """Of the branches around: what decides it, and whether a training command in it still counts."""

    def place(self, line: int) -> Place:
        return Place(self._file, line)

    def expander(self) -> Expander:
        expander = Expander(self.state, self._file, self.budget, Printed(self.state, self.expander, self._file, self.budget))
        expander.defaults = self.defaults
        return expander

    def run_file(self, path: Path, place: Place) -> None:
        name = str(path)
        if name in self._files:
            raise ConfigError(
                f"expected files that end, got {name}, which sources itself, at {place}", hint="leave one of the two out", path=name
            )
        self._num_files += 1
        if self._num_files > _MOST_FILES:
            raise ConfigError(
                f"expected at most {_MOST_FILES} sourced files, got more at {place}", hint="hand over the last of the scripts"
            )
        statements = parse(read_text(path), name)
        self._files.append(name)
        try:
            with self._in_file(name):
                self.run(statements)
        except _Exit as stop:
            if stop.whole or len(self._files) == 1:
                raise
        finally:
            self._files.pop()

    @contextmanager
    def _in_file(self, name: str) -> Generator[None]:
        before, self._file = self._file, name
        try:
            yield
        finally:
            self._file = before

    def run(self, statements: Statements) -> bool | None:
        """Go through them; the status of the last: True for 0, None where it is not known."""
        status: bool | None = True
        for index, statement in enumerate(statements):
            before = len(self.trainings)
            status = self._statement(statement)
            if len(self.trainings) > before and index + 1 < len(statements):
                self._note_dangling(statements[index + 1])
        return status

    def _note_dangling(self, statement: Statement) -> None:
        [(_, pipeline), *_] = statement.pipelines
        command = pipeline.commands[0]
        first = command.words[0] if isinstance(command, Simple) and command.words else None
        if isinstance(first, Word) and (
            first.raw.startswith("--") or any(isinstance(part, Parameter) and part.index for part in first.parts[:1])
        ):
            self.trainings[-1] = replace(self.trainings[-1], dangling=self.place(statement.line))

    def _statement(self, statement: Statement) -> bool | None:
        self.budget.spend(1, self.place(statement.line))
        if statement.background:
            with self._apart():
                self._chain(statement)
            return True
        return self._chain(statement)

    def _chain(self, statement: Statement) -> bool | None:
        status: bool | None = True
        external = False
        for operator, pipeline in statement.pipelines:
            if operator == ";":
                status = self._pipeline(pipeline)
            elif status is None:
                why = Unknown(f"the result of the command at {self.place(pipeline.line)} is not known", self.place(pipeline.line))
                # Where training follows a program by `&&`, that program has done its part.
                with self._perhaps(why, counts=operator == "&&" and external):
                    self._pipeline(pipeline)
            elif status == (operator == "&&"):
                status = self._pipeline(pipeline)
            external = isinstance(pipeline.commands[-1], Simple)
        return status

    def _pipeline(self, pipeline: Pipeline) -> bool | None:
        if len(pipeline.commands) == 1:
            status = self._command(pipeline.commands[0])
        else:
            for command in pipeline.commands:
                with self._apart():
                    self._command(command)
            status = None
        return status if status is None or not pipeline.negated else not status

    def _command(self, command: Command) -> bool | None:
        if isinstance(command, Simple):
            return self._simple(command)
        if isinstance(command, Test):
            return self._holds([self.expander().whole(word, pattern=index > 0) for index, word in enumerate(command.words)], patterns=True)
        if isinstance(command, Calculation):
            return self._calculation(command)
        if isinstance(command, If):
            return self._if(command)
        if isinstance(command, Loop):
            return self._loop(command)
        if isinstance(command, Case):
            return self._case(command)
        if isinstance(command, Function):
            self.state.functions[command.name] = command
            return True
        if command.own_shell:
            with self._apart():
                return self.run(command.body)
        return self.run(command.body)

    def _calculation(self, command: Calculation) -> bool | None:
        number = self.expander().calculated(command.text, self.place(command.line))
        return None if isinstance(number, Unknown) else number != "0"

    def _if(self, command: If) -> bool | None:
        for index, (condition, body) in enumerate(command.branches):
            self._missing = None
            status = self.run(condition)
            if status:
                return self.run(body)
            if status is None:
                why = self._because("the condition", condition[0].line if condition else command.line, self._missing)
                for branch in (body, *(one for _, one in command.branches[index + 1 :]), command.otherwise):
                    with self._perhaps(why):
                        self.run(branch)
                return None
        return self.run(command.otherwise)

    def _loop(self, command: Loop) -> bool | None:
        why = self._because("the loop", command.line)
        if command.kind in ("while", "until"):
            if self.run(command.condition) is (command.kind == "until"):
                return True
        elif command.kind == "for" and command.words and not self.expander().fields(command.words):
            return True
        with self._perhaps(why):
            for name in command.names:
                self.state.forget(name, why, array=False)
            self.run(command.body)
        return None

    def _case(self, command: Case) -> bool | None:
        subject = self.expander().whole(command.subject)
        why = self._because("the case", command.line, subject if isinstance(subject, Unknown) else None)
        for index, (patterns, body) in enumerate(command.branches):
            if not isinstance(subject, Unknown):
                known = [self.expander().whole(pattern, pattern=True) for pattern in patterns]
                fits = [None if isinstance(one, Unknown) else matches(subject, one) for one in known]
                if any(fits):
                    return self.run(body)
                if None not in fits:
                    continue
            for _, branch in command.branches[index:]:
                with self._perhaps(why):
                    self.run(branch)
            return None
        return True

    def _holds(self, words: list[Value], *, patterns: bool) -> bool | None:
        answer = holds(words, patterns=patterns)
        self._missing = next((word for word in words if isinstance(word, Unknown)), None) if answer is None else None
        return answer

    def _because(self, what: str, line: int, missing: Unknown | None = None) -> Unknown:
        said = f"{what} at {self.place(line)} is not decided by the script's text"
        if missing is None:
            return Unknown(said, self.place(line))
        return Unknown(f"{said}: {missing.why}", self.place(line), missing.hint)

    @contextmanager
    def _apart(self) -> Generator[None]:
        """As in a shell of its own: what is assigned is gone behind it."""
        before = self.state
        self.budget.spend(1 + before.size // 10, self.place(0))
        self.state = before.copied()
        try:
            yield
        except _Exit:
            pass
        finally:
            self.state = before

    @contextmanager
    def _perhaps(self, why: Unknown, *, counts: bool = False) -> Generator[None]:
        """A branch that may be taken: what it assigns is unknown behind it."""
        self._doubts.append((why, counts))
        before = self.state
        self.budget.spend(1 + before.size // 10, self.place(0))
        self.state = after = before.copied()
        try:
            yield
        except _Exit:
            pass
        finally:
            self._doubts.pop()
            self.state = before
            for name in after.changed:
                before.forget(name, why, array=name in before.arrays or name in after.arrays)
            before.functions.update(after.functions)
            before.foreign = before.foreign or after.foreign
            if after.cwd != before.cwd:
                before.cwd = builtins.nowhere(why.place)

    def _assign(self, one: Assignment) -> None:
        place, expander, state = self.place(one.line), self.expander(), self.state
        array = state.arrays.get(one.name)
        if one.index is not None or (isinstance(one.value, tuple) and any(_ELEMENT.match(word.raw) for word in one.value)):
            state.forget(one.name, Unknown(f"{one.name} is set by its elements", place), array=True)
        elif isinstance(one.value, tuple):
            words = expander.fields(one.value)
            former = state.fields(one.name) if one.append else None
            if isinstance(former, Unknown):
                state.forget(one.name, former, array=True)
            else:
                self.budget.spend(len(former or ()) // 10, place)
                state.set(one.name, [*(former or ()), *words], place)
        else:
            value = expander.whole(one.value)
            before = (state.get(one.name) or "") if one.append else ""
            if isinstance(before, Unknown):
                state.forget(one.name, before, array=array is not None)
            elif isinstance(value, Unknown):
                state.forget(one.name, value, array=array is not None)
            elif isinstance(array, list):  # of an array it is the first element
                state.set(one.name, [Field(before + value, place, one.value.raw), *array[1:]], place)
            else:
                state.set(one.name, before + value, place)

    def _simple(self, command: Simple) -> bool | None:
        assignments = [one for one in command.words if isinstance(one, Assignment)]
        words = [one for one in command.words if isinstance(one, Word)]
        if not words or words[0].literal in DECLARING:
            for one in assignments:
                self._assign(one)
            fields = self.expander().fields(words)
            if words and any(isinstance(one.value, str) and re.fullmatch(r"-\w*[nA]\w*", one.value) for one in fields):
                for one in assignments:
                    self.state.forget(one.name, Unknown(f"{one.name} is a reference or a table", self.place(command.line)), array=True)
            return True
        fields = self.expander().fields(words)
        place = self.place(command.line)
        name = fields[0].value if fields else None
        if isinstance(name, str) and (function := self.state.functions.get(name)) is not None:
            return self._call(function, fields[1:], place)
        if isinstance(name, str) and name in ("[", "test"):
            inner = fields[1:-1] if name == "[" else fields[1:]
            return self._holds([one.value for one in inner], patterns=False)
        if isinstance(name, str) and name in ("exit", "return"):
            raise _Exit(place, whole=name == "exit")
        if isinstance(name, str) and name in ("source", "."):
            return self._source(fields[1:], place)
        doubts = [why for why, counts in self._doubts if not counts]
        if (found := training_of(fields, place, self.state.cwd, doubts[0] if doubts else None)) is not None:
            self.trainings.append(found)
        return builtins.apply(self.state, fields, place, self.unread)

    def _call(self, function: Function, arguments: list[Field], place: Place) -> bool | None:
        self._calls += 1
        if self._calls > _DEEPEST_CALL:
            raise ConfigError(
                f"expected calls that end, got more than {_DEEPEST_CALL} within one another at {place}",
                hint="hand over the script that has the arguments, without what is around it",
                line=place.line,
            )
        before, self.state.arguments = self.state.arguments, arguments
        try:
            with self._in_file(function.file):
                return self._command(function.body)
        except _Exit as stop:
            if stop.whole:
                raise
            return None
        finally:
            self._calls -= 1
            self.state.arguments = before

    def _source(self, fields: list[Field], place: Place) -> bool | None:
        named = fields[0].value if fields else Unknown("no file is named", place)
        if isinstance(named, Unknown):
            self._pass_over(Unknown(f"the file that is sourced at {place} is not known: {named.why}", place, named.hint))
            return None
        path = Path(os.path.normpath(self.state.cwd / named))
        if not os.path.exists(path):
            hint = "give the folder that the script is started in with --cwd DIR" if not named.startswith("/") else "put it there"
            self._pass_over(Unknown(f"the file that is sourced at {place} is not there: {path}", place, hint))
            return None
        arguments = self.state.arguments
        if fields[1:]:
            self.state.arguments = fields[1:]
        self.run_file(path, place)
        self.state.arguments = arguments
        return True

    def _pass_over(self, unread: Unknown) -> None:
        self.unread.append(unread)
        self.state.foreign = unread
