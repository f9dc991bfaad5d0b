"""What the README tells people to type does what it says: each of its blocks runs here, or in CI, or is the picture of a screen."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrl.config.load import load
from tests.support.blocks import Block, blocks

ROOT = Path(__file__).parents[2]
README = blocks(ROOT / "README.md")
CI, UP = "ci runs it", "while my-run is up"


pytestmark = pytest.mark.nats


class Terminal:
    """Runs commands in a folder that looks like a clone with its environment, and leaves none behind."""

    def __init__(self, place: Path) -> None:
        self.place = place
        (place / ".venv").symlink_to(sys.prefix)
        (place / "examples").symlink_to(ROOT / "examples")
        self._started: list[subprocess.Popen[str]] = []

    def start(self, script: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=self.place,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}"},
        )
        self._started.append(process)
        return process

    def run(self, script: str, timeout_s: float = 170.0) -> str:
        process = self.start(script)
        said, _ = process.communicate(timeout=timeout_s)
        assert process.returncode == 0, said
        return said

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()
            process.communicate()


def of(language: str, mark: str | None = "") -> list[Block]:
    return [block for block in README if block.language == language and mark in (None, block.mark)]


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    """With the files that the README has people write."""
    terminal = Terminal(tmp_path)
    [producer], [config] = of("python"), of("toml")
    (tmp_path / "agent.py").write_text(producer.text)
    (tmp_path / "my.toml").write_text(config.text)
    yield terminal
    terminal.close()


def test_every_block_is_looked_at_or_run_by_ci() -> None:
    kinds = sorted((block.language, block.mark) for block in README)
    assert kinds == [("bash", ""), ("bash", CI), ("bash", CI), ("bash", UP), ("python", ""), ("text", ""), ("text", ""), ("toml", "")]
    script = "".join(path.read_text() for path in (ROOT / ".ci").iterdir())
    commands = [command for block in of("bash", CI) for command in block.commands]
    assert commands == ["make up", "make test"]
    for command in commands:
        assert re.search(rf"^{command}\b", script, re.MULTILINE), f"{command} is not in .ci/"


def test_a_run_of_ones_own(terminal: Terminal) -> None:
    [block] = of("bash")
    said = terminal.run(block.text)
    runs = terminal.place / "runs"
    summary = json.loads((runs / "my-run" / "summary.json").read_text())
    assert summary["steps"] == load(terminal.place / "my.toml").run.steps == 60
    assert summary["reward_last"] > summary["reward_first"] + 0.15
    assert "60 of 60" in said, "the replay must have verified every version"
    assert json.loads((runs / "faster" / "branch.json").read_text())["parent"] == "my-run"
    same = re.search(r"same batches up to version 60, same parameters up to version (\d+)", said)
    assert same and int(same[1]) < 30, "the branch must show a difference; its first batches may have no reward at all"
    assert (terminal.place / "both.png").stat().st_size > 10_000


@pytest.mark.slow
def test_a_run_that_is_up_is_looked_at_joined_and_drained(terminal: Terminal) -> None:
    [block] = of("bash", UP)
    status, attach, down = block.commands
    keys = ("run.steps=100000", "tasks.max_staleness=2", "debug.token_delay_s=0.05")
    up = terminal.start(f"streamrl up my.toml --plain {' '.join(f'--set {key}' for key in keys)}")
    logs = terminal.place / "runs" / "my-run" / "logs"
    wait_for(logs / "trainer-0.log", "event=training version")
    assert "step" in terminal.run(status)
    guest = terminal.start(f"exec {attach}")
    wait_for(logs / "producer-1.log", "event=started")
    guest.send_signal(signal.SIGINT)
    said, _ = guest.communicate(timeout=60)
    assert guest.returncode == 0 and "producer-1 has left" in said, said
    assert "has stopped" in terminal.run(down)
    said, _ = up.communicate(timeout=60)
    assert up.returncode == 0, said


def wait_for(log: Path, text: str) -> None:
    deadline = time.monotonic() + 120
    while not (log.exists() and text in log.read_text()):
        assert time.monotonic() < deadline, f"waited in vain for {text!r} in {log.name}"
        time.sleep(0.1)
