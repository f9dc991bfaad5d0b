"""Real runs that cannot get on, at the defaults of the configuration: each says what it waits for, or why it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
from functools import partial
from pathlib import Path

import pytest

from streamrl.errors import StreamFull
from streamrl.runtime.rundir import RunDir
from streamrl.runtime.worker import connected
from streamrl.schemas.codec import encode
from streamrl.schemas.control import Position
from streamrl.schemas.subjects import PREFIX_POSITIONS, SAMPLES, Subjects
from streamrl.schemas.versions import Version
from tests.support.digits import TABLE, write_digits
from tests.support.processes import until, worker_pid
from tests.support.programs import STREAMRL, Start, answer, said

pytestmark = pytest.mark.nats

CODE = """
import asyncio


async def fails(task, engine):
    raise ValueError(f"no tool for {task.prompt}")


async def hangs(task, engine):
    await asyncio.sleep(20)
    chat = engine.chat(task)
    await chat.generate()
    await asyncio.sleep(600)
"""
COLD = ("--set", "warmup.max_steps=0", "--set", "data.heldout=")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_digits(tmp_path, TABLE)
    (tmp_path / "mine.py").write_text(CODE)
    return tmp_path


@pytest.fixture
def run(place: Path) -> RunDir:
    return RunDir(place / "runs" / "digits")


@pytest.fixture
def streamrl(start: Start) -> Start:
    return partial(start, *STREAMRL)


def sets(*keys: str) -> list[str]:
    return [word for key in keys for word in ("--set", key)]


async def line_with(process: asyncio.subprocess.Process, text: str, within_s: float = 120.0) -> str:
    """The first line of its output with this text; fails when it ends without one."""
    assert process.stdout is not None
    async with asyncio.timeout(within_s):
        async for line in process.stdout:
            if text in line.decode():
                return line.decode()
    raise AssertionError(f"it never said {text!r}")


async def test_a_run_of_which_every_task_fails_ends_with_1_and_the_error(streamrl: Start, place: Path, run: RunDir) -> None:
    code, out, err = await said(await streamrl("up", "run.toml", "--plain", *COLD, *sets("producer.function=mine.py:fails")))
    assert code == 1
    assert "tasks (3 batches) have failed and none was trained" in err
    assert "ValueError: no tool for" in err
    assert "hint: mend the producer or the reward" in err
    assert "tasks have failed since the newest batch; the newest: failed: " in out
    (listed,) = await answer(await streamrl("status", "--json"))
    assert (listed["state"], listed["step"], listed["steps"]) == ("failed", 0, 15)
    assert "ValueError: no tool for" in listed["error"]
    assert "run digits is failed, 0/15 steps" in (await said(await streamrl("status", "digits")))[1]


async def test_a_run_whose_producers_all_have_a_typo_ends_with_1(streamrl: Start, place: Path) -> None:
    keys = sets("producer.function=mine.py:fails", "producer.workers=2", "producer.concurrency=2")
    code, _, err = await said(await streamrl("up", "run.toml", "--plain", *COLD, *keys))
    assert code == 1
    assert "ValueError: no tool for" in err


async def test_a_healthy_run_goes_on_beside_an_attached_producer_that_fails_and_names_it(streamrl: Start, run: RunDir, place: Path) -> None:
    """Its own producer takes a second and a half for a rollout, in which the other one fails more tasks than end a run by itself."""
    keys = ("debug.token_delay_s=0.5", "producer.concurrency=2", "tasks.batch_tasks=2", "tasks.drop_zero_variance=false")
    process = await streamrl("up", "run.toml", "--plain", *COLD, *sets(*keys, "run.steps=100000"))
    await line_with(process, "training")
    said_by_guest = place / "guest.txt"
    with said_by_guest.open("w") as file:  # it says more than a pipe holds
        guest = await streamrl("attach", "mine.py:fails", "--run", "digits", stdout=file, stderr=file)
    assert "all by producer-1. hint: stop and mend it" in await line_with(process, "tasks have failed since")
    before = json.loads(run.state_path.read_text())["step"]
    await until(lambda: json.loads(run.state_path.read_text())["step"] > before + 3, within_s=90)
    status = await answer(await streamrl("status", "digits", "--json"))
    failed = {one["worker"]: one["failed_rollouts"] for one in status["numbers"]["workers"]}
    assert failed.pop("producer-1") > 3 * 2 * 4 and not any(failed.values())
    assert re.search(r"producer-1: .* rollouts failed lately", (await said(await streamrl("status", "digits")))[1])
    assert await asyncio.wait_for(guest.wait(), 120) == 2, "it leaves by itself"
    assert "ValueError: no tool for" in said_by_guest.read_text().rpartition("error: 64 tasks in a row")[2]
    process.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(process.wait(), 60) == 0


@pytest.mark.parametrize(
    ("keys", "waits", "hint"),
    [
        (("engine.workers=0",), "waits for an engine: none serves a version", "streamrl worker engine"),
        (("producer.workers=0",), "waits for a producer: none is there", "streamrl attach"),
        (("reward.kind=late",), "waits for credit: all", "late"),
        (("producer.function=mine.py:hangs",), "waits for user code: producers hold", "hangs"),
    ],
)
async def test_a_run_that_stands_says_what_it_waits_for(
    streamrl: Start, run: RunDir, place: Path, keys: tuple[str, ...], waits: str, hint: str
) -> None:
    process = await streamrl("up", "run.toml", "--plain", *COLD, *sets(*keys))
    line = await line_with(process, "nothing moves since")
    assert waits in line
    assert hint in line
    status = await answer(await streamrl("status", "digits", "--json"))
    assert f"waits for {status['numbers']['standing']['what']}".startswith(waits)
    assert status["numbers"]["standing"]["hint"] in line
    assert waits in (await said(await streamrl("status", "digits")))[1]
    assert waits in run.events_path.read_text()
    process.send_signal(signal.SIGINT)
    assert (await said(process))[0] == 0


async def test_a_run_whose_stream_is_full_says_so(streamrl: Start, run: RunDir) -> None:
    """A tap that holds the stream from its first message on, and 33 MB that fill it: nobody can free any room."""
    process = await streamrl("up", "run.toml", "--plain", *COLD, *sets("bus.samples_bytes=33554432", "run.steps=100000"))
    await line_with(process, "training")
    subjects = Subjects("digits")
    async with connected(run) as bus:
        position = Position(reader="tap", stream=SAMPLES, oldest_needed=1, version=Version(0, 0))
        await bus.kv.put(f"{PREFIX_POSITIONS}tap", encode(position))
        with contextlib.suppress(StreamFull):
            for size in (7 << 20, 1 << 20, 1 << 16, 1 << 12, 1 << 8):
                with contextlib.suppress(StreamFull):
                    while True:
                        await bus.publish(subjects.samples("main"), bytes(size))
    line = await line_with(process, "nothing moves since")
    assert "waits for room on a full stream, for which producer-0" in line
    assert "docs/operations.md" in line
    process.send_signal(signal.SIGINT)
    await said(process)


async def test_a_stopped_worker_of_a_run_is_restarted_and_the_run_goes_on(streamrl: Start, run: RunDir) -> None:
    keys = sets("supervise.silent_s=6", "run.steps=100000", "tasks.drop_zero_variance=false")
    process = await streamrl("up", "run.toml", "--plain", *COLD, *keys)
    await line_with(process, "training")
    pid = worker_pid(run, "engine")
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    assert "engine-0 has been silent for 6 s" in await line_with(process, "silent for 6 s")
    # Its stacks are written while its other threads may move: a process that is to be killed anyway may crash of that before.
    assert re.search(r"ended with signal SIG(KILL|SEGV) \(silent for 6 s\); restart 1", await line_with(process, "restart 1"))
    assert "most recent call first" in run.log_path("engine-0").read_text()
    before = json.loads(run.state_path.read_text())["step"]
    await until(lambda: json.loads(run.state_path.read_text())["step"] > before + 5, within_s=90)
    process.send_signal(signal.SIGINT)
    assert (await said(process))[0] == 0


async def test_a_run_that_goes_on_says_so_and_one_that_was_killed_is_interrupted(streamrl: Start, run: RunDir, place: Path) -> None:
    process = await streamrl(
        "up", "run.toml", "--plain", *COLD, *sets("engine.workers=0", "run.steps=100000", "tasks.drop_zero_variance=false")
    )
    await line_with(process, "waits for an engine")
    engine = await streamrl("worker", "engine", "--run", "digits")
    await line_with(process, "the run goes on")
    process.kill()
    await process.wait()
    engine.kill()
    (listed,) = await answer(await streamrl("status", "--json"))
    assert (listed["state"], listed["steps"]) == ("interrupted", 100000)
    assert json.loads(run.state_path.read_text())["state"] == "running"
    assert (await said(await streamrl("down", "digits")))[0] == 0  # frees what the killed run left in shared memory
