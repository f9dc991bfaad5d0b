"""`streamrl up` with a trainer of two ranks: it learns, loses a rank, resumes, and its log gives its ledger again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any, cast

import pytest

from streamrl.history.replay_log import stretch
from streamrl.history.source import open_source, read_entries
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.codec import decode
from streamrl.schemas.events import Event
from streamrl.schemas.ledger import TrainedOn
from streamrl.schemas.subjects import EVENTS, Subjects
from streamrl.trainers.checkpoints import list_checkpoints
from tests.support.digits import TRANSFORMER
from tests.support.processes import alive, until, worker_pid
from tests.support.programs import STREAMRL, Start
from tests.support.world.shapes import NAME
from tests.support.world.verdict import judge

pytestmark = [pytest.mark.nats, pytest.mark.slow]

TOML = f"""{TRANSFORMER}
[run]
name = "demo"
steps = 12
numerics = "bitwise"
[data]
train = "train.jsonl"
heldout = "train.jsonl@[0:20]"
chat_template = false
max_prompt_tokens = 4
[tasks]
batch_tasks = 16
num_rollouts = 4
[warmup]
max_steps = 60
until = 0.5
learning_rate = 5e-3
[trainer]
ranks = 2
checkpoint_every = 4
rank_timeout_s = 90
[supervise]
backoff_s = 0.1
"""


LETTERS = """
def letters(task, episode):
    return float(sum(map(ord, episode.completion)) % 7)
"""
SHORT = ("warmup.max_steps=2", "data.heldout=", "tasks.drop_zero_variance=false", "reward.kind=reward.py:letters")
"""Settings of a run that need not learn: whatever it answers, groups have a spread, so every version is another."""


TENSOR = "trainer.backend=megatron trainer.tensor=2"
PIPELINE = "trainer.backend=megatron trainer.pipeline=2 model.layers=2"
SHARED = "trainer.backend=megatron trainer.context=2"


def write_problem(place: Path) -> None:
    """Put the run file, its rows, and a reward that tells answers apart into a directory."""
    rows = [{"prompt": f"{a}{b}", "label": str((b + 3) % 10)} for b in range(10) for a in range(10)]
    (place / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "run.toml").write_text(TOML)
    (place / "reward.py").write_text(LETTERS)


@pytest.fixture
async def up(tmp_path: Path, start: Start, mesh: str) -> asyncio.subprocess.Process:
    """A run that is up, on the mesh that this setting names."""
    write_problem(tmp_path)
    return await start(*STREAMRL, "up", "run.toml", "--json", *(word for one in mesh.split() for word in ("--set", one)))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param("trainer.shards=1", marks=pytest.mark.soak),
        "trainer.shards=2",
        pytest.param("trainer.context=2", marks=pytest.mark.soak),  # without a kill: the stretches below
        TENSOR,
        pytest.param(PIPELINE, marks=pytest.mark.soak),  # with a critic: test_critic.py
        SHARED,
    ],
)
async def test_a_run_with_two_ranks_learns_survives_one_and_is_replayed(up: asyncio.subprocess.Process, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / NAME)
    leader = run.log_path("trainer-0")
    await until(lambda: leader.exists() and "checkpoint" in leader.read_text(), within_s=120)
    ranks = [worker_pid(run, "trainer", rank) for rank in range(2)]
    assert ranks[0] is not None and ranks[1] is not None
    os.kill(ranks[1], signal.SIGKILL)
    await until(lambda: not alive(ranks[0]))
    out, err = await asyncio.wait_for(up.communicate(), 300)
    assert up.returncode == 0, err.decode()
    summary = json.loads(out)
    assert summary["steps"] == 12
    assert summary["heldout_last"] >= 0.5
    said = run.events_path.read_text()
    assert "trainer-1 ended with signal SIGKILL; restart 1 of all 2 trainers" in said
    assert said.count("event=worker_restarted worker=trainer-") == 2
    assert run.log_path("trainer-1").read_text().count("event=following rank=1") == 2
    generations = {line.rpartition("generation=")[2] for line in leader.read_text().splitlines() if "event=ranks_met" in line}
    assert len(generations) == 2
    # The audit, and a replay that starts both ranks by itself: equal digests, equal fingerprint.
    verdict = await judge(run)
    assert verdict.problems == []
    assert verdict.counts["fences"] == 2


@pytest.mark.timeout(1200)
async def test_each_stretch_of_a_run_is_replayed_on_its_own_mesh(start: Start, tmp_path: Path) -> None:
    write_problem(tmp_path)
    fixed = (*SHORT, "trainer.checkpoint_every=2", "model.layers=2")
    asked = ((3, "shards=2"), (5, "ranks=1"), (6, "shards=1"), (7, "context=2"), (9, "backend=megatron tensor=2"), (11, "shards=2"))
    asked += ((13, "backend=megatron pipeline=2"),)
    for steps, mesh in asked:
        changed = (*fixed, f"run.steps={steps}", *(f"trainer.{one}" for one in mesh.split()))
        process = await start(*STREAMRL, "up", "run.toml", "--json", *(word for text in changed for word in ("--set", text)))
        _, err = await asyncio.wait_for(process.communicate(), 250)
        assert process.returncode == 0, err.decode()
    _, entries = await read_entries(NAME, base=tmp_path / "runs")
    assert len({entry.fingerprint for entry in entries}) == 6
    assert len({entry.digest for entry in entries}) == len(entries), "each has taught something"
    # Each begins an epoch right behind the one before, whose parameters and moments it carries on.
    assert [entry.version.number for entry in entries] == list(range(1, len(entries) + 1))
    stretches = dict.fromkeys((entry.version.epoch, cast("TrainedOn", entry.trained_on)) for entry in entries)
    cut, tensor = TrainedOn(ranks=2, shards=2), TrainedOn(ranks=2, backend="megatron", tensor=2)
    stages = TrainedOn(ranks=2, backend="megatron", tensor=1, pipeline=2)
    meshes = (cut, TrainedOn(), TrainedOn(ranks=2), TrainedOn(ranks=2, context=2), tensor, cut, stages)
    assert list(stretches) == list(enumerate(meshes))
    verdict = await judge(RunDir(tmp_path / "runs" / NAME))
    assert verdict.problems == []


@pytest.mark.timeout(600)
async def test_a_damaged_part_of_the_newest_checkpoint_is_gone_back_behind(start: Start, tmp_path: Path) -> None:
    write_problem(tmp_path)
    fixed = (*SHORT, "trainer.checkpoint_every=2", "trainer.shards=2")
    run = RunDir(tmp_path / "runs" / NAME)

    async def up_to(steps: int) -> None:
        options = (*fixed, f"run.steps={steps}")
        process = await start(*STREAMRL, "up", "run.toml", "--json", *(word for text in options for word in ("--set", text)))
        _, err = await asyncio.wait_for(process.communicate(), 250)
        assert process.returncode == 0, err.decode()

    await up_to(4)
    older, newest = (path for _, path in list_checkpoints(run.checkpoints, "main-"))
    moments = newest / "part-2-of-2" / "optimizer.safetensors"
    data = bytearray(moments.read_bytes())
    data[-1] ^= 1
    moments.write_bytes(data)
    await up_to(5)
    said = run.events_path.read_text()
    assert f"checkpoint {newest.name} cannot be gone on from" in said and "part-2-of-2/optimizer.safetensors" in said
    assert f"goes on from checkpoint {older.name}" in said
    _, entries = await read_entries(NAME, base=tmp_path / "runs")
    assert len({entry.version.number for entry in entries}) == len(entries) and entries[-1].version.epoch == 0
    verdict = await judge(run)
    assert verdict.problems == []


def contributed(run: RunDir, rank: int) -> list[str]:
    """Versions that a rank has stored its part of, as its log says."""
    path = run.log_path(f"trainer-{rank}")
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.partition("version=")[2].split()[0] for line in lines if "event=weights_contributed" in line]


async def told(place: Path) -> list[dict[str, Any]]:
    """What engines have said of versions that they took, or could not."""
    async with open_source(NAME, base=place / "runs") as source:
        state = await source.log.state(EVENTS)
        messages = stretch(source.log, EVENTS, first=state.first, last=state.last, subject=Subjects(NAME).events("weights"))
        return [decode(message.body, Event).detail async for message in messages]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("transport", "cut"),
    [pytest.param("shm", "trainer.shards=2", marks=pytest.mark.soak), ("bus", "trainer.shards=2"), ("shm", TENSOR)],
)
async def test_engines_serve_what_the_parts_of_a_cut_model_make_together(start: Start, tmp_path: Path, transport: str, cut: str) -> None:
    """Rank 1 is killed as soon as it is asked for its part of a version; engines go on, and serve the ledger's digests at every commit."""
    write_problem(tmp_path)
    changed = (*SHORT, "run.steps=10", *cut.split())
    sent = (f"weights.transport={transport}", f"weights.also_on_bus={str(transport == 'shm').lower()}", "weights.anchor_every=4")
    process = await start(*STREAMRL, "up", "run.toml", "--json", *(word for text in (*changed, *sent) for word in ("--set", text)))
    run = RunDir(tmp_path / "runs" / NAME)
    await until(lambda: len(contributed(run, 1)) >= 3, within_s=200)
    first = worker_pid(run, "trainer", 1)
    assert first is not None
    os.kill(first, signal.SIGSTOP)  # it takes part in no further version, whatever is asked of it
    await asyncio.sleep(0.2)
    os.kill(first, signal.SIGKILL)
    _, err = await asyncio.wait_for(process.communicate(), 300)
    assert process.returncode == 0, err.decode()
    _, entries = await read_entries(NAME, base=tmp_path / "runs")
    assert contributed(run, 1)[-1] == str(entries[-1].version)
    ledger = {str(entry.version): entry.digest for entry in entries}
    assert len(set(ledger.values())) == len(ledger), "each has taught something"
    taken = {str(detail["version"]): detail["digest"] for detail in await told(tmp_path) if "digest" in detail}
    taken.pop("0.0", None)  # the initial weights have no entry, and an engine that came late has not seen them
    assert len(taken) >= 3
    assert taken == {version: ledger[version] for version in taken}
    assert {detail["transport"] for detail in await told(tmp_path) if "digest" in detail} == {transport}
    verdict = await judge(run)
    assert verdict.problems == []


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("shards", "short"), [(1, []), (2, [1]), *(pytest.param(*one, marks=pytest.mark.soak) for one in ((2, []), (2, [0]), (1, [1])))]
)
async def test_ranks_that_are_out_of_memory_begin_again_with_half_the_budget(
    start: Start, tmp_path: Path, shards: int, short: list[int]
) -> None:
    """Also where one of them is alone: the other one waits for it in the middle of a pass, and only learns that it has ended."""
    write_problem(tmp_path)
    limits = (
        *SHORT,
        "run.steps=3",
        "trainer.micro_tokens=64",
        f"trainer.shards={shards}",
        f"debug.memory_ranks={short}",
        "debug.profile_versions=[2]",
    )
    process = await start(
        *STREAMRL, "up", "run.toml", "--json", *(word for text in (*limits, "debug.memory_tokens=40") for word in ("--set", text))
    )
    _, err = await asyncio.wait_for(process.communicate(), 250)
    assert process.returncode == 0, err.decode()
    run = RunDir(tmp_path / "runs" / NAME)
    said = run.events_path.read_text()
    assert "goes on with micro-batches of 32 tokens (trainer.micro_tokens is 64" in said
    assert "restart 1 of all 2 trainers" in said
    if short:
        assert "out of memory" not in run.log_path(f"trainer-{1 - short[0]}").read_text()
    verdict = await judge(run)
    assert verdict.problems == []
    assert verdict.counts["fences"] == 2
    _, entries = await read_entries(NAME, base=tmp_path / "runs")
    # The demonstrations are short enough.
    assert [entry.micro_tokens for entry in entries] == [64 if entry.source == "warmup" else 32 for entry in entries]
    assert {entry.source for entry in entries} == {"warmup", "main"}
    assert {path.name for path in run.profile.iterdir()} == {f"v00000002-rank{rank}.json.gz" for rank in range(2)}
