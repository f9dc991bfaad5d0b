"""`streamrl up` with a mixture of experts on two ranks: one is killed, the run goes on, and its log gives its ledger again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import cast

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from streamrl.data.characters import VOCAB_SIZE, write_tokenizer
from streamrl.history.source import read_entries
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.ledger import TrainedOn
from tests.ranks.test_up import SHORT, write_problem
from tests.support.processes import alive, until, worker_pid
from tests.support.programs import STREAMRL, Start
from tests.support.world.shapes import NAME
from tests.support.world.verdict import judge

pytestmark = [pytest.mark.nats, pytest.mark.slow]

MIXTURE = (
    *SHORT,
    "run.steps=8",
    "model.path=mixture",
    "trainer.checkpoint_every=2",
    "loss.experts.balance_coef=0.01",
    "loss.experts.z_coef=0.001",
)


def write_mixture(directory: Path) -> None:
    """A Qwen3-MoE of one layer for the tokenizer of characters."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=VOCAB_SIZE, **sizes, **experts, max_position_embeddings=64))
    model.save_pretrained(directory)
    write_tokenizer(directory)


SHARDS, EXPERTS = ("trainer.shards=2",), ("trainer.backend=megatron", "trainer.experts=2")
REPLAYED = (*EXPERTS, "trainer.routing_replay=true")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mesh", [SHARDS, EXPERTS, REPLAYED], ids=["shards", "experts", "replayed"])
async def test_a_mixture_survives_a_rank_that_is_killed_and_is_replayed(start: Start, tmp_path: Path, mesh: tuple[str, ...]) -> None:
    write_problem(tmp_path)
    write_mixture(tmp_path / "mixture")
    process = await start(*STREAMRL, "up", "run.toml", "--json", *(word for text in (*MIXTURE, *mesh) for word in ("--set", text)))
    run = RunDir(tmp_path / "runs" / NAME)
    leader = run.log_path("trainer-0")
    await until(lambda: leader.exists() and "checkpoint" in leader.read_text(), within_s=120)
    ranks = [worker_pid(run, "trainer", rank) for rank in range(2)]
    assert ranks[0] is not None and ranks[1] is not None
    os.kill(ranks[1], signal.SIGKILL)
    await until(lambda: not alive(ranks[0]))
    out, err = await asyncio.wait_for(process.communicate(), 250)
    assert process.returncode == 0, err.decode()
    assert json.loads(out)["steps"] == 8
    assert "trainer-1 ended with signal SIGKILL; restart 1 of all 2 trainers" in run.events_path.read_text()
    # The audit, and a replay that starts both ranks by itself: equal digests, equal fingerprint.
    verdict = await judge(run)
    assert verdict.problems == []
    assert verdict.counts["fences"] == 2
    _, entries = await read_entries(NAME, base=tmp_path / "runs")
    loads = [entry.metrics["train/expert_load_max"] for entry in entries]
    assert len(loads) >= 8 and all(1 <= load <= 4 for load in loads)
    replayed = [entry.metrics.get("train/routing_replayed", 0.0) for entry in entries if entry.source == "main"]
    assert all(replayed) if mesh == REPLAYED else not any(replayed)


@pytest.mark.timeout(600)
async def test_each_stretch_of_a_mixture_is_replayed_by_its_own_backend(start: Start, tmp_path: Path) -> None:
    write_problem(tmp_path)
    write_mixture(tmp_path / "mixture")
    for steps, mesh in ((2, SHARDS), (4, EXPERTS), (6, ("trainer.ranks=1",))):
        changed = (*MIXTURE, *mesh, f"run.steps={steps}")
        process = await start(*STREAMRL, "up", "run.toml", "--json", *(word for text in changed for word in ("--set", text)))
        _, err = await asyncio.wait_for(process.communicate(), 250)
        assert process.returncode == 0, err.decode()
    _, entries = await read_entries(NAME, base=tmp_path / "runs")
    stretches = dict.fromkeys((entry.version.epoch, cast("TrainedOn", entry.trained_on)) for entry in entries)
    meshes = (TrainedOn(ranks=2, shards=2), TrainedOn(ranks=2, backend="megatron", tensor=1, experts=2), TrainedOn())
    assert list(stretches) == list(enumerate(meshes))
    verdict = await judge(RunDir(tmp_path / "runs" / NAME))
    assert verdict.problems == []


@pytest.mark.timeout(300)
async def test_routing_replay_of_a_dense_model_is_refused_before_anything_starts(start: Start, tmp_path: Path) -> None:
    write_problem(tmp_path)
    process = await start(*STREAMRL, "up", "run.toml", "--json", "--set", "trainer.routing_replay=true")
    _, err = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode != 0 and "trainer.routing_replay = true is for mixtral" in err.decode()
    assert not list((tmp_path / "runs" / NAME).glob("logs/trainer*"))


@pytest.mark.timeout(300)
async def test_losses_of_routers_with_a_dense_model_are_refused_before_anything_starts(start: Start, tmp_path: Path) -> None:
    write_problem(tmp_path)
    process = await start(*STREAMRL, "up", "run.toml", "--json", "--set", "loss.experts.z_coef=0.001")
    _, err = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode != 0
    assert "loss.experts.z_coef = 0.001 is for mixtral, olmoe, qwen2_moe, qwen3_moe, qwen3_next, got a model of qwen3" in err.decode()
    assert not list((tmp_path / "runs" / NAME).glob("logs/trainer*"))
