"""`python`: programs of a model and their tests, in the real sandbox."""

from __future__ import annotations

import json
from typing import Any

import pytest

from streamrl.errors import SchemaError
from streamrl.rewards.factory import built_in
from streamrl.rewards.layers import close
from streamrl.rewards.python_tests import cases_of, program_of
from tests.rewards.episodes import Episode, task

pytestmark = pytest.mark.process

ADD = "def add(a, b):\n    return a + b\n"
ASSERTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add(2, 2) == 5"]
ECHO = "print(int(input()) + int(input()))"


def fenced(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```\nDone."


async def scored(completions: list[str], tests: Any, **options: Any) -> list[Any]:
    reward = built_in("python", {"timeout_s": 5.0, **options})
    try:
        return list(await reward.score(task(None, metadata={"tests": tests}), [Episode(text, k) for k, text in enumerate(completions)]))
    finally:
        await close(reward)


async def test_asserts() -> None:
    wrong = fenced("def add(a, b):\n    return 0")
    whole, none, broken, empty = await scored([fenced(ADD), "```\n```", fenced("def add("), wrong], ASSERTS[:2])
    assert (whole.value, none.value, broken.value, empty.value) == (1, 0, 0, 0)
    assert whole.parts == {"passed": 2, "tests": 2, "timeout": 0, "program": 1} and none.parts["program"] == 0
    [partly] = await scored([fenced(ADD)], ASSERTS, fraction=True)
    assert partly.value == pytest.approx(2 / 3)
    assert (await scored([fenced(ADD)], ASSERTS))[0].value == 0
    assert (await scored([fenced(ADD)], ASSERTS, max_tests=2))[0].value == 1


@pytest.mark.parametrize(
    "tests",
    [
        [{"stdin": "1\n2\n", "stdout": "3"}, {"stdin": "4\n5", "stdout": "9\n"}],
        [{"input": ["1", "2"], "output": 3}],
        {"inputs": ["1\n2\n", "4\n5\n"], "outputs": ["3\n", "9\n"]},
        json.dumps({"inputs": ["1\n2\n"], "outputs": ["3\n"]}),
    ],
)
async def test_what_is_read_and_printed(tests: Any) -> None:
    right, wrong = await scored([fenced(ECHO), fenced("print(3)\nprint(3)")], tests)
    assert (right.value, wrong.value) == (1, 0)


CALLS = {
    "apps": {"fn_name": "add", "inputs": [[1, 2], [-1, 1]], "outputs": [3, 0]},
    "apps, wrapped": {"fn_name": "add", "inputs": [[1, 2], [-1, 1]], "outputs": [[3], [0]]},
    "as a text": json.dumps({"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}),
    "open-r1": [{"type": "function_call", "fn_name": "add", "input": [1, 2], "output": 3}],
    "livecodebench": [{"input": "1\n2", "output": "3", "testtype": "functional", "func_name": "add"}],
    "by name": [{"fn_name": "Solution.add", "input": {"a": 0.1, "b": 0.2}, "output": 0.3}],
}


@pytest.mark.parametrize("form", CALLS)
async def test_a_function_is_called(form: str) -> None:
    method = "class Solution:\n    def add(self, a: int, b: int) -> Optional[int]:\n        print('adding')\n        return a + b"
    completions = [ADD, method, "def add(a, b): return 4", "def sub(a, b): return 3", "def add(a, b): print(3)", "import sys\nsys.exit()"]
    values = await scored([fenced(code) for code in completions], CALLS[form])
    assert [value.value for value in values] == [1, 1, 0, 0, 0, 0]


def test_a_name_may_be_that_of_the_row_and_null_is_none() -> None:
    pairs = {"inputs": ["1"], "outputs": ["1"]}
    [call] = cases_of(task(metadata={"tests": pairs, "fn_name": "f"}), "tests")
    [read] = cases_of(task(metadata={"tests": {**pairs, "fn_name": None}}), "tests")
    [told] = cases_of(task(metadata={"tests": [{"type": "stdin_stdout", "input": "1", "output": "1"}], "fn_name": "f"}), "tests")
    assert (call.function, call.arguments, call.gives, read.function, told.function) == ("f", [1], (1,), "", "")


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "raise SystemExit",
        "import builtins\nbuiltins.exec = lambda *a: None\nbuiltins.compile = lambda *a: ''\nadd = None",
        "import sys\nsys.stdout.write = print",
        "print('0' * 32)",
        "import atexit\natexit.register(lambda: print('a' * 32))\nadd = None",
        "import sys, gc\nsys.modules['json'] = None\nimport os\nos.kill(os.getppid(), 9)",
        "open('/proc/self/fd/1', 'w').write('passed')",
    ],
)
async def test_a_program_that_ends_itself_has_not_passed(code: str) -> None:
    [value] = await scored([fenced(code)], ASSERTS[:1])
    assert value.value == 0


async def test_programs_that_hang_or_take_all_memory_are_cut() -> None:
    hang, eat, flood = fenced("while True: pass"), fenced("x = bytearray(1 << 40)"), fenced("while True: print('x' * 10**6)")
    values = await scored([hang, eat, flood], [{"stdin": "", "stdout": "3"}], timeout_s=1.0)
    assert [value.value for value in values] == [0, 0, 0]
    assert values[0].parts["timeout"] == 1


@pytest.mark.parametrize(
    "tests",
    [
        None,
        [],
        "",
        "  ",
        [1],
        [{"stdin": "1"}],
        {"inputs": ["1"], "outputs": []},
        "[1, ",
        {"a": 1},
        {"fn_name": 1, "inputs": [[1]], "outputs": [1]},
        [{"type": "picture", "input": "1", "output": "1"}],
    ],
)
def test_a_row_without_usable_tests_is_named(tests: Any) -> None:
    with pytest.raises(SchemaError, match="row 7"):
        cases_of(task(None, metadata={"tests": tests}), "tests")


def test_the_tests_may_be_the_label() -> None:
    [case] = cases_of(task("assert add(1, 2) == 3"), "tests")
    assert case.code == "assert add(1, 2) == 3"


def test_the_program_of_a_completion() -> None:
    for completion, program in (
        ("```python\na\n```\n```python\nb\n```", "b\n"),
        ("```python\na\n```\n```\nb\n```", "a\n"),
        ("```\na\n```", "a\n"),
        ("```py\na\n```", "a\n"),
        ("a = 1", "a = 1"),
        ("<think>```python\na\n```</think>b = 1", "b = 1"),
        ("<think>a", ""),
        ("```python\na", "a"),
        ("1. Do:\n   ```python\n   if a:\n       b\n   ```", "if a:\n    b\n"),
        ("- a\n\t```py\n\tb\n\t```", "b\n"),
        ("- ```python\n  a\n  ```", "a\n"),
        ("> ```python\n> a:\n>   b\n> ```", "a:\n  b\n"),
        ("```python\n    a\n    b\n```", "a\nb\n"),
        ("~~~python\na\n```\nb\n~~~", "a\n```\nb\n"),
        ("````python\na\n```\nb\n````", "a\n```\nb\n"),
        ("```Python3 title=x\na\n```", "a\n"),
        ("```{python}\na\n```", "a\n"),
        ("```python\na\n```python\nb\n```", "b\n"),
        ("```python\na\n``` It prints a.", "a\n"),
        ("```python\na\n```\n```output\n3\n```", "a\n"),
        ("```python\na\n```\n```pycon\n>>> 1\n```", "a\n"),
        ("```python\na\n```\nand so\n```python\nb", "b"),
        ("", ""),
        ("```python\n" + "a" * 70_000 + "\n```", ""),
        ("```" * 100_000, ""),
    ):
        assert program_of(completion) == program
