"""`python`: a completion's program, run against the tests of its row in the sandbox (docs/sandbox.md)."""

from __future__ import annotations

import asyncio
import json
import math
import re
import secrets
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from streamrl.config import reward_kinds
from streamrl.errors import LaunchError, RewardError, SchemaError
from streamrl.rewards.answers import answering, without_reasoning
from streamrl.rewards.protocol import RewardValue, ScoredEpisode
from streamrl.rewards.remote import each
from streamrl.sandbox import Limits, Sandbox
from streamrl.schemas.tasks import RolloutTask

_FENCE = re.compile(r"(?P<indent>[ \t]*(?:>[ \t]?|(?:[-*+]|\d{1,3}[.)])[ \t]+)*)(?P<marks>`{3,}|~{3,})[ \t]*(?P<info>[^`]*)")
_LANGUAGE = re.compile(r"[{.]{0,2}(?P<name>[a-zA-Z]*)")
_QUOTED = re.compile(r"^[ \t]*>[ \t]?")
_PYTHON = ("python", "py")
_LONGEST = 1 << 16
"""Characters of a program."""
_CALL = """\
import json, sys
def run(program, name, arguments, word, compile=compile, exec=exec, dumps=json.dumps, write=sys.stdout.write):
    names = {"__name__": "program"}
    exec("from typing import *\\nimport collections, math\\n", names)
    exec(compile(program, "program.py", "exec"), names)
    owner = names.get("Solution")
    found = names[name] if name in names else getattr(owner(), name)
    given = found(**arguments) if isinstance(arguments, dict) else found(*arguments)
    if hasattr(given, "__next__"):
        given = list(given)
    write(chr(10) + word + dumps(given, default=list))
run(*json.load(sys.stdin))
"""
"""Calls a function. What it should give is not there to be read."""
_ASSERTS = """\
import json, sys
def run(program, test, word, compile=compile, exec=exec, out=sys.stdout, write=sys.stdout.write):
    names = {"__name__": "__main__"}
    exec(compile(program, "program.py", "exec"), names)
    exec(compile(test, "test.py", "exec"), names)
    write(chr(10) + word)
run(*json.load(sys.stdin))
"""
"""What the program could replace is taken before it runs; neither the test nor the word is in a file."""


class Case(msgspec.Struct, frozen=True):
    """One test: code that raises where the program is wrong, a call and what it is to give, or what it reads and is to print."""

    code: str = ""
    function: str = ""
    """Name of a function, or of a method of a class `Solution`; empty: there is none to call."""
    arguments: list[Any] | dict[str, Any] = []
    """The arguments of the call, by place or by name."""
    gives: tuple[Any, ...] = ()
    """Values of which the call is to give one."""
    stdin: str = ""
    stdout: str = ""


class PythonTests:
    """Runs each test in a sandbox of its own. Parts: `passed`, `tests`, `timeout` (tests over their limit), `program` (there was one).

    Args:
        options: checked.

    Raises:
        LaunchError: the isolation that is asked for does not work here.
    """

    in_children: ClassVar[bool] = True

    def __init__(self, options: reward_kinds.Python) -> None:
        self._options = options
        self._sandbox = Sandbox(isolation=None if options.isolation == "any" else options.isolation)
        self._sandbox.check()  # what it lacks is in the log before the first program runs
        self._limits = Limits(seconds=options.timeout_s, cpu_seconds=options.timeout_s, memory_bytes=options.memory_bytes)

    async def score(self, task: RolloutTask, episodes: Sequence[ScoredEpisode]) -> Sequence[RewardValue | Exception]:
        """SchemaError where the row has no tests, RewardError where no program can be run."""
        cases = cases_of(task, self._options.tests_key)[: self._options.max_tests]
        return await each(episodes, lambda episode: self._one(task, cases, episode))

    async def _one(self, task: RolloutTask, cases: Sequence[Case], episode: ScoredEpisode) -> RewardValue:
        code = program_of(answering(episode) or "")
        passed = late = 0
        if code:
            try:
                ends = await asyncio.gather(*(self._passes(code, case) for case in cases))
            except LaunchError as error:
                raise RewardError(f"row {task.row}: no program can be run: {error.message}", hint=error.hint, row=task.row) from error
            passed, late = ends.count("passed"), ends.count("timeout")
        share = passed / len(cases)
        parts = {"passed": float(passed), "tests": float(len(cases)), "timeout": float(late), "program": float(bool(code))}
        return RewardValue(share if self._options.fraction else float(passed == len(cases)), parts)

    async def _passes(self, code: str, case: Case) -> str:
        """`passed`, or why not."""
        if case.function:
            word = secrets.token_hex(16)
            given = msgspec.json.encode([code, case.function, case.arguments, word])
            result = await self._sandbox.run_python(_CALL, stdin=given, limits=self._limits)
            return "passed" if result.reason == "ok" and _gave(result.stdout, word, case.gives) else result.reason
        if not case.code:
            result = await self._sandbox.run_python(code, stdin=case.stdin, limits=self._limits)
            return "passed" if result.reason == "ok" and _lines(result.stdout) == _lines(case.stdout) else result.reason
        # The program can end itself with exit code 0; the word is said only behind the test.
        word = secrets.token_hex(16)
        given = msgspec.json.encode([code, case.code, word])
        result = await self._sandbox.run_python(_ASSERTS, stdin=given, limits=self._limits)
        return "passed" if result.reason == "ok" and result.stdout.rstrip("\n").rpartition("\n")[2] == word else result.reason

    async def close(self) -> None:
        """End the sandbox's server."""
        self._sandbox.close()


def program_of(completion: str) -> str:
    """The last fenced block that says Python, else the last one, else the whole; empty: none, or too long.

    Fences are those of Markdown: of backticks or tildes, indented in a list or quoted. One that is not closed goes on to the end.
    """
    text = without_reasoning(completion) or ""
    blocks = _blocks(text[-2 * _LONGEST :])
    python = [code for language, code in blocks if language in _PYTHON]
    code = (python or [code for _, code in blocks] or ["" if "```" in text else text])[-1]
    return code if code.strip() and len(code) <= _LONGEST and "\0" not in code else ""


def _blocks(text: str) -> list[tuple[str, str]]:
    """(language, code) of each fenced block."""
    found: list[tuple[str, str]] = []
    lines: list[str] = []
    opened: re.Match[str] | None = None
    for line in text.splitlines(keepends=True):
        fence = _FENCE.fullmatch(line.rstrip("\r\n"))
        if opened is None:
            opened, lines = fence, []
        elif fence is None or not fence["marks"].startswith(opened["marks"]):
            lines.append(line)
        else:
            found.append((_language(opened), _outdented(lines, opened["indent"])))
            # One that names Python begins the next block where nothing has closed this one.
            opened, lines = fence if _language(fence) in _PYTHON else None, []
    if opened is not None:
        found.append((_language(opened), _outdented(lines, opened["indent"])))
    return found


def _language(fence: re.Match[str]) -> str:
    name = _LANGUAGE.match(fence["info"])
    return "" if name is None else name["name"].lower()


def _outdented(lines: Sequence[str], indent: str) -> str:
    """Lines without their fence's indentation, and without one that all of them have."""
    if ">" in indent:
        lines, indent = [_QUOTED.sub("", line, count=1) for line in lines], ""
    return textwrap.dedent("".join(_without(line, len(indent.expandtabs(4))) for line in lines))


def _without(line: str, width: int) -> str:
    begin = len(line) - len(line.lstrip(" \t"))
    spaces = line[:begin].expandtabs(4)
    return line if "\t" in line[:begin] and width == 0 else spaces[width:] + line[begin:]


def cases_of(task: RolloutTask, key: str) -> list[Case]:
    """The tests of a row: asserts (texts), cases `{stdin, stdout}` (also `{input, output}`), or one table of lists of them.

    Cases and tables that have a `fn_name` are calls of this function.

    Raises:
        SchemaError: none, or of another form.
    """
    given: Any = task.metadata.get(key) if task.metadata.get(key) is not None else task.label
    if isinstance(given, str) and given.lstrip()[:1] in ("[", "{"):
        try:
            given = msgspec.json.decode(given)
        except (msgspec.DecodeError, RecursionError) as error:
            raise _wrong(task, key, f"a text that is no JSON: {error}") from error
    if isinstance(given, Mapping):
        given = _columns(task, key, given)
    cases = [_case(task, key, one) for one in (given if isinstance(given, list | tuple) else [given])]
    if not cases:
        raise _wrong(task, key, "an empty list")
    return cases


def _columns(task: RolloutTask, key: str, table: Mapping[str, Any]) -> list[Any]:
    """`{inputs: [...], outputs: [...]}`, as APPS and TACO have it, with `fn_name` where a function is called."""
    for inputs, outputs in (("inputs", "outputs"), ("input", "output"), ("stdin", "stdout")):
        read, printed = table.get(inputs), table.get(outputs)
        if isinstance(read, list) and isinstance(printed, list) and len(read) == len(printed):
            named = {name: found for name in _FUNCTION if (found := table.get(name) or task.metadata.get(name))}
            # APPS has each value in a list of its own.
            wrapped = bool(named) and all(isinstance(one, list) and len(one) == 1 for one in printed)
            pairs = zip(read, printed, strict=True)
            return [{"stdin": one, "stdout": other, **named, **({_WRAPPED: True} if wrapped else {})} for one, other in pairs]
    return [table]


_FUNCTION = ("fn_name", "func_name", "function_name", "entry_point")
_KIND = ("type", "testtype")
_CALLS = ("function_call", "functional", "call", "call_based")
_READS = ("stdin_stdout", "stdin", "stdio", "io")
_WRAPPED = "wrapped"


def _case(task: RolloutTask, key: str, given: Any) -> Case:
    if isinstance(given, str) and given.strip():
        return Case(code=given)
    if isinstance(given, Mapping):
        kind = next((given[field] for field in _KIND if given.get(field)), None)
        # As LiveCodeBench has it, the name is the row's.
        names = (source[field] for source in (given, task.metadata) for field in _FUNCTION if source.get(field))
        name = None if kind in _READS else next(names, None)
        right = kind is None or kind in (_CALLS if name else _READS)
        for read, printed in (("stdin", "stdout"), ("input", "output")):
            if right and printed in given and set(given) <= {read, printed, *_FUNCTION, *_KIND, _WRAPPED}:
                if name is not None:
                    return _call(task, key, name, given.get(read), given[printed], wrapped=bool(given.get(_WRAPPED)))
                return Case(stdin=_text(given.get(read)), stdout=_text(given[printed]))
    raise _wrong(task, key, f"{given!r:.80}")


def _call(task: RolloutTask, key: str, name: Any, arguments: Any, gives: Any, *, wrapped: bool) -> Case:
    if not isinstance(name, str) or not name.rpartition(".")[2].isidentifier():
        raise _wrong(task, key, f"the function {name!r:.80}")
    if isinstance(arguments, str):  # a line of JSON for each, as LiveCodeBench has it
        arguments, gives = [_read(line) for line in arguments.splitlines() if line.strip()], _read(gives)
    if not isinstance(arguments, list | tuple | Mapping):
        arguments = [arguments]
    found = dict(arguments) if isinstance(arguments, Mapping) else list(arguments)
    return Case(function=name.rpartition(".")[2], arguments=found, gives=(gives, gives[0]) if wrapped else (gives,))


def _read(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text


def _gave(printed: str, word: str, values: Sequence[Any]) -> bool:
    """Tell whether the last line is the word and one of the values."""
    line = printed.rstrip("\n").rpartition("\n")[2]
    if not line.startswith(word):
        return False
    try:
        given = json.loads(line[len(word) :])
    except (ValueError, RecursionError):
        return False
    return any(_like(value, given) for value in values)


def _like(value: Any, given: Any) -> bool:
    """Tell whether two values of JSON are the same; numbers that are not whole, nearly."""
    if isinstance(value, list | tuple) and isinstance(given, list):
        return len(value) == len(given) and all(_like(one, other) for one, other in zip(value, given, strict=True))
    if isinstance(value, Mapping) and isinstance(given, dict):
        texts = {str(name): one for name, one in value.items()}
        return texts.keys() == given.keys() and all(_like(one, given[name]) for name, one in texts.items())
    if isinstance(value, float) or isinstance(given, float):
        return isinstance(value, int | float) and isinstance(given, int | float) and math.isclose(value, given, rel_tol=1e-6, abs_tol=1e-9)
    return value == given


def _text(given: Any) -> str:
    return "\n".join(map(str, given)) if isinstance(given, list | tuple) else "" if given is None else str(given)


def _lines(text: str) -> list[str]:
    """Without white space at the ends of lines, and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _wrong(task: RolloutTask, key: str, got: str) -> SchemaError:
    return SchemaError(
        f"row {task.row}: expected tests under {key!r} of its metadata or as its label: asserts, or tables of stdin and stdout; got {got}",
        hint="docs/rewards.md shows their forms",
        row=task.row,
    )
