"""A real run with `tasks.max_deliveries`, `bus.ack_wait_s` and `supervise.max_restarts` as they are when nobody sets them."""

import json
import os
import signal
from pathlib import Path

import pytest

from streamrl.config.load import load
from streamrl.runtime.run_bus import open_bus
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.codec import decode
from streamrl.schemas.samples import Tombstone
from streamrl.schemas.subjects import SAMPLES, Subjects
from tests.support.processes import until, worker_pid
from tests.support.programs import STREAMRL, Start, said

pytestmark = [pytest.mark.nats, pytest.mark.process, pytest.mark.soak]

TOML = """
[run]
name = "defaults"
steps = 20
[data]
train = "train.jsonl"
chat_template = false
[tasks]
batch_tasks = 4
num_rollouts = 2
drop_zero_variance = false
[sampling]
max_new_tokens = 1
[engine]
kind = "table"
[trainer]
backend = "table"
[producer]
function = "code.py:producer"
"""
CODE = """
import asyncio
import os
from pathlib import Path

FOLDER = Path(__file__).parent


def tell(name, text=""):
    with (FOLDER / name).open("a") as file:
        file.write(f"{os.getppid()} {text}\\n")


def told(name):
    path = FOLDER / name
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


async def producer(task, engine):
    chat = engine.chat(task)
    await chat.generate()
    if task.index == 20:
        tell("held", engine.context.rollout_index)
        while len({worker for worker, _ in told("held")}) < 2:
            await a_moment(task, engine)
    if task.index == 40:
        tell("deaths")
        os._exit(3)
    while task.index > 47 and (len(told("deaths")) < 5 or len({worker for worker, _ in told("held")}) < 2):
        await a_moment(task, engine)
    return chat.episode()


async def a_moment(task, engine):
    await asyncio.sleep(0.1)
    await engine.chat(task).generate()
"""


def write_run(place: Path) -> RunDir:
    (place / "defaults.toml").write_text(TOML)
    (place / "code.py").write_text(CODE)
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(4) for b in range(4)]
    (place / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RunDir(place / "runs" / "defaults")


async def test_a_killed_producers_tasks_come_back_and_a_deadly_task_ends_alone(start: Start, tmp_path: Path) -> None:
    """One producer is killed with claims in its hands; its successor gets them once `bus.ack_wait_s` has passed."""
    run = write_run(tmp_path)
    config = load(tmp_path / "defaults.toml")
    assert (config.tasks.max_deliveries, config.bus.ack_wait_s, config.supervise.max_restarts) == (4, 30.0, 10)
    process = await start(*STREAMRL, "up", "defaults.toml", "--plain")
    await until((tmp_path / "held").exists, within_s=120)
    killed = worker_pid(run, "producer")
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    code, out, err = await said(process, within_s=240)
    assert (code, err) == (0, ""), out
    assert "restart 1 in 0.5 s" in out and "restart 2" not in out
    held = [line.split() for line in (tmp_path / "held").read_text().splitlines()]
    assert held[0][0] == str(killed) and {rollout for pid, rollout in held if pid != str(killed)} == {"0", "1"}
    # One process that it shared with others, at which nobody knew yet, and then as many alone as the default allows.
    assert len((tmp_path / "deaths").read_text().splitlines()) == 5
    async with open_bus(run) as bus:
        stones: list[Tombstone] = []
        last = (await bus.state(SAMPLES)).last
        async for message in bus.read(SAMPLES, after=0):
            if message.subject == Subjects(run.name).tombstones("main"):
                stones.append(decode(message.body, Tombstone))
            if message.sequence == last:
                break
    assert [(stone.task, stone.rollout, stone.reason) for stone in stones] == [(40, None, "deliveries")]
    assert "4 times" in stones[0].detail and "code 3" in stones[0].detail
