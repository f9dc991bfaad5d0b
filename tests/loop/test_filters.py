"""A real run with filters: what they refuse is on the log with its reason, and the run is trained again without their code."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.role_server import write_run

pytestmark = [pytest.mark.nats, pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]

FILTERS = """
[filters]
function = "mine.py:keep"
max_repetition = 0.45
repetition_ngram = 1
mean_reward = [0.0, 0.9]
"""
KEEP = """
def keep(task, episodes):
    if task.index % 5 == 4:
        return False, "every fifth"
    if task.index == 12:
        raise ValueError("the twelfth")
    return [episode.rollout != 1 or task.index % 3 != 2 for episode in episodes]
"""


def streamrl(place: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "streamrl", *arguments]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_filtered_run_is_trained_again_without_the_filter(tmp_path: Path) -> None:
    write_run(tmp_path, steps=12, rest=FILTERS)
    toml = tmp_path / "demo.toml"
    toml.write_text(toml.read_text().replace('kind = "reward.py:letters"', 'kind = "reward.py:letters"\noverlong_buffer = 2'))
    (tmp_path / "mine.py").write_text(KEEP)
    streamrl(tmp_path, "up", "demo.toml", "--plain")
    (tmp_path / "mine.py").unlink()
    streamrl(tmp_path, "replay", "runs/demo", "--verify")
    drops = json.loads(streamrl(tmp_path, "status", "runs/demo", "--json"))["drops"]
    # What the other filters refuse, chance decides.
    assert {"filter: every fifth", "filter", "failed"} <= drops.keys()
