"""The whole product with SGLang: `streamrl up` in lockstep, a scheduler killed half-way, the run audited and replayed."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from streamrl.bus import BusAddress
from streamrl.runtime.run_bus import open_bus
from streamrl.runtime.rundir import RunDir
from tests.sglang.cpu import FLAGS
from tests.support.audit.audit import audit
from tests.support.harness import read_ledger
from tests.support.processes import command_of, group_of
from tests.support.role_server import ROOT, started, until

pytestmark = [pytest.mark.nats, pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = 8
TOML = """
[run]
name = "demo"
steps = {steps}
[model]
max_len = 32
[data]
train = "{rows}"
max_prompt_tokens = 16
[tasks]
batch_tasks = 4
num_rollouts = 4
max_staleness = 0
drop_zero_variance = false
[sampling]
max_new_tokens = 5
[warmup]
max_steps = 3
[producer]
concurrency = 4
[engine]
kind = "sglang"
slots = 16
[engine.sglang]
python = "{python}"
swap = "flip"
env = {{OMP_NUM_THREADS = "1"}}
[engine.sglang.flags]
{flags}
[trainer]
checkpoint_every = 4
"""


def write_run(place: Path, python: str) -> RunDir:
    flags = "\n".join(f"{name} = {json.dumps(value)}" for name, value in FLAGS.items())
    rows = ROOT / "examples" / "quickstart" / "train.jsonl"
    (place / "demo.toml").write_text(TOML.format(steps=STEPS, rows=rows, python=python, flags=flags))
    return RunDir(place / "runs" / "demo")


def servers_of(run: RunDir) -> list[int]:
    """Process ids of the servers that the engine has started so far."""
    log = run.log_path("engine-0")
    return [int(pid) for pid in re.findall(r"event=sglang_started .*?pid=(\d+)", log.read_text())] if log.exists() else []


def committed(run: RunDir) -> int:
    log = run.log_path("engine-0")
    return log.read_text().count("event=weights_committed") if log.exists() else 0


async def test_a_run_on_sglang_is_what_its_ledger_says(sglang_python: str, tmp_path: Path):
    run = write_run(tmp_path, sglang_python)
    async with started(["up", "demo.toml", "--plain"], tmp_path) as process:
        await until(lambda: committed(run) >= 3, process, tmp_path, within_s=200)
        (first,) = servers_of(run)
        (scheduler,) = [pid for pid in group_of(first) if b"sglang::scheduler" in command_of(pid)]
        os.kill(scheduler, signal.SIGKILL)
        await until(lambda: len(servers_of(run)) == 2, process, tmp_path, within_s=200)
        assert not group_of(first)
        assert await process.wait() == 0, (tmp_path / "out").read_text()
        assert not group_of(servers_of(run)[1]), "the server ends with its run"

    async with open_bus(run) as bus:
        # It writes the address down once its server is up.
        address = BusAddress.load(run.bus_path)
        report = await audit(address.url, address.user, address.password, "demo", complete=True)
        ledger = await read_ledger(bus, "demo")
    assert report.ok, report.problems

    learned = [entry for entry in ledger if entry.source == "main"]
    assert len(learned) == STEPS and all(set(entry.staleness) == {0} for entry in learned)
    # SGLang's log-probs are the trainer's: every token was drawn from the version that its sample names.
    assert all(entry.metrics["train/train_rollout_logprob_abs_diff"] < 1e-4 for entry in learned)

    (tmp_path / "out").unlink()
    async with started(["replay", "demo", "--verify", "--json"], tmp_path) as process:
        assert await process.wait() == 0, (tmp_path / "out").read_text()
    replayed = json.loads((tmp_path / "out").read_text())
    assert replayed["ok"] is True and replayed["equal"] == replayed["versions"] >= STEPS
