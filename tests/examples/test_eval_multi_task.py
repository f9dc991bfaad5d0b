"""The example as a user runs it: three sets, each asked in its own way, and once more afterwards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.examples.runs import execute, run_example

NAME = "eval_multi_task"


@pytest.mark.nats
@pytest.mark.slow
def test_the_example_is_evaluated_on_three_sets(tmp_path: Path) -> None:
    summary = run_example(NAME, tmp_path, "run.steps=24", "evaluation.every=12", "trainer.checkpoint_every=12")
    sets = summary["evaluations"]
    assert list(sets) == ["digits", "letters", "vowels"]
    folder = tmp_path / "runs" / "eval-multi-task" / "evaluations"
    found = {path.name: sorted(one.name for one in path.glob("*.json")) for path in folder.iterdir()}
    assert found == {
        "0.0": ["digits.json", "letters.json", "vowels.json"],
        "0.12": ["digits.json", "letters.json"],
        "0.24": ["digits.json", "letters.json", "vowels.json"],
    }
    last = {name: json.loads((folder / "0.24" / f"{name}.json").read_text()) for name in ("digits", "letters", "vowels")}
    assert [(one["num"], one["n"], one["failed"], one["pinned"]) for one in last.values()] == [
        (4, 1, 0, True),
        (4, 8, 0, True),
        (4, 4, 0, True),
    ]
    assert last["letters"]["accuracy"] > 0.3, "one of a hundred tokens is right by chance"
    assert list(last["letters"]["pass"]) == ["1", "2", "4", "8"]

    # Afterwards, from the checkpoint: the same weights, sampling and seeds, and so the same answers.
    words = ["eval", "eval-multi-task", "--version", "24", "--json"]
    done = execute(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    again = {one["set"]: one for one in json.loads(done.stdout)}
    for name, one in last.items():
        assert (again[name]["accuracy"], again[name]["pass"], again[name]["version"]) == (one["accuracy"], one["pass"], "0.24")
    words[3] = "7"
    gone = execute(tmp_path, *words)
    assert gone.returncode == 1
    assert "got 7: there are 0.12, 0.24" in gone.stderr
