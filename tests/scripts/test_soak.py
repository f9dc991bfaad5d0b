"""A soak runs every command of its steps and leaves one row a step on the page."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scripts import soak
from scripts.soak import BEGIN, END, HEAD, Outcome, updated

PAGE = f"# Page\n\n{BEGIN}\n\n{END}\n\nafter\n"


def test_a_row_takes_the_place_of_the_one_of_its_step() -> None:
    tests, chaos = "| tests | 3 passed, 0 failed |", "| chaos | right |"
    once = updated(PAGE, {"tests": tests, "chaos": chaos})
    assert once.splitlines() == ["# Page", "", BEGIN, "", *HEAD, chaos, tests, "", END, "", "after"] and once.endswith("after\n")
    assert updated(once, {"tests": "| tests | 2 passed, 1 failed |"}) == once.replace("3 passed, 0", "2 passed, 1")
    with pytest.raises(ValueError, match="soak: begin"):
        updated("# Page\n", {})


@pytest.mark.process
def test_a_row_says_that_a_step_has_failed() -> None:
    assert soak.row("chaos", Outcome(True, "a | b", 90.4)).startswith("| chaos | FAILED: a \\| b | 90 | ")


@pytest.mark.process
def test_commands_go_on_after_one_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, code in (
        ("first", "import sys; print('no'); sys.exit(3)"),
        ("then", "import sys; print(sorted(sys.argv[1:]), end='\\n\\n')"),
    ):
        (tmp_path / f"{name}.py").write_text(code)
    for name in ("a", "b"):
        (tmp_path / f"{name}.log").touch()
    (tmp_path / "page.md").write_text(PAGE)
    monkeypatch.setattr(soak, "STEPS", {"tests": (("first",), ("then", "*.log"))})
    monkeypatch.setattr(soak, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(soak, "row", lambda step, outcome: f"| {step} | {outcome.failed} {outcome.said} |")
    monkeypatch.setattr(soak, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["soak"])
    assert soak.main() == 1
    assert "| tests | True ['a.log', 'b.log'] |" in (tmp_path / "page.md").read_text()
