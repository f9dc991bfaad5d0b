"""`streamrl up` with a mixture of experts on two ranks: one is killed, the run goes on, and its log gives its ledger again."""

from pathlib import Path

import pytest

from streamrl.config.load import load
from streamrl.errors import ConfigError
from streamrl.launch.prepare import prepare
from streamrl.schemas.ledger import TrainedOn
from tests.ranks.trained import SHORT, Trained
from tests.support.errors import raises
from tests.support.mixtures import write_mixture

pytestmark = [pytest.mark.nats, pytest.mark.timeout(600)]
LOSS = "loss.experts.balance_coef=0.01 loss.experts.z_coef=0.001"
MIXTURE = (*SHORT, "model.path=mixture", "trainer.checkpoint_every=2", LOSS)
SHARDS, EXPERTS = "trainer.shards=2", "trainer.backend=megatron trainer.experts=2"
REPLAYED = f"{EXPERTS} trainer.routing_replay=true"


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(SHARDS, marks=pytest.mark.soak, id="shards"),
        pytest.param(EXPERTS, marks=pytest.mark.soak, id="experts"),
        pytest.param(REPLAYED, marks=pytest.mark.slow, id="replayed"),
    ],
)
async def test_a_mixture_survives_a_rank_that_is_killed_and_is_replayed(tmp_path: Path, mesh: str) -> None:
    trained = Trained(tmp_path, *MIXTURE, "run.steps=8", mesh)
    write_mixture(tmp_path / "mixture")
    trained.begin()
    assert (await trained.loses_a_rank())["steps"] == 8
    entries = await trained.entries()
    loads = [entry.metrics["train/expert_load_max"] for entry in entries]
    assert len(loads) >= 8 and all(1 <= load <= 4 for load in loads)
    replayed = [entry.metrics.get("train/routing_replayed", 0.0) for entry in entries if entry.source == "main"]
    assert all(replayed) if mesh == REPLAYED else not any(replayed)


@pytest.mark.soak
async def test_each_stretch_of_a_mixture_is_replayed_by_its_own_backend(tmp_path: Path) -> None:
    """Checkpoints of a mixture that another backend goes on with: tests/trainers/megatron/test_meshes.py."""
    trained = Trained(tmp_path, *MIXTURE)
    write_mixture(tmp_path / "mixture")
    for steps, mesh in ((2, SHARDS), (4, EXPERTS), (6, "trainer.ranks=1")):
        await trained.up(f"run.steps={steps}", mesh)
    await trained.has_stretches((TrainedOn(ranks=2, shards=2), TrainedOn(ranks=2, backend="megatron", tensor=1, experts=2), TrainedOn()))


@pytest.mark.parametrize("asked", ["trainer.routing_replay=true", "loss.experts.z_coef=0.001"])
async def test_what_is_for_mixtures_is_refused_with_a_dense_model_before_anything_starts(tmp_path: Path, asked: str) -> None:
    trained = Trained(tmp_path)
    trained.run.model_dir.mkdir(parents=True)
    (trained.run.model_dir / "config.json").write_text('{"model_type": "qwen3"}')
    with raises(ConfigError, key=asked.partition("=")[0], got="qwen3"):
        await prepare(load(tmp_path / "run.toml", [asked]), trained.run)
