"""A run folder that was copied elsewhere goes on there, as docs/operations.md says, also where the names of folders are no ASCII."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from tests.support import recorded as runs
from tests.support.role_server import write_run

pytestmark = [pytest.mark.nats, pytest.mark.process, pytest.mark.slow]


def versions(run: Path) -> int:
    return max([int(path.name[6:14]) for path in (run / "checkpoints").glob("main-v*")], default=0)


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["drained", "killed"])
def test_a_run_that_was_copied_goes_on_elsewhere(tmp_path: Path, killed: bool) -> None:
    first, second = tmp_path / "hier", tmp_path / "ein anderer Ort, größer"
    first.mkdir()
    toml = write_run(first, steps=24, rest='[weights]\ntransport = "bus"\n[debug]\ntoken_delay_s = 0.02\n', checkpoint_every=4)
    toml.write_text(toml.read_text().replace("max_steps = 2", "max_steps = 0"))
    with runs.started(first, *runs.command("up", "demo.toml", "--plain")) as up:
        runs.until(lambda: versions(first / "runs" / "demo") >= 8 or up.poll() is not None, "a checkpoint")
        up.send_signal(signal.SIGKILL if killed else signal.SIGTERM)
        code = up.wait(runs.PATIENCE_S)
    assert code == (-signal.SIGKILL if killed else 0), (first / "words.txt").read_text()
    shutil.copytree(first, second)
    shutil.rmtree(first)
    with runs.started(second, *runs.command("up", "demo.toml", "--plain")) as up:
        code = up.wait(runs.PATIENCE_S)
    words = (second / "words.txt").read_text()
    assert code == 0 and "] resuming" in words and "demo finished: 24 steps" in words, words
    assert "epoch" not in words and "lost" not in words, words
    report = runs.say(second, "replay", "demo", "--verify")
    assert report["ok"] and report["versions"] == report["equal"] == 24
    assert runs.say(second, "status", "demo")["checkpoints"][0] == "0.24"
