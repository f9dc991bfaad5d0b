"""`python`: a completion's program, run against the tests of its row in the sandbox (docs/sandbox.md)."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from streamrl.config import reward_kinds
from streamrl.errors import LaunchError, RewardError, SchemaError
from streamrl.rewards.answers import without_reasoning
from streamrl.rewards.protocol import RewardValue, ScoredEpisode
from streamrl.rewards.remote import each
from streamrl.sandbox import Limits, Sandbox
from streamrl.schemas.tasks import RolloutTask

_FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n`]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_LONGEST = 1 << 16
"""Characters of a program."""
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
    """One test: code that raises where the program is wrong, or what it reads and is to print."""

    code: str = ""
    stdin: str = ""
    stdout: str = ""


class PythonTests:
    """Runs each test in a sandbox of its own. Parts: `passed`, `tests`, `timeout` (tests that were cut), `program` (there was one).

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
        code = program_of(episode.completion)
        passed = cut = 0
        if code:
            try:
                ends = await asyncio.gather(*(self._passes(code, case) for case in cases))
            except LaunchError as error:
                raise RewardError(f"row {task.row}: no program can be run: {error.message}", hint=error.hint, row=task.row) from error
            passed, cut = ends.count("passed"), ends.count("timeout")
        share = passed / len(cases)
        parts = {"passed": float(passed), "tests": float(len(cases)), "timeout": float(cut), "program": float(bool(code))}
        return RewardValue(share if self._options.fraction else float(passed == len(cases)), parts)

    async def _passes(self, code: str, case: Case) -> str:
        """`passed`, or why not."""
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
    """The last fenced block that says Python, else the last one, else the whole; empty: none, or too long."""
    text = without_reasoning(completion) or ""
    blocks = _FENCE.findall(text[-2 * _LONGEST :])
    python = [code for language, code in blocks if language.lower() in ("python", "python3", "py")]
    code = (python or [code for _, code in blocks] or ["" if "```" in text else text])[-1]
    return code if code.strip() and len(code) <= _LONGEST and "\0" not in code else ""


def cases_of(task: RolloutTask, key: str) -> list[Case]:
    """The tests of a row: asserts (texts), cases `{stdin, stdout}` (also `{input, output}`), or one table of lists of them.

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
    """`{inputs: [...], outputs: [...]}`, as APPS and TACO have it."""
    for inputs, outputs in (("inputs", "outputs"), ("input", "output"), ("stdin", "stdout")):
        read, printed = table.get(inputs), table.get(outputs)
        if isinstance(read, list) and isinstance(printed, list) and len(read) == len(printed):
            return [{"stdin": one, "stdout": other} for one, other in zip(read, printed, strict=True)]
    return [table]


def _case(task: RolloutTask, key: str, given: Any) -> Case:
    if isinstance(given, str) and given.strip():
        return Case(code=given)
    if isinstance(given, Mapping):
        for read, printed in (("stdin", "stdout"), ("input", "output")):
            if printed in given and set(given) <= {read, printed}:
                return Case(stdin=_text(given.get(read)), stdout=_text(given[printed]))
    raise _wrong(task, key, f"{given!r:.80}")


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
