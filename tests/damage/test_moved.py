"""A run folder that was copied elsewhere goes on there, as docs/operations.md says, also where the names of folders are no ASCII."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

from tests.support import recorded as runs

pytestmark = [pytest.mark.nats, pytest.mark.process, pytest.mark.slow]

TOML = """
[run]
name = "demo"
steps = 24
[data]
train = "train.jsonl"
[tasks]
batch_tasks = 2
num_rollouts = 2
[sampling]
max_new_tokens = 4
[reward]
kind = "reward.py:score"
[engine]
kind = "table"
[trainer]
backend = "table"
checkpoint_every = 4
[weights]
transport = "bus"
[debug]
token_delay_s = 0.02
"""
REWARD = "def score(task, episode):\n    return float(sum(map(ord, episode.completion)) % 5)\n"


def versions(run: Path) -> int:
    return max([int(path.name[6:14]) for path in (run / "checkpoints").glob("main-v*")], default=0)


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["drained", "killed"])
def test_a_run_that_was_copied_goes_on_elsewhere(tmp_path: Path, killed: bool) -> None:
    first, second = tmp_path / "hier", tmp_path / "ein anderer Ort, größer"
    first.mkdir()
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(5) for b in range(5)]
    (first / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (first / "run.toml").write_text(TOML)
    (first / "reward.py").write_text(REWARD)
    with runs.started(first, *runs.command("up", "run.toml", "--plain")) as up:
        runs.until(lambda: versions(first / "runs" / "demo") >= 8 or up.poll() is not None, "a checkpoint")
        up.send_signal(signal.SIGKILL if killed else signal.SIGTERM)
        code = up.wait(runs.PATIENCE_S)
    assert code == (-signal.SIGKILL if killed else 0), (first / "words.txt").read_text()
    shutil.copytree(first, second)
    shutil.rmtree(first)
    with runs.started(second, *runs.command("up", "run.toml", "--plain")) as up:
        code = up.wait(runs.PATIENCE_S)
    words = (second / "words.txt").read_text()
    assert code == 0 and "] resuming" in words and "demo finished: 24 steps" in words, words
    assert "epoch" not in words and "lost" not in words, words
    report = runs.say(second, "replay", "demo", "--verify")
    assert report["ok"] and report["versions"] == report["equal"] == 24
    assert runs.say(second, "status", "demo")["checkpoints"][0] == "0.24"
