"""The run, and the agent as a process of its own that knows a URL and a key."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from streamrl.producers.gateway.worker import addresses
from streamrl.runtime.rundir import RunDir
from tests.examples.runs import EXAMPLES, remade

EXAMPLE = EXAMPLES / "openai_agent"


@pytest.mark.nats
@pytest.mark.slow
def test_an_agent_that_knows_openais_sdk_alone_trains_the_policy(tmp_path: Path) -> None:
    settings = ["run.steps=32", "run.until_reward=0", "tasks.batch_tasks=4", "tasks.max_staleness=0", "gateway.port=0"]
    command = [sys.executable, "-m", "streamrl", "up", str(EXAMPLE / "openai_agent.toml"), "--plain"]
    command += [word for setting in settings for word in ("--set", setting)]
    with (tmp_path / "out").open("w") as out, subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=out) as up:
        try:
            run = RunDir(tmp_path / "runs" / "openai-agent")
            while not (found := addresses(run)):
                assert up.poll() is None, (tmp_path / "out").read_text()
                time.sleep(0.1)
            [url] = found.values()
            alone = [sys.executable, "-I", str(EXAMPLE / "agent.py"), url, str(run.gateway_key_path)]
            agent = subprocess.run(alone, cwd=tmp_path, capture_output=True, text=True, timeout=170, check=False)
            assert agent.returncode == 0, agent.stderr
            assert up.wait(60) == 0, (tmp_path / "out").read_text()
        finally:
            up.kill()
    summary = json.loads((run.path / "summary.json").read_text())
    assert summary["steps"] == 32
    assert int(agent.stdout.split()[0]) >= 32 * 4 * 4
    assert summary["reward_last"] > summary["reward_first"] + 0.1


def test_the_agent_imports_nothing_of_this_package() -> None:
    assert "streamrl" not in "".join(line for line in (EXAMPLE / "agent.py").read_text().splitlines() if "import" in line)


@pytest.mark.process
def test_the_problems_are_what_the_script_writes(tmp_path: Path) -> None:
    assert remade(EXAMPLE.name, tmp_path) == {"problems.jsonl": (EXAMPLE / "problems.jsonl").read_bytes()}
