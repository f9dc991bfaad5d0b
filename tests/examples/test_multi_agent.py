from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streamrl.config.plugins import resolve
from tests.examples.runs import EXAMPLES, execute, learned, remade, run_example

NAME = "multi_agent"


@pytest.mark.nats
@pytest.mark.soak
def test_three_roles_learn_together(tmp_path: Path) -> None:
    summary = run_example(NAME, tmp_path, "run.steps=25")
    assert summary["steps"] == 25
    assert summary["reward_last"] > summary["reward_first"] + 0.1 and summary["heldout_last"] >= summary["heldout_first"]
    [run] = tmp_path.glob("runs/*")
    for words, told in (
        (["replay", str(run), "--verify"], "have the digest of the ledger"),
        (["inspect", str(run), "300/3"], "agent rewriter/2"),
    ):
        done = execute(tmp_path, *words)
        assert done.returncode == 0 and told in done.stdout, done.stdout + done.stderr


@pytest.mark.process
@pytest.mark.slow
async def test_the_roles_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, first, last = await learned(NAME, tmp_path, monkeypatch, "run.steps=25")
    assert steps == 25
    assert last > first + 0.1


@pytest.mark.parametrize(("candidates", "selected", "reward"), [("888", "8", 1.0), ("388", "3", 0.1), ("333", "8", 0.9), ("333", "4", 0.0)])
def test_the_selector_has_a_reward_of_parts(candidates: str, selected: str, reward: float) -> None:
    graded: Any = resolve(f"{NAME}.py:graded", what="a function", key="test", base=EXAMPLES / NAME)
    assert sum(graded("8", list(candidates), selected).values()) == pytest.approx(reward)


@pytest.mark.process
def test_the_problems_are_what_the_script_writes(tmp_path: Path) -> None:
    assert remade(NAME, tmp_path) == {"problems.jsonl": (EXAMPLES / NAME / "problems.jsonl").read_bytes()}
