"""`streamrl up` with a critic on two ranks of megatron-core: one is killed, the run goes on, also by the other backend, and is replayed."""

from pathlib import Path

import pytest

from streamrl.schemas.ledger import TrainedOn
from tests.ranks.trained import PIPELINE, SHORT, TENSOR, Trained

pytestmark = [pytest.mark.nats, pytest.mark.timeout(600)]
LOSS = "loss.advantage=ppo loss.gae_lambda=0.95 loss.critic.learning_rate=1e-3 loss.critic.only_steps=1"
CRITIC = (*SHORT, "model.layers=2", "trainer.checkpoint_every=2", LOSS)


async def check_taught(trained: Trained) -> None:
    """The critic was, in each step of reinforcement learning, and the policy from the second one on."""
    taught = [entry for entry in await trained.entries() if entry.source == "main"]
    norms = [entry.metrics["train/value_norm"] for entry in taught]
    assert len(norms) == len(set(norms))
    assert [entry.metrics["train/lr"] > 0 for entry in taught] == [number > 0 for number in range(len(taught))]


@pytest.mark.parametrize("mesh", [pytest.param(PIPELINE, marks=pytest.mark.slow), pytest.param(TENSOR, marks=pytest.mark.soak)])
async def test_a_critic_survives_a_rank_that_is_killed_and_is_replayed(tmp_path: Path, mesh: str) -> None:
    trained = Trained(tmp_path, *CRITIC, "run.steps=8", mesh)
    trained.begin()
    assert (await trained.loses_a_rank(checkpoints=3))["steps"] == 8
    await check_taught(trained)


@pytest.mark.soak
async def test_a_critic_goes_on_by_each_backend_and_each_stretch_is_replayed_by_its_own(tmp_path: Path) -> None:
    """Checkpoints of a critic that another backend goes on with: tests/trainers/megatron/test_critic.py."""
    trained = Trained(tmp_path, *CRITIC)
    for steps, mesh in ((4, PIPELINE), (6, "trainer.ranks=1"), (8, TENSOR), (10, "trainer.shards=2")):
        await trained.up(f"run.steps={steps}", mesh)
    await check_taught(trained)
    stages, tensor = TrainedOn(ranks=2, backend="megatron", tensor=1, pipeline=2), TrainedOn(ranks=2, backend="megatron", tensor=2)
    await trained.has_stretches((stages, TrainedOn(), tensor, TrainedOn(ranks=2, shards=2)), idle=1)
