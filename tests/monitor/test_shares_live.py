"""Shares of time of a real run whose engine and trainer are killed, by the rows of its metrics file."""

import json
import os
import signal
from pathlib import Path

import pytest

from streamrl.monitor.metrics_file import decoded, files
from streamrl.monitor.series import Row
from streamrl.monitor.shares import SILENT_S, named
from streamrl.runtime.rundir import RunDir
from streamrl.telemetry.clock import REPORT_EVERY_S
from streamrl.telemetry.states import STATES, share
from tests.support.processes import until, worker_pid
from tests.support.programs import STREAMRL, Start, said

pytestmark = [pytest.mark.nats, pytest.mark.process, pytest.mark.slow]

TOML = """
[run]
name = "timed"
steps = 1000000
[data]
train = "train.jsonl"
chat_template = false
[tasks]
batch_tasks = 4
num_rollouts = 2
drop_zero_variance = false
[sampling]
max_new_tokens = 4
[engine]
kind = "table"
[trainer]
backend = "table"
[producer]
function = "code.py:producer"
[reward]
kind = "code.py:reward"
[debug]
token_delay_s = 0.05
[metrics]
window_s = 4
[supervise]
backoff_s = 3.0
"""
CODE = """
import asyncio


async def producer(task, engine):
    chat = engine.chat(task)
    await chat.generate()
    await asyncio.sleep(0.1)
    return chat.episode()


async def reward(task, episode):
    await asyncio.sleep(0.05)
    return 1.0
"""


def windows(run: RunDir, of: str) -> list[Row]:
    rows = [decoded(line) for path in files(run.metrics) for line in path.read_bytes().splitlines()]
    return [row for row in rows if row is not None and row.kind == "window" and row.of == of]


async def test_shares_add_up_to_one_in_every_window_over_the_deaths_of_engine_and_trainer(start: Start, tmp_path: Path) -> None:
    (tmp_path / "timed.toml").write_text(TOML)
    (tmp_path / "code.py").write_text(CODE)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"prompt": f"{a}+1=", "label": str(a + 1)}) + "\n" for a in range(8)))
    run = RunDir(tmp_path / "runs" / "timed")
    process = await start(*STREAMRL, "up", "timed.toml", "--plain")

    def seen(of: str, name: str) -> bool:
        return any(row.values.get(name, 0.0) > 0.0 for row in windows(run, of))

    await until(lambda: seen("trainer-0", share("trainer", "compute")) and seen("producer-0", share("producer", "tools")), within_s=180)
    for worker, kind in (("engine-0", "engine"), ("trainer-0", "trainer")):
        killed = worker_pid(run, kind)
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        await until(lambda worker=worker, kind=kind: seen(worker, share(kind, "down")), within_s=120)
        gone = len(windows(run, worker))
        await until(lambda worker=worker, gone=gone: len(windows(run, worker)) > gone + 1, within_s=120)
    process.send_signal(signal.SIGINT)
    code, out, err = await said(process)
    assert (code, err) == (0, ""), out

    moved: set[str] = set()
    for worker, kind in (("engine-0", "engine"), ("trainer-0", "trainer"), ("producer-0", "producer"), *(("", kind) for kind in STATES)):
        rows = [row for row in windows(run, worker) if any(name in row.values for name in named(kind))]
        assert len(rows) >= 4
        for row in rows:
            parts = {name: value for name, value in row.values.items() if name.startswith(f"{kind}/share/")}
            assert sum(parts.values()) == pytest.approx(1.0, abs=0.01)
            moved |= {name for name, value in parts.items() if value > 0.0}
        if worker:
            # What was reported is the time that has passed, no more and no less, but for what is on its way at both ends. The last row has
            # the time of the drain too, in which workers have ended.
            slots = max(row.values.get("producer/slots", 1.0) for row in rows)
            inner = rows[1:-1]
            spent_s = sum(row.values.get(name, 0.0) for row in inner for name in named(kind)) / slots
            passed_s = inner[-1].time_s - rows[0].time_s
            assert abs(spent_s - passed_s) < SILENT_S + REPORT_EVERY_S, (worker, spent_s, passed_s)
    assert moved >= {share("trainer", state) for state in ("setup", "compute", "wait_samples", "wait_bus", "publish", "down")}
    assert moved >= {share("engine", state) for state in ("setup", "decode", "down")}
    assert moved >= {share("producer", state) for state in ("generate", "tools", "reward", "publish", "wait_engine")}
    assert seen("", "starvation/trainer")
