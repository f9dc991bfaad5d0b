"""A run that Ray can place: rows, a configuration with the table, and a way to start programs beside them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from streamrl.runtime.rundir import RunDir
from tests.ray.running import ROOT, Start

TOML = """
[run]
name = "digits"
steps = 15
[data]
train = "train.jsonl"
heldout = "heldout.jsonl"
chat_template = false
[tasks]
batch_tasks = 8
num_rollouts = 4
[sampling]
max_new_tokens = 3
[warmup]
max_steps = 200
until = 0.2
learning_rate = 0.1
[engine]
kind = "table"
[trainer]
backend = "table"
checkpoint_every = 5
[trainer.optimizer]
learning_rate = 0.05
[supervise]
backoff_s = 0.1
[ray.trainer]
cpus = 0.5
[ray.engine]
cpus = 0.5
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The last digit plus 3, which a table can hold."""
    (tmp_path / "run.toml").write_text(TOML)
    rows = [{"prompt": f"{a}{b}", "label": str((b + 3) % 10)} for a in range(10) for b in range(10)]
    for name, part in (("train", rows[10:]), ("heldout", rows[:10])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return tmp_path


@pytest.fixture
def run(place: Path) -> RunDir:
    return RunDir(place / "runs" / "digits")


@pytest.fixture
async def start(place: Path) -> AsyncIterator[Start]:
    """Starts a Python program in `place`; it is asked to end at the end, and killed where it does not."""
    started: list[asyncio.subprocess.Process] = []

    async def one(*words: str) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        # Packages may lie in folders that only PYTHONPATH names.
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"}
        process = await asyncio.create_subprocess_exec(
            sys.executable, *words, cwd=place, env=environment, stdin=pipe, stdout=pipe, stderr=pipe
        )
        started.append(process)
        return process

    yield one
    for process in reversed(started):
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.communicate(), 20)
        except TimeoutError:
            process.kill()
            await process.communicate()
