"""A trainer whose model is cut over two ranks on Ray: on one node, and on a node each."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from streamrl.runtime.rundir import RunDir
from tests.ray.running import ended, two_nodes, up
from tests.support.digits import TRANSFORMER
from tests.support.processes import alive, find, until, worker_pid
from tests.support.programs import Start

pytestmark = [pytest.mark.needs("ray"), pytest.mark.nats, pytest.mark.slow, pytest.mark.timeout(600)]

TOML = f"""{TRANSFORMER}
[run]
name = "digits"
steps = 8
numerics = "bitwise"
[data]
train = "train.jsonl"
chat_template = false
max_prompt_tokens = 4
[tasks]
batch_tasks = 8
num_rollouts = 4
drop_zero_variance = false
[warmup]
max_steps = 4
[trainer]
device = "cpu"
ranks = 2
shards = 2
checkpoint_every = 2
rank_timeout_s = 90
[supervise]
backoff_s = 0.1
[ray.trainer]
cpus = 0.5
[ray.engine]
cpus = 0.5
"""
WITHIN_S = 240
TENSOR = ("trainer.shards=1", "trainer.backend=megatron", "trainer.tensor=2")


@pytest.fixture
def cut(place: Path) -> None:
    """The run is of a tiny transformer in two parts."""
    (place / "run.toml").write_text(TOML)


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize(("nodes", "mesh"), [(1, ()), (2, ()), (2, TENSOR)], ids=["one node", "two nodes", "two nodes, tensor ranks"])
async def test_a_rank_that_dies_takes_all_back_to_the_checkpoint_and_they_come_again(
    start: Start, run: RunDir, nodes: int, mesh: tuple[str, ...]
) -> None:
    """As without Ray: see `tests/ranks/test_up.py`. Of two nodes each has a rank, and weights go over the bus alone."""
    address, values = "local", ["weights.transport=shm", *mesh]
    if nodes == 2:
        _, address = await two_nodes(start)
        values += ["bus.host=0.0.0.0", "bus.advertise=127.0.0.1", "engine.host=0.0.0.0", "engine.advertise=127.0.0.1"]
        values += ["ray.trainer.strategy=STRICT_SPREAD"]
    process = await up(start, address, *values)
    leader = run.log_path("trainer-0")
    await until(lambda: leader.exists() and "event=checkpoint" in leader.read_text(), within_s=WITHIN_S)
    first, second = worker_pid(run, "trainer", 0), worker_pid(run, "trainer", 1)
    assert first is not None and second is not None
    os.kill(second, signal.SIGKILL)
    await until(lambda: not alive(first))
    out, _ = await ended(process, WITHIN_S)
    summary: Any = json.loads(out)
    assert summary["steps"] == 8
    events = run.events_path.read_text()
    assert "restart 1 of all 2" in events and events.count("event=worker_restarted worker=trainer-") == 2
    assert run.log_path("trainer-1").read_text().count("event=following rank=1") == 2
    assert ("weights.transport = bus" in events) == (nodes == 2)
    assert run.load_config().weights.transport == ("bus" if nodes == 2 else "shm")
    hosts = {line.rpartition("host=")[2] for line in events.splitlines() if "event=placed worker=trainer-" in line}
    assert len(hosts) == nodes
    assert find("worker", "--run", str(run.path)) == []
    out, _ = await ended(await start("-m", "streamrl", "replay", "digits", "--verify", "--json"), WITHIN_S)
    assert json.loads(out)["ok"] is True
