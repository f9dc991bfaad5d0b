"""Reads a training script from its first line on, as bash would go through it, up to the command that starts the training.

Nothing is run and no environment is read. What a command prints, a file holds, or a condition on such things decides is unknown, and stays
so in whatever is made of it; it matters only where it gets into the words of the training command.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from streamrl.bridges.slime.bash import builtins
from streamrl.bridges.slime.bash.conditions import holds, matches
from streamrl.bridges.slime.bash.expansion import Expander, parameter_of
from streamrl.bridges.slime.bash.files import read_text
from streamrl.bridges.slime.bash.printed import Printed
from streamrl.bridges.slime.bash.state import Budget, Function, State
from streamrl.bridges.slime.bash.syntax import Node, Source
from streamrl.bridges.slime.bash.training import Script, Training, training_of
from streamrl.bridges.slime.bash.values import Field, Place, Unknown, Value
from streamrl.errors import ConfigError

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
        self._source = Source("", "")
        """The file of the line at hand: in a function, the one that defines it."""
        self._num_files = self._calls = 0
        self._missing: Unknown | None = None
        """What the newest condition would have had to know."""
        self._kinds: Mapping[str, Callable[[Node], bool | None]] = {
            "CallExpr": self._simple,
            "DeclClause": self._declaration,
            "LetClause": self._let,
            "BinaryCmd": self._binary,
            "TestClause": self._test,
            "ArithmCmd": self._calculation,
            "IfClause": self._if,
            "ForClause": self._loop,
            "WhileClause": self._loop,
            "CaseClause": self._case,
        }
        self._doubts: list[tuple[Unknown, bool]] = []
        """Of the branches around: what decides it, and whether a training command in it still counts."""

    def place(self, node: Node) -> Place:
        return self._source.place(node)

    def expander(self) -> Expander:
        expander = Expander(self.state, self._source, self.budget, Printed(self.state, self.expander, self._source, self.budget))
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
        source = Source(name, read_text(path))
        statements = source.parse()
        self._files.append(name)
        try:
            with self._in_file(source):
                self.run(statements)
        except _Exit as stop:
            if stop.whole or len(self._files) == 1:
                raise
        finally:
            self._files.pop()

    @contextmanager
    def _in_file(self, source: Source) -> Generator[None]:
        before, self._source = self._source, source
        try:
            yield
        finally:
            self._source = before

    def run(self, statements: Sequence[Node]) -> bool | None:
        """Go through them; the status of the last: True for 0, None where it is not known."""
        status: bool | None = True
        for index, statement in enumerate(statements):
            before = len(self.trainings)
            status = self._statement(statement)
            if len(self.trainings) > before and index + 1 < len(statements):
                self._note_dangling(statements[index + 1])
        return status

    def _note_dangling(self, statement: Node) -> None:
        first = statement
        while first.Cmd and first.Cmd.Type == "BinaryCmd":
            first = first.Cmd.X
        if not first.Cmd or first.Cmd.Assigns or not first.Cmd.Args or first.Cmd.Type != "CallExpr":
            return
        word = first.Cmd.Args[0]
        parameter = next((parameter_of(piece) for piece, _ in self.expander().pieces(word)), None)
        if self._source.raw(word).startswith("--") or (parameter and (parameter.Index or parameter.Param.Value in ("@", "*"))):
            self.trainings[-1] = replace(self.trainings[-1], dangling=self.place(statement))

    def _statement(self, statement: Node) -> bool | None:
        self.budget.spend(1, self.place(statement))
        if statement.Cmd is None:
            return True
        if statement.Background:
            with self._apart():
                self._command(statement.Cmd)
            return True
        status = self._command(statement.Cmd)
        return status if status is None or not statement.Negated else not status

    def _binary(self, command: Node) -> bool | None:
        if command.Op not in ("&&", "||"):
            for one in (command.X, command.Y):
                with self._apart():
                    self._statement(one)
            return None
        status = self._statement(command.X)
        if status is None:
            why = Unknown(f"the result of the command at {self.place(command.Y)} is not known", self.place(command.Y))
            last = command.X
            while last.Cmd and last.Cmd.Type == "BinaryCmd":
                last = last.Cmd.Y
            external = last.Cmd is None or last.Cmd.Type in ("CallExpr", "DeclClause", "LetClause", "TimeClause")
            # Where training follows a program by `&&`, that program has done its part.
            with self._perhaps(why, counts=command.Op == "&&" and external):
                self._statement(command.Y)
        elif status == (command.Op == "&&"):
            return self._statement(command.Y)
        return status

    def _command(self, command: Node) -> bool | None:
        kind: str = command.Type
        if kind in self._kinds:
            return self._kinds[kind](command)
        if kind == "FuncDecl":
            self.state.functions[command.Name.Value] = Function(command.Body, self._source)
            return True
        if kind == "Block":
            return self.run(command.Stmts)
        if kind == "TimeClause":
            return self._statement(command.Stmt) if command.Stmt else True
        with self._apart():  # a sub-shell, or a coprocess
            return self.run(command.Stmts or [command.Stmt])

    def _test(self, command: Node) -> bool | None:
        return self._holds(list(self._tested(command.X)), patterns=True)

    def _calculation(self, command: Node) -> bool | None:
        number = self.expander().calculated(command.X, self._source.raw(command, 2, 2), self.place(command))
        return None if isinstance(number, Unknown) else number != "0"

    def _let(self, command: Node) -> bool | None:
        place = self.place(command)
        words = ["let", *map(self._source.raw, command.Exprs)]
        return builtins.apply(self.state, [Field(word, place, word) for word in words], place, self.unread)

    def _if(self, command: Node) -> bool | None:
        branch: Node | None = command
        while branch is not None:
            if not branch.Cond:
                return self.run(branch.Then)
            self._missing = None
            status = self.run(branch.Cond)
            if status:
                return self.run(branch.Then)
            if status is None:
                why = self._because("the condition", branch.Cond[0], self._missing)
                while branch is not None:
                    with self._perhaps(why):
                        self.run(branch.Then)
                    branch = branch.Else
                return None
            branch = branch.Else
        return True

    def _loop(self, command: Node) -> bool | None:
        why, names = self._because("the loop", command), list[str]()
        if command.Type == "WhileClause":
            if self.run(command.Cond) is bool(command.Until):
                return True
        elif command.Loop.Type == "WordIter":
            names = [command.Loop.Name.Value]
            if not command.Select and command.Loop.Items and not self.expander().fields(command.Loop.Items):
                return True
        else:
            names = re.findall(r"[A-Za-z_]\w*", self._source.raw(command.Loop))
        with self._perhaps(why):
            for name in names:
                self.state.forget(name, why, array=False)
            self.run(command.Do)
        return None

    def _case(self, command: Node) -> bool | None:
        subject = self.expander().whole(command.Word)
        why = self._because("the case", command, subject if isinstance(subject, Unknown) else None)
        for index, item in enumerate(command.Items):
            if not isinstance(subject, Unknown):
                known = [self.expander().whole(pattern, pattern=True) for pattern in item.Patterns]
                fits = [None if isinstance(one, Unknown) else matches(subject, one) for one in known]
                if any(fits):
                    return self.run(item.Stmts)
                if None not in fits:
                    continue
            for branch in command.Items[index:]:
                with self._perhaps(why):
                    self.run(branch.Stmts)
            return None
        return True

    def _tested(self, one: Node, *, pattern: bool = False) -> Iterable[Value]:
        """The words between `[[` and `]]`."""
        if one.Type == "Word":
            yield self.expander().whole(one, pattern=pattern)
        elif one.Type == "BinaryTest":
            yield from (*self._tested(one.X), one.Op, *self._tested(one.Y, pattern=True))
        elif one.Type == "ParenTest":
            yield from ("(", *self._tested(one.X), ")")
        else:
            yield from (one.Op, *self._tested(one.X))

    def _holds(self, words: list[Value], *, patterns: bool) -> bool | None:
        answer = holds(words, patterns=patterns)
        self._missing = next((word for word in words if isinstance(word, Unknown)), None) if answer is None else None
        return answer

    def _because(self, what: str, node: Node, missing: Unknown | None = None) -> Unknown:
        said = f"{what} at {self.place(node)} is not decided by the script's text"
        if missing is None:
            return Unknown(said, self.place(node))
        return Unknown(f"{said}: {missing.why}", self.place(node), missing.hint)

    @contextmanager
    def _apart(self) -> Generator[None]:
        """As in a shell of its own: what is assigned is gone behind it."""
        before = self.state
        self.budget.spend(1 + before.size // 10, Place(self._source.file, 0))
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
        self.budget.spend(1 + before.size // 10, Place(self._source.file, 0))
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

    def _assign(self, one: Node) -> None:
        place, expander, state, name = self.place(one), self.expander(), self.state, str(one.Name.Value)
        array = state.arrays.get(name)
        if one.Index or (one.Array and any(element.Index for element in one.Array.Elems)):
            state.forget(name, Unknown(f"{name} is set by its elements", place), array=True)
        elif one.Array:
            words = expander.fields(element.Value for element in one.Array.Elems)
            former = state.fields(name) if one.Append else None
            if isinstance(former, Unknown):
                state.forget(name, former, array=True)
            else:
                self.budget.spend(len(former or ()) // 10, place)
                state.set(name, [*(former or ()), *words], place)
        else:
            value = expander.whole(one.Value)
            before = (state.get(name) or "") if one.Append else ""
            if isinstance(before, Unknown):
                state.forget(name, before, array=array is not None)
            elif isinstance(value, Unknown):
                state.forget(name, value, array=array is not None)
            elif isinstance(array, list):  # of an array it is the first element
                state.set(name, [Field(before + value, place, self._source.raw(one.Value) if one.Value else ""), *array[1:]], place)
            else:
                state.set(name, before + value, place)

    def _declaration(self, command: Node) -> bool:
        assigned = [one for one in command.Args if not one.Naked]
        for one in assigned:
            self._assign(one)
        options = self.expander().fields(one.Value for one in command.Args if one.Naked and one.Value)
        if any(isinstance(one.value, str) and re.fullmatch(r"-\w*[nA]\w*", one.value) for one in options):
            for name in (one.Name.Value for one in assigned):
                self.state.forget(name, Unknown(f"{name} is a reference or a table", self.place(command)), array=True)
        return True

    def _simple(self, command: Node) -> bool | None:
        if not command.Args:
            for one in command.Assigns:
                self._assign(one)
            return True
        fields = self.expander().fields(command.Args)
        place = self.place(command)
        name = fields[0].value if fields else None
        if isinstance(name, str) and (function := self.state.functions.get(name)) is not None:
            return self._call(function, fields[1:], place)
        if isinstance(name, str) and name in ("[", "test"):
            inner = fields[1:-1] if name == "[" else fields[1:]
            return self._holds([one.value for one in inner], patterns=False)
        if isinstance(name, str) and name in ("exit", "return"):
            raise _Exit(place, whole=name == "exit")
        if isinstance(name, str) and name in ("source", "."):
            return self._sourced(fields[1:], place)
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
            with self._in_file(function.source):
                return self._statement(function.body)
        except _Exit as stop:
            if stop.whole:
                raise
            return None
        finally:
            self._calls -= 1
            self.state.arguments = before

    def _sourced(self, fields: list[Field], place: Place) -> bool | None:
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
