from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streamrl.config.plugins import resolve
from streamrl.sandbox import run_python
from tests.examples.runs import EXAMPLES, learned, remade

NAME = "python_tool"


def of_example(name: str) -> Any:
    return resolve(f"{NAME}.py:{name}", what="an object", key="test", base=EXAMPLES / NAME)


@pytest.mark.process
async def test_it_learns_to_write_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, first, last = await learned(NAME, tmp_path, monkeypatch, "run.steps=24", "tasks.num_rollouts=4")
    assert steps == 24
    # Means of the first and the last twenty, which share sixteen.
    assert last > first + 0.03


@pytest.mark.process
@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("sum(n)", "6"),
        ("x = max(n)\nprint(x)\nx + 1", "3\n4"),
        ("x = 1", ""),
        ("total(n)", "NameError: name 'total' is not defined"),
        ("sum(n", "SyntaxError: '(' was never closed"),
        ("import sys; sys.exit(3)", ""),
        ("open('/etc/passwd')", "FileNotFoundError: [Errno 2] No such file or directory: '/etc/passwd'"),
        ("'x' * 300", "x" * 200),
        ("while True: print('x')", "it wrote more than 10000 bytes"),
    ],
)
@pytest.mark.needs("namespaces")
async def test_what_the_model_sees_of_a_program(code: str, shown: str) -> None:
    files = {"cell.py": f"n = [1, 2, 3]\n{code}"}
    result = await run_python(of_example("NOTEBOOK"), files=files, limits=of_example("LIMITS"))
    assert of_example("shown")(result) == shown


@pytest.mark.parametrize(("text", "answer"), [("3", True), (" -12 ", True), ("sum(n)", False), ("", False), ("3.0", False)])
def test_a_number_is_an_answer(text: str, answer: bool) -> None:
    assert of_example("is_answer")(text) is answer


@pytest.mark.parametrize(
    ("ran", "completion", "reward"), [(["ok"], "4", 1.0), (["error"], "4", 0.7), (["ok"], "5", 0.3), ([], "5", 0.0), ([], "4", 0.7)]
)
def test_the_reward(ran: list[str], completion: str, reward: float) -> None:
    task, episode = SimpleNamespace(metadata={"answer": "4"}), SimpleNamespace(metadata={"ran": ran}, completion=completion)
    assert sum(of_example("score")(task, episode).values()) == reward


@pytest.mark.process
def test_the_problems_are_what_the_script_writes(tmp_path: Path) -> None:
    assert remade(NAME, tmp_path) == {"problems.jsonl": (EXAMPLES / NAME / "problems.jsonl").read_bytes()}
