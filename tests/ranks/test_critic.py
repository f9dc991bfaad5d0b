"""`streamrl up` with a critic on two ranks of megatron-core: one is killed, the run goes on, also by the other backend, and is replayed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import cast

import pytest

from streamrl.history.source import read_entries
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.ledger import LedgerEntry, TrainedOn
from tests.ranks.test_up import PIPELINE, SHORT, TENSOR, write_problem
from tests.support.processes import alive, until, worker_pid
from tests.support.programs import STREAMRL, Start
from tests.support.world.shapes import NAME
from tests.support.world.verdict import judge

pytestmark = [pytest.mark.nats, pytest.mark.slow]
CRITIC = (
    *SHORT,
    "model.layers=2",
    "trainer.checkpoint_every=2",
    "loss.advantage=ppo",
    "loss.gae_lambda=0.95",
    "loss.critic.learning_rate=1e-3",
    "loss.critic.only_steps=1",
)


async def up(start: Start, steps: int, mesh: str) -> asyncio.subprocess.Process:
    """A run to so many steps, on the mesh that these settings name."""
    asked = (*CRITIC, f"run.steps={steps}", *mesh.split())
    return await start(*STREAMRL, "up", "run.toml", "--json", *(word for one in asked for word in ("--set", one)))


def check_taught(entries: list[LedgerEntry]) -> None:
    """The critic was, in each step of reinforcement learning, and the policy from the second one on."""
    taught = [entry for entry in entries if entry.source == "main"]
    norms = [entry.metrics["train/value_norm"] for entry in taught]
    assert len(norms) == len(set(norms))
    assert [entry.metrics["train/lr"] > 0 for entry in taught] == [number > 0 for number in range(len(taught))]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mesh", [TENSOR, PIPELINE])
async def test_a_critic_survives_a_rank_that_is_killed_and_is_replayed(start: Start, tmp_path: Path, mesh: str) -> None:
    write_problem(tmp_path)
    process = await up(start, 8, mesh)
    run = RunDir(tmp_path / "runs" / NAME)
    leader = run.log_path("trainer-0")
    await until(lambda: leader.exists() and leader.read_text().count("checkpoint") > 2, within_s=200)
    ranks = [worker_pid(run, "trainer", rank) for rank in range(2)]
    assert ranks[0] is not None and ranks[1] is not None
    os.kill(ranks[1], signal.SIGKILL)
    await until(lambda: not alive(ranks[0]))
    out, err = await asyncio.wait_for(process.communicate(), 250)
    assert process.returncode == 0, err.decode()
    assert json.loads(out)["steps"] == 8
    assert "trainer-1 ended with signal SIGKILL; restart 1 of all 2 trainers" in run.events_path.read_text()
    # The audit, and a replay that starts both ranks by itself: equal digests, equal norms of the critic.
    verdict = await judge(run)
    assert verdict.problems == []
    assert verdict.counts["fences"] == 2
    check_taught((await read_entries(NAME, base=tmp_path / "runs"))[1])


@pytest.mark.timeout(900)
async def test_a_critic_goes_on_by_each_backend_and_each_stretch_is_replayed_by_its_own(start: Start, tmp_path: Path) -> None:
    write_problem(tmp_path)
    for steps, mesh in ((4, PIPELINE), (6, "trainer.ranks=1"), (8, TENSOR), (10, "trainer.shards=2")):
        process = await up(start, steps, mesh)
        _, err = await asyncio.wait_for(process.communicate(), 250)
        assert process.returncode == 0, err.decode()
    _, entries = await read_entries(NAME, base=tmp_path / "runs")
    check_taught(entries)
    stretches = dict.fromkeys((entry.version.epoch, cast("TrainedOn", entry.trained_on)) for entry in entries)
    stages, tensor = (TrainedOn(ranks=2, backend="megatron", **cut) for cut in ({"tensor": 1, "pipeline": 2}, {"tensor": 2}))
    assert list(stretches) == list(enumerate((stages, TrainedOn(), tensor, TrainedOn(ranks=2, shards=2))))
    verdict = await judge(RunDir(tmp_path / "runs" / NAME))
    assert verdict.problems == []
