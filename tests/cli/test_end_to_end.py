"""The command line from start to end: a tabular policy learns, the run is looked at, joined, stopped, resumed and replayed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from streamrl.runtime.lock import holder
from streamrl.runtime.rundir import RunDir
from streamrl.weights.factory import weights_directory
from tests.launch.digits import TABLE, write_digits
from tests.launch.processes import until

pytestmark = pytest.mark.nats

ROOT = Path(__file__).parents[2]
PRODUCER = """
async def mine(task, engine):
    chat = engine.chat(task)
    await chat.generate()
    return chat.episode()
"""
Streamrl = Callable[..., Awaitable[asyncio.subprocess.Process]]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_digits(tmp_path, TABLE)
    return tmp_path


@pytest.fixture
async def streamrl(place: Path) -> AsyncIterator[Streamrl]:
    """Starts one command in `place`."""
    started: list[asyncio.subprocess.Process] = []

    async def start(*arguments: str) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "streamrl",
            *arguments,
            cwd=place,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def said(process: asyncio.subprocess.Process) -> tuple[int, str, str]:
    out, err = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def answer(streamrl: Streamrl, *arguments: str) -> Any:
    """What a command that must succeed prints as JSON."""
    code, out, err = await said(await streamrl(*arguments))
    assert code == 0, err
    return json.loads(out)


async def test_a_run_learns_and_its_log_gives_its_ledger_again(streamrl: Streamrl, place: Path) -> None:
    summary = await answer(streamrl, "up", "run.toml", "--json")
    assert summary["steps"] == 15
    assert summary["heldout_last"] == 1.0
    assert summary["staleness_max"] <= 1
    assert summary["swaps"] > 0
    run = RunDir(place / "runs" / "digits")
    assert not weights_directory(run.load_config().weights, run.name, run.path).exists()
    report = await answer(streamrl, "replay", "digits", "--verify", "--json")
    assert report["ok"] is True
    assert report["equal"] == report["versions"] >= 15
    (listed,) = await answer(streamrl, "status", "--json")
    assert (listed["state"], listed["summary"]) == ("stopped", summary)


async def test_a_run_is_joined_looked_at_stopped_and_resumed(streamrl: Streamrl, place: Path) -> None:
    run = RunDir(place / "runs" / "digits")
    endless = ("run.toml", "--plain", "--set", "run.max_seconds=600", "--set", "tasks.drop_zero_spread=false", "--set", "run.steps=100000")
    first = await streamrl("up", *endless)
    await until(lambda: run.log_path("trainer-0").exists() and "training from" in run.log_path("trainer-0").read_text(), within_s=60)

    (place / "mine.py").write_text(PRODUCER)
    producer = await streamrl("attach", "mine.py:mine", "--run", "digits", "--concurrency", "4")
    await until(lambda: run.log_path("producer-1").exists() and "event=started" in run.log_path("producer-1").read_text(), within_s=60)
    status = await answer(streamrl, "status", "digits", "--json")
    assert status["line"]["supervisor"] == first.pid
    workers = {worker["worker"] for worker in status["numbers"]["workers"]}
    assert workers == {"trainer-0", "engine-0", "feeder-0", "producer-0", "producer-1", "evaluator-0"}
    producer.send_signal(signal.SIGINT)
    code, out, _ = await said(producer)
    assert code == 0
    assert "producer-1 has left run digits after" in out

    code, out, _ = await said(await streamrl("down", "digits"))
    assert (code, out) == (0, "run digits has stopped\n")
    code, out, err = await said(first)
    assert (code, err) == (0, "")
    assert "digits stopped: " in out
    assert holder(run) is None
    stopped_at = json.loads(run.summary_path.read_text())["steps"]

    second = await streamrl("up", *endless)
    await until(lambda: "checkpoint" in run.log_path("trainer-0").read_text().partition("event=ended")[2], within_s=60)
    assert (await said(await streamrl("down", "digits")))[0] == 0
    code, out, _ = await said(second)
    assert code == 0
    assert "] resuming" in out
    assert json.loads(run.summary_path.read_text())["steps"] >= stopped_at
