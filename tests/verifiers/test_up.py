"""Whole runs of tasksets, as a user starts them."""

import json
from pathlib import Path

import pytest

from streamrl.runtime.rundir import RunDir
from tests.support.pythons import python

EXAMPLE = Path(__file__).parents[2] / "examples" / "verifiers_taskset" / "bandit.toml"

pytestmark = [pytest.mark.nats, pytest.mark.timeout(900)]


def streamrl(folder: Path, *arguments: str) -> str:
    """Output of a command; fails when it does."""
    return "".join(python(folder, "-m", "streamrl", *arguments, within_s=800))


def up(folder: Path, python: str, *settings: str, config: Path = EXAMPLE) -> dict[str, float]:
    """The summary of a run of the example, or of another one of its name."""
    fixed = (f"data.train={folder / 'tasks.jsonl'}", f"producer.python={python}", "run.until_reward=0")
    streamrl(folder, "up", str(config), *(word for text in (*fixed, *settings) for word in ("--set", text)))
    return json.loads((RunDir(folder / "runs" / "bandit").path / "summary.json").read_text())


def test_the_example_learns_and_is_replayed(tmp_path: Path, python: str) -> None:
    summary = up(tmp_path, python, "run.steps=24", "tasks.batch_tasks=8", "tasks.num_rollouts=8")
    assert summary["steps"] == 24
    # Means of the first and of the last 20 batches. A pull that finds a lever by chance pays 0.016 on average; the run that was measured
    # went from 0.12 to 0.19 with half of the learning rate.
    assert summary["reward_first"] > 0.05 and summary["reward_last"] > summary["reward_first"] + 0.05, summary
    rows = [json.loads(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]
    assert [row["metadata"]["verifiers"]["idx"] for row in rows] == list(range(16))
    assert "24 of 24 versions" in streamrl(tmp_path, "replay", "bandit", "--verify")


def test_a_game_of_textarena_is_played_and_trained_on(tmp_path: Path, python: str) -> None:
    text, _, rest = EXAMPLE.read_text().partition("[producer.options]")
    config = tmp_path / "guessing.toml"
    config.write_text(f"{text}[producer.options]\nselect = {{limit = 4}}\nplayer = {{max_turns = 2}}\n\n{rest[rest.index('[gateway]') :]}")
    summary = up(
        tmp_path,
        python,
        f"producer.function=verifiers:{Path(__file__).with_name('guessing.py')}",
        "data.max_prompt_tokens=1000",
        "model.max_len=2048",
        "run.steps=2",
        "tasks.batch_tasks=4",
        "tasks.num_rollouts=2",
        config=config,
    )
    assert summary["steps"] == 2 and summary["tokens_trained"] > 0, summary
    rows = [json.loads(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]
    assert [message["role"] for message in rows[0]["prompt"]] == ["system", "user"] and "Guess" in rows[0]["prompt"][1]["content"]
