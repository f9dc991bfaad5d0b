"""Every row of the crash table and each guarantee names a test that is there and that CI runs: one that is not left to the soak."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
CRASHES, GUARANTEES = "| what dies |", "| | what holds |"


def rows(head: str) -> list[str]:
    """Rows of the table that begins with `head`, without it and the line below."""
    table = PAGE[PAGE.index(head) :].partition("\n\n")[0]
    return table.splitlines()[2:]


def marks(node: ast.AST) -> Iterator[str]:
    """Names of pytest's markers in an expression, those of single parameters aside."""
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pytest.mark":
        yield node.attr
    if not (isinstance(node, ast.Call) and ast.unparse(node.func) in ("pytest.param", "pytest.mark.parametrize")):
        for child in ast.iter_child_nodes(node):
            yield from marks(child)


def markers(path: Path, name: str) -> set[str]:
    """Markers of a test, its module's among them; fails where there is no such test."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert name in functions, f"{path.relative_to(ROOT)} has no {name}"
    of_module = [node.value for node in body if isinstance(node, ast.Assign) and "pytestmark" in map(ast.unparse, node.targets)]
    return {mark for node in (*of_module, *functions[name].decorator_list) for mark in marks(node)}


@pytest.mark.parametrize("row", [*rows(CRASHES), *rows(GUARANTEES)])
def test_a_row_names_a_test_that_ci_runs(row: str) -> None:
    shown_by = row.rstrip("| ").rpartition(" | ")[2]
    tests = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", shown_by)
    assert tests
    for path, name in tests:
        assert "soak" not in markers(ROOT / path, name)
    for path in re.findall(r"`(tests/[\w/.]+)`", shown_by):
        assert (ROOT / path).exists()


def test_both_tables_are_whole() -> None:
    assert [row.split()[1] for row in rows(GUARANTEES)] == [f"G{number}" for number in range(1, 9)]
    assert len(rows(CRASHES)) >= 38


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("pytest.mark.soak", {"soak"}),
        ("[pytest.mark.nats, pytest.mark.timeout(400)]", {"nats", "timeout"}),
        ("pytest.mark.parametrize('x', [1, pytest.param(2, marks=pytest.mark.soak)])", set()),
        ("pytest.param(2, marks=pytest.mark.soak)", set()),
    ],
)
def test_markers_are_read(text: str, found: set[str]) -> None:
    assert set(marks(ast.parse(text, mode="eval"))) == found
