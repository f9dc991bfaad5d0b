"""GPUs that Ray gives out: what workers see of them, and runs that train on two.

The first test needs none: Ray gives out as many as a node is said to have. The others want a machine with two, `pytest -m gpu tests/ray`.
"""

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from streamrl.runtime.rundir import RunDir
from tests.ray.running import START_S, ended, two_nodes, up
from tests.support.digits import TRANSFORMER
from tests.support.needs import need
from tests.support.processes import alive, find, parent, until, worker_pid
from tests.support.programs import Start

pytestmark = [pytest.mark.needs("ray"), pytest.mark.nats, pytest.mark.slow, pytest.mark.timeout(900)]

TOML = f"""{TRANSFORMER}
[run]
name = "digits"
steps = 60
[data]
train = "train.jsonl"
heldout = "heldout.jsonl"
chat_template = false
max_prompt_tokens = 4
[tasks]
batch_tasks = 16
num_rollouts = 4
drop_zero_variance = false
[warmup]
max_steps = 60
until = 0.3
learning_rate = 5e-3
[trainer]
device = "cuda"
checkpoint_every = 20
rank_timeout_s = 90
[trainer.optimizer]
learning_rate = 3e-3
[supervise]
backoff_s = 0.1
"""
COMMITTED = "event=weights_committed"
WITHIN_S = 240


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test starts sees two GPUs, however many there are."""
    need("two gpus")
    there = os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(there.split(",")[:2]))


@pytest.fixture
def transformer(place: Path, two_gpus: None) -> None:
    """The run is of a tiny transformer."""
    (place / "run.toml").write_text(TOML)


def visible(pid: int) -> str | None:
    """CUDA_VISIBLE_DEVICES of a process; None: it has none and sees all GPUs."""
    for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        name, _, value = entry.partition(b"=")
        if name == b"CUDA_VISIBLE_DEVICES":
            return value.decode()
    return None


async def seen(run: RunDir, *workers: str) -> dict[str, str | None]:
    """What each worker sees, once all of them run."""

    def pid(worker: str) -> int | None:
        kind, _, index = worker.rpartition("-")
        return worker_pid(run, kind, int(index))

    await until(lambda: all(map(pid, workers)), within_s=START_S)
    found = {worker: pid(worker) for worker in workers}
    return {worker: visible(number) if number else None for worker, number in found.items()}


def lines(run: RunDir, worker: str, event: str) -> list[str]:
    path = run.log_path(worker)
    return [line for line in path.read_text().splitlines() if event in line] if path.exists() else []


def check_learned(summary: Mapping[str, Any]) -> None:
    assert summary["steps"] == 60 and summary["reward_last"] >= summary["reward_first"] + 0.1


async def test_each_worker_sees_the_gpus_that_it_was_given(start: Start, run: RunDir) -> None:
    _, address = await two_nodes(start, gpus=2)
    asked = ("engine.workers=2", "ray.trainer.gpus=1", "tasks.drop_zero_variance=false", "run.steps=100000")

    _, err = await ended(await up(start, address, *asked, "ray.engine.gpus=1"), START_S, code=1)
    assert "1 trainer with 0.5 CPU, 1 GPU each" in err

    process = await up(start, address, *asked, "ray.engine.gpus=0.5")
    found = await seen(run, "trainer-0", "engine-0", "engine-1", "producer-0", "feeder-0")
    assert {found["trainer-0"], found["engine-0"]} == {"0", "1"}
    assert found["engine-0"] == found["engine-1"] and found["producer-0"] == found["feeder-0"] == ""
    process.send_signal(signal.SIGINT)
    await ended(process, START_S)


@pytest.mark.gpu
@pytest.mark.usefixtures("transformer")
async def test_the_trainer_has_a_gpu_and_two_engines_share_the_other(start: Start, run: RunDir) -> None:
    """By default, with nobody's number; weights go from GPU to GPU, neither of whose processes sees the other's."""
    process = await up(start, "local", "engine.workers=2", "weights.transport=ipc")
    found = await seen(run, "trainer-0", "engine-0", "engine-1", "producer-0")
    out, _ = await ended(process, WITHIN_S)
    both = set(os.environ["CUDA_VISIBLE_DEVICES"].split(","))
    assert {found["trainer-0"], found["engine-0"]} == both
    assert (found["engine-0"], found["producer-0"]) == (found["engine-1"], "")
    check_learned(json.loads(out))
    for engine in ("engine-0", "engine-1"):
        assert "device=cuda" in lines(run, engine, "event=model_built")[0]
        committed = lines(run, engine, COMMITTED)
        assert committed and all("transport=ipc" in line for line in committed)
    assert find("worker", "--run", str(run.path)) == []


@pytest.mark.gpu
@pytest.mark.usefixtures("transformer")
async def test_two_ranks_have_a_gpu_each_and_sum_over_nccl(start: Start, run: RunDir) -> None:
    """Each sees its own GPU as the first; the engine has what rank 0 or rank 1 leaves."""
    process = await up(start, "local", "trainer.ranks=2", "ray.trainer.gpus=0.6", "ray.engine.gpus=0.4")
    found = await seen(run, "trainer-0", "trainer-1", "engine-0")
    out, _ = await ended(process, WITHIN_S)
    both = set(os.environ["CUDA_VISIBLE_DEVICES"].split(","))
    assert {found["trainer-0"], found["trainer-1"]} == both
    assert found["engine-0"] in both
    check_learned(json.loads(out))
    assert lines(run, "trainer-0", "event=ranks_met ranks=2")
    assert lines(run, "trainer-1", "event=following rank=1")
    assert "event=worker_restarted" not in run.events_path.read_text()


@pytest.mark.gpu
@pytest.mark.usefixtures("transformer")
async def test_an_engine_whose_actor_is_killed_comes_back_on_its_gpu(start: Start, run: RunDir) -> None:
    values = ("engine.workers=2", "ray.trainer.gpus=1", "ray.engine.gpus=0.5", "run.steps=100000")
    process = await up(start, "local", *values)
    before = await seen(run, "trainer-0", "engine-0", "engine-1")
    await until(lambda: lines(run, "engine-1", COMMITTED), within_s=120)
    engine = worker_pid(run, "engine", 1)
    assert engine is not None
    os.kill(parent(engine), signal.SIGKILL)
    await until(lambda: not alive(engine))
    assert await seen(run, "trainer-0", "engine-0", "engine-1") == before
    await until(lambda: len(lines(run, "engine-1", "event=model_built")) == 2, within_s=120)
    count = len(lines(run, "engine-1", COMMITTED))
    await until(lambda: len(lines(run, "engine-1", COMMITTED)) > count, within_s=120)
    process.send_signal(signal.SIGINT)
    await ended(process, WITHIN_S)
    assert "event=actor_lost worker=engine-1" in run.events_path.read_text()


@pytest.mark.gpu
@pytest.mark.usefixtures("transformer")
async def test_more_gpus_than_there_are_is_refused_at_once(start: Start, run: RunDir) -> None:
    _, err = await ended(await up(start, "local", "engine.workers=2", "ray.engine.gpus=1"), WITHIN_S, code=1)
    assert "2 engines with 1 CPU, 1 GPU each" in err and "engine.workers or trainer.ranks" in err
    assert not run.log_path("trainer-0").exists()
