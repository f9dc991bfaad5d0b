"""A model cut into parts over GPUs: what NCCL and compiled layers make of it, beside one GPU.

`scripts/gpu/shards.sh` runs them and shows what was measured.
"""

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch._dynamo.utils import counters

from streamrl.config.tree import Config
from streamrl.models.tensor_files import host_bytes
from streamrl.schemas.versions import Version
from streamrl.trainers.factory import make_trainer
from streamrl.trainers.protocol import Trainer
from streamrl.trainers.ranks.local import open_trainer
from streamrl.trainers.torch.snapshot import SnapshotBytes
from streamrl.weights.manifest import shard_digests
from tests.support import trainers
from tests.support.gpus import LONG
from tests.support.measured import say
from tests.support.meshes import BOUND, STEPS, Ran, apart, batch, in_float64, parameters, run
from tests.support.needs import need
from tests.support.steps import LEARNED, check_alike
from tests.support.trainers import DIRECT, Models

pytestmark = [pytest.mark.gpu, pytest.mark.process, pytest.mark.timeout(400)]


def config(ranks: int, shards: int, **settings: Any) -> Config:
    return trainers.config(DIRECT, ranks=ranks, shards=shards, device="cuda", rank_timeout_s=120.0, **settings)


def exact(ranks: int, shards: int, **trainer: Any) -> Config:
    """In float32, with several micro-batches a rank, and unequally many."""
    return config(ranks, shards, dtype="float32", micro_tokens=48, minibatches=2, **trainer)


def check_published(trainer: Trainer, checkpoint: Path) -> None:
    """Rank 0 publishes its rows of what it has saved, and digests them as their part of the whole."""
    saved = parameters(checkpoint)
    shards = list(trainer.shards())
    assert {shard.name for shard in shards} == saved.keys()
    first = shards[0].data
    assert isinstance(first, SnapshotBytes) and first.snapshot._known is not None, "a rank's part waits for its copy"
    for shard in shards:
        whole = host_bytes(saved[shard.name])
        item = saved[shard.name].element_size()
        first = (shard.offset[0] if shard.offset else 0) * math.prod(shard.global_shape[1:]) * item
        assert shard.host().tobytes() == whole[first : first + shard.data.nbytes].tobytes(), shard.name
        on_device, _ = shard_digests(shard, item)
        assert on_device == shard_digests(msgspec.structs.replace(shard, data=shard.host()), item)[0]


@pytest.fixture(scope="module")
def of_one_gpu(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return run(make_trainer(exact(1, 1), model_dir), tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def rounding(of_one_gpu: Ran, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> float:
    """How far one GPU ends from a run in float64."""
    truth = run(in_float64(exact(1, 1), model_dir), tmp_path_factory.mktemp("exact"))
    far = apart(parameters(of_one_gpu.checkpoint), parameters(truth.checkpoint))
    moved = apart(parameters(truth.checkpoint), parameters(model_dir))
    assert 0 < far < 1e-3 * moved
    say(f"float32, {STEPS} steps: one GPU is {far:.1e} away from float64, parameters moved by {moved:.1e}")
    return far


@pytest.mark.parametrize(("ranks", "shards", "gather"), [(2, 1, "auto"), (2, 2, "step"), (2, 2, "micro_batch"), (4, 2, "micro_batch")])
def test_a_mesh_of_gpus_ends_as_near_to_one_as_that_to_float64(
    of_one_gpu: Ran, rounding: float, model_dir: Path, tmp_path: Path, ranks: int, shards: int, gather: str
) -> None:
    need("two gpus")
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    with open_trainer(exact(ranks, shards, gather=gather), model_dir) as trainer:
        made = run(trainer, tmp_path)
        check_published(trainer, made.checkpoint)
    assert made.begun == of_one_gpu.begun
    alone = make_trainer(exact(1, 1), model_dir)
    alone.load(made.checkpoint)
    assert alone.digest() == made.digests[-1], "the same parameters, and another mesh"
    distance = apart(parameters(made.checkpoint), parameters(of_one_gpu.checkpoint))
    say(f"float32, {ranks} GPUs, {shards} parts, gather = {gather}: {distance:.1e} away from one GPU, bound {BOUND * rounding:.1e}")
    assert distance <= BOUND * rounding
    assert made.norms == pytest.approx(of_one_gpu.norms, rel=1e-3)


@pytest.mark.parametrize("gather", ["step", "micro_batch"])
def test_packed_and_compiled_in_bfloat16_a_mesh_learns_what_one_gpu_does(make_model: Models, tmp_path: Path, gather: str) -> None:
    need("two gpus")
    directory = make_model("bfloat16", **LONG)
    asked = {"dtype": "bfloat16", "compile": "on", "micro_tokens": 64, "activations": 1, "minibatches": 2}
    torch.compiler.reset()
    alone = make_trainer(config(1, 1, **asked), directory)
    expected = [alone.step(batch(step)) for step in range(4)]
    torch.compiler.reset()
    with open_trainer(config(2, 2, gather=gather, **asked), directory) as trainer:
        graphs = counters["stats"]["unique_graphs"]
        assert graphs > 0
        found = [trainer.step(batch(step)) for step in range(4)]
        assert counters["stats"]["unique_graphs"] == graphs
        trainer.save(tmp_path / "at", b"", version=Version(0, 4)).result()
        check_published(trainer, tmp_path / "at")
    check_alike(found, expected, *LEARNED, rel=5e-2, abs=5e-3)
    for choices in (ours.choices for ours in found):
        assert choices is not None and choices.compiled and (choices.attention, choices.kept_layers) == ("packed", 1)


@pytest.mark.parametrize(("gather", "compile_"), [("step", "off"), ("micro_batch", "off"), ("micro_batch", "on")])
def test_on_one_mesh_a_restart_and_a_replay_give_the_same_bits(make_model: Models, tmp_path: Path, gather: str, compile_: str) -> None:
    """Of `numerics = "bitwise"`, with checkpoints of masters and moments of parts."""
    need("two gpus")
    directory = make_model("bfloat16", **LONG)
    asked = config(2, 2, numerics="bitwise", dtype="bfloat16", gather=gather, compile=compile_, micro_tokens=64, minibatches=2)
    with open_trainer(asked, directory) as trainer:
        first = [trainer.step(batch(step)).digest for step in range(2)]
        saved = trainer.save(tmp_path / "at", b"at", version=Version(0, 2))
        second = [trainer.step(batch(step)).digest for step in (2, 3)]
        saved.result()
    with open_trainer(asked, directory) as trainer:
        assert [trainer.step(batch(step)).digest for step in range(2)] == first
        assert trainer.load(tmp_path / "at") == b"at"
        assert [trainer.step(batch(step)).digest for step in (2, 3)] == second


def test_activations_are_reckoned_with_parts(make_model: Models) -> None:
    need("two gpus")
    directory = make_model("bfloat16", **LONG)
    with open_trainer(config(2, 2, dtype="bfloat16", micro_tokens=1024), directory) as trainer:
        result = trainer.step(batch(0))
    assert any("2 of 2 layers" in notice for notice in result.notices), result.notices
