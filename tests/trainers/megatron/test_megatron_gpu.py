"""megatron-core on GPUs, over NCCL, beside the torch backend on one: tensor ranks, stages, replicas and shared rows, experts over ranks.

`scripts/gpu/megatron.sh` runs them.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamrl.config.loss import CriticConfig
from streamrl.config.tree import Config, LossConfig
from streamrl.schemas.versions import Version
from streamrl.trainers.factory import make_trainer
from streamrl.trainers.ranks.local import open_trainer
from tests.support import trainers
from tests.support.gpus import SMALL
from tests.support.meshes import BOUND, STEPS, Mesh, apart, batch, in_float64, parameters, run
from tests.support.needs import need
from tests.support.steps import LEARNED, check_alike, stepped
from tests.support.trainers import DIRECT, Models

# As the trainer's process does before torch begins.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

pytestmark = [pytest.mark.gpu, pytest.mark.process, pytest.mark.timeout(400)]
MESHES: list[Mesh] = [{"ranks": 1}, {"ranks": 2}, *({"ranks": 2, key: 2} for key in ("tensor", "pipeline", "context", "experts"))]
NAMES = ["alone", "replicas", "tensor", "pipeline", "context", "experts"]


def config(backend: Any, *, loss: LossConfig = DIRECT, **settings: Any) -> Config:
    return trainers.config(loss, **{"backend": backend, "minibatches": 2, "device": "cuda", "rank_timeout_s": 120.0, **settings})


@pytest.fixture
def model(make_model: Models, make_mixture: Models, mesh: Mesh) -> Callable[[str], Path]:
    """`model(dtype)`: a dense one, or a mixture where experts are divided."""

    def made(dtype: str) -> Path:
        return (make_mixture if "experts" in mesh else make_model)(dtype, **SMALL, num_key_value_heads=2)

    return made


@pytest.mark.parametrize("mesh", MESHES, ids=NAMES)
def test_its_ranks_end_as_near_to_one_as_that_to_float64(model: Callable[[str], Path], mesh: Mesh, tmp_path: Path) -> None:
    if mesh["ranks"] > 1:
        need("two gpus")
    directory, exact = model("float32"), {"dtype": "float32", "micro_tokens": 48}
    one = run(make_trainer(config("torch", **exact), directory), tmp_path / "one")
    truth = run(in_float64(config("torch", **exact), directory), tmp_path / "exact")
    bound = BOUND * apart(parameters(one.checkpoint), parameters(truth.checkpoint))
    with open_trainer(config("megatron", **mesh, **exact), directory) as trainer:
        made = run(trainer, tmp_path / "two")
        trainer.export(tmp_path / "hf")
        published = {shard.name: shard for shard in trainer.shards()}
    assert made.begun == one.begun
    alone = make_trainer(config("torch", **exact), directory)
    assert alone.load(made.checkpoint) == b"at"
    assert alone.digest() == made.digests[-1], "the same parameters, and another backend"
    distance = apart(parameters(made.checkpoint), parameters(one.checkpoint))
    print(f"\n[measured] {mesh}, {STEPS} steps: {distance:.1e} away from one GPU, bound {2 * bound:.1e}", flush=True)
    assert 0 < distance <= 2 * bound
    exported = parameters(tmp_path / "hf")
    assert published.keys() == exported.keys()
    for name, shard in published.items():  # of rank 0
        first, *rest = shard.offset or (0,)
        rows = exported[name][first : first + shard.shape[0]]
        assert not any(rest) and rows.contiguous().numpy().tobytes() == shard.host().tobytes(), name


CRITIC = LossConfig(advantage="ppo", critic=CriticConfig(learning_rate=1e-3))
VALUES = ("rollout/values", *(f"train/value_{what}" for what in ("loss", "grad_norm", "norm")))


@pytest.mark.parametrize("mesh", MESHES, ids=NAMES)
@pytest.mark.parametrize(
    ("dtype", "loss", "names", "rel", "least"),
    [("bfloat16", DIRECT, LEARNED, 5e-2, 5e-3), ("float32", CRITIC, VALUES, 1e-2, 1e-3)],
    ids=["policy", "critic"],
)
def test_it_learns_what_torch_does_and_a_restart_gives_the_same_bits(
    model: Callable[[str], Path], mesh: Mesh, tmp_path: Path, dtype: str, loss: LossConfig, names: tuple[str, ...], rel: float, least: float
) -> None:
    if mesh["ranks"] > 1:
        need("two gpus")
    directory = model(dtype)
    asked: dict[str, Any] = {"dtype": dtype, "micro_tokens": 64, "numerics": "bitwise", "loss": loss}
    expected = stepped(config("torch", **asked), directory, range(4))
    with open_trainer(config("megatron", **mesh, **asked), directory) as trainer:
        found = [trainer.step(batch(step)) for step in range(2)]
        trainer.save(tmp_path / "at", b"at", version=Version(0, 2)).result()
        found += [trainer.step(batch(step)) for step in (2, 3)]
    check_alike(found, expected, *names, rel=rel, abs=least)
    with open_trainer(config("megatron", **mesh, **asked), directory) as trainer:
        assert trainer.load(tmp_path / "at") == b"at"
        again = [trainer.step(batch(step)) for step in (2, 3)]
    assert [one.digest for one in again] == [one.digest for one in found[2:]]
    if loss is CRITIC:
        assert [one.metrics for one in again] == [one.metrics for one in found[2:]]
    else:
        assert all(one.choices is not None and one.choices.attention == "packed" for one in found)
