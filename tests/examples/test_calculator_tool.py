"""The example as a user runs it: its own process tree, its own nats-server."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streamrl.runtime.rundir import RunDir
from tests.examples.runs import learned
from tests.support.memory import freed_after_test
from tests.support.programs import surroundings

EXAMPLE = Path(__file__).parents[2] / "examples" / "calculator_tool"
PRODUCER = f"{EXAMPLE / 'calculator.py'}:calculator"


class Commands:
    """Starts `streamrl` processes in a directory and leaves none behind."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "streamrl", *arguments]
        process = subprocess.Popen(
            command,
            cwd=self.directory,
            env=surroundings(),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._started.append(process)
        return process

    def up(self, *overrides: str) -> subprocess.Popen[str]:
        return self.start("up", str(EXAMPLE / "calculator.toml"), *[word for text in overrides for word in ("--set", text)])

    def summary(self) -> dict[str, float]:
        return json.loads((self.directory / "runs" / "calculator" / "summary.json").read_text())

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
            process.communicate()


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    commands = Commands(tmp_path)
    yield commands
    commands.close()


def wait_for(holds: Callable[[], bool], *, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


@pytest.mark.process
@pytest.mark.slow
async def test_the_example_runs_and_its_reward_rises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, first, last = await learned("calculator_tool", tmp_path, monkeypatch, "run.steps=40")
    assert steps == 40
    # From a table that knows nothing, 0.3 for asking the calculator is learned first.
    assert last > first + 0.1


@pytest.mark.nats
@pytest.mark.slow
def test_a_run_without_producers_lives_from_those_that_attach(commands: Commands, tmp_path: Path) -> None:
    run = commands.up("run.steps=12", "run.until_reward=0", "producer.workers=0")
    wait_for((tmp_path / "runs" / "calculator" / "bus.json").is_file)
    first = commands.start("attach", PRODUCER, "--run", "calculator")
    log = tmp_path / "runs" / "calculator" / "logs"
    wait_for(lambda: any("engine_found" in path.read_text() for path in log.glob("producer-*.log")))
    second = commands.start("attach", PRODUCER, "--run", "calculator")
    wait_for(lambda: sum("engine_found" in path.read_text() for path in log.glob("producer-*.log")) > 1)
    first.send_signal(signal.SIGINT)
    left, _ = first.communicate(timeout=30)
    assert first.returncode == 0, left
    assert re.search(r"after \d+ tasks", left)
    output, _ = run.communicate(timeout=120)
    assert run.returncode == 0, output
    assert commands.summary()["steps"] == 12
    # The other guest leaves by itself once the run has finished.
    stayed, _ = second.communicate(timeout=30)
    assert second.returncode == 0, stayed


@pytest.mark.nats
@pytest.mark.slow
def test_a_guest_leaves_a_run_whose_supervisor_was_killed(commands: Commands, tmp_path: Path) -> None:
    run = commands.up("run.steps=100000", "run.until_reward=0", "run.max_seconds=0")
    wait_for((tmp_path / "runs" / "calculator" / "bus.json").is_file)
    guest = commands.start("attach", PRODUCER, "--run", "calculator")
    log = tmp_path / "runs" / "calculator" / "logs" / "producer-1.log"
    wait_for(lambda: log.exists() and "engine_found" in log.read_text())
    found = RunDir(tmp_path / "runs" / "calculator")
    freed_after_test(found.load_config(), found)
    run.kill()
    left, _ = guest.communicate(timeout=40)
    assert guest.returncode == 0, left
    assert "calculator: it is down" in left


def test_the_readme_shows_the_code_that_runs() -> None:
    [block] = re.findall(r"```python\n(.*?)```", (EXAMPLE / "README.md").read_text(), flags=re.DOTALL)
    assert block in (EXAMPLE / "calculator.py").read_text()


@pytest.mark.process
def test_the_problems_are_what_the_script_writes(tmp_path: Path) -> None:
    script = tmp_path / "make_problems.py"
    script.write_text((EXAMPLE / "make_problems.py").read_text())
    subprocess.run([sys.executable, str(script)], check=True)
    assert (tmp_path / "problems.jsonl").read_bytes() == (EXAMPLE / "problems.jsonl").read_bytes()
