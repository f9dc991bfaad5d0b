from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streamrl.config.plugins import resolve
from tests.examples.runs import EXAMPLES, remade, run_example

NAME = "multi_agent"


@pytest.mark.nats
def test_three_roles_learn_together(tmp_path: Path) -> None:
    summary = run_example(NAME, tmp_path, "run.steps=25")
    assert summary["steps"] == 25
    assert summary["reward_last"] > summary["reward_first"] + 0.1 and summary["heldout_last"] > summary["heldout_first"]


@pytest.mark.parametrize(
    ("solutions", "candidates", "selected", "reward"),
    [("888", "888", "8", 1.0), ("384", "388", "8", 0.1 + 0.4 / 3 + 0.1 + 0.4), ("333", "333", "3", 0.1), ("333", "333", "8", 0.4)],
)
def test_every_role_has_its_part_in_the_reward(solutions: str, candidates: str, selected: str, reward: float) -> None:
    graded: Any = resolve(f"{NAME}.py:graded", what="a function", key="test", base=EXAMPLES / NAME)
    assert sum(graded("8", list(solutions), list(candidates), selected).values()) == pytest.approx(reward)


@pytest.mark.process
def test_the_problems_are_what_the_script_writes(tmp_path: Path) -> None:
    assert remade(NAME, tmp_path) == {"problems.jsonl": (EXAMPLES / NAME / "problems.jsonl").read_bytes()}
