"""Counts of what tests cost, and the runner of soak."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from scripts import costs, soak
from scripts.costs import COUNTING, SHARED, VARIABLE, Costs, folder, lowered
from scripts.soak import BEGIN, END, HEAD, Outcome, updated

STARTS = """
import subprocess, sys
from pathlib import Path
server = Path("nats-server")
server.write_text("#!/bin/sh\\n")
server.chmod(0o755)
subprocess.run([server.resolve()], check=True)
subprocess.run([sys.executable, "-c", "import torch", "-m", "streamrl", "up"], check=True)
"""


@pytest.mark.process
def test_every_process_writes_down_what_it_starts(tmp_path: Path) -> None:
    (tmp_path / "torch.py").touch()
    surroundings = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(COUNTING), str(tmp_path))),
        "PYTEST_CURRENT_TEST": "tests/loop/test_a.py::test_b[x y] (call)",
        VARIABLE: str(tmp_path / "starts"),
    }
    subprocess.run([sys.executable, "-c", STARTS], env=surroundings, cwd=tmp_path, check=True)
    found = Costs()
    found.read_starts((tmp_path / "starts").read_text().splitlines())
    assert found.starts == {"loop": Counter({"nats-server": 1, "python": 1, "torch import": 1})}


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("tests/kill/test_a.py::test_b", "kill"),
        ("tests/trainers/megatron/test_a.py::test_b[a/b]", "trainers"),
        ("tests/test_errors.py::test_a[x/y]", SHARED),
        ("-", SHARED),
    ],
)
def test_the_folder_of_a_test(test: str, expected: str) -> None:
    assert folder(test) == expected


def test_a_folder_over_its_limit_is_named_and_one_without_limits_may_start_nothing() -> None:
    found = Costs(
        starts={"kill": Counter({"up": 3, "python": 9}), "loop": Counter({"nats-server": 1}), SHARED: Counter({"nats-server": 3})}
    )
    assert found.over({"kill": {"up": 3}, "loop": {"nats-server": 1}}) == found.over({}) == []
    assert [re.findall(r"tests/\w+|\d|`\S+`", line) for line in found.over({"kill": {"up": 2}})] == [
        ["tests/kill", "2", "`up`", "3"],
        ["tests/loop", "0", "`nats-server`", "1"],
    ]


def test_limits_fall_and_a_row_takes_the_place_of_its_step() -> None:
    limits, starts = {"kill": {"up": 3, "torch import": 2}}, {"kill": {"up": 5, "torch import": 1}, "loop": {"up": 1}}
    assert lowered(limits, starts, fresh=False) == {"kill": {"up": 3, "torch import": 1}}
    assert lowered({}, starts, fresh=True) == starts
    tests, chaos = "| tests | 3 passed, 0 failed |", "| chaos | right |"
    once = updated(PAGE, {"tests": tests, "chaos": chaos})
    assert once.splitlines() == ["# Page", "", BEGIN, "", *HEAD, chaos, tests, "", END, "", "after"] and once.endswith("after\n")
    assert updated(once, {"tests": "| tests | 2 passed, 1 failed |"}) == once.replace("3 passed, 0", "2 passed, 1")
    with pytest.raises(ValueError, match="soak: begin"):
        updated("# Page\n", {})


def test_the_last_figures_are_kept_by_tier_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "LAST", tmp_path / "cache" / "costs.json")
    monkeypatch.setattr(costs, "LIMITS", tmp_path / "costs.toml")
    monkeypatch.setattr(sys, "argv", ["costs", "--write"])
    costs.keep("test", Costs(starts={"loop": Counter({"up": 2})}))
    costs.keep("ci", Costs(starts={"loop": Counter({"up": 4})}))
    assert costs.main() == 0
    assert (costs.read_limits("test"), costs.read_limits("ci")) == ({"loop": {"up": 2}}, {"loop": {"up": 4}})
    monkeypatch.setattr(sys, "argv", ["costs"])
    assert costs.main() == 0
    costs.keep("test", Costs(starts={"loop": Counter({"up": 3})}))
    assert costs.main() == 1


def test_the_table_has_a_row_for_each_folder_and_what_no_test_waited_for() -> None:
    found = Costs(starts={"loop": Counter({"up": 2})})
    found.spend("tests/loop/test_a.py::test_b", 1.5)
    found.spend("tests/core/test_a.py::test_b", 2.5)
    rows = [line.split() for line in found.table(10.0).splitlines()[1:]]
    assert rows == [["core", "2.5"], ["loop", "1.5", "2"], ["others", "6.0"], ["all", "10.0", "2"]]


PAGE = f"# Page\n\n{BEGIN}\n\n{END}\n\nafter\n"


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
