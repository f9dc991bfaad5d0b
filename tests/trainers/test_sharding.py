"""A model cut into parts: the same digests and, within a bound, the same training in every mesh. Rank 0 is this process."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from streamrl.config.loss import KLConfig, LossConfig
from streamrl.schemas.versions import Version
from streamrl.tensors.digest import combine, tensor_digest
from streamrl.trainers.factory import make_trainer
from streamrl.trainers.ranks.local import open_trainer
from streamrl.trainers.torch.checkpoint import host_bytes
from tests.support.meshes import (
    HALF,
    STEPS,
    Mesh,
    Runs,
    batch,
    check_mesh,
    config,
    goes_on,
    in_float64,
    killed_in_a_step,
    parameters,
    run,
    runs,
    same,
    slow,
    soak,
)
from tests.support.preloaded import Preloaded
from tests.support.trainers import Models

# Five meshes, one of them of four processes, on however few cores there are.
pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
ONE: Mesh = {"ranks": 1}
PARTS: Mesh = {"ranks": 2, "shards": 2, "gather": "micro_batch"}
COPIES: Mesh = {"ranks": 4, "shards": 2, "gather": "micro_batch"}
THREE: Mesh = {"ranks": 3, "shards": 3, "gather": "step"}
"""With how long layers stay gathered. Of 16 rows the third of three parts has fewer."""


@pytest.fixture(scope="module")
def ran(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return runs(lambda mesh: config(**mesh), model_dir, tmp_path_factory)


@pytest.fixture(scope="module")
def truth(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return parameters(run(in_float64(config(), model_dir), tmp_path_factory.mktemp("truth")).checkpoint)


@pytest.mark.parametrize("mesh", [PARTS, slow(COPIES), slow(THREE), soak({"ranks": 2})], ids=str)
def test_a_mesh_has_the_digests_of_one_rank_and_ends_as_near_to_it_as_that_to_float64(
    ran: Runs, truth: dict[str, torch.Tensor], mesh: Mesh, model_dir: Path
) -> None:
    check_mesh(ran(mesh), ran(ONE), truth, make_trainer(config(), model_dir), model_dir)


@pytest.mark.parametrize("mesh", [slow(COPIES), soak(THREE)], ids=str)
def test_on_one_mesh_a_restart_and_a_replay_give_the_same_bits(ran: Runs, mesh: Mesh, model_dir: Path) -> None:
    with open_trainer(config(**mesh), model_dir) as trainer:
        assert [trainer.step(batch(step)).digest for step in range(2)] == ran(mesh).digests[:2]
        goes_on(trainer, ran(mesh).half, ran(mesh))


@pytest.mark.slow
def test_another_mesh_goes_on_with_masters_and_moments(ran: Runs, model_dir: Path, tmp_path: Path) -> None:
    """From a checkpoint of two copies of two parts, on three parts, and back: what is not trained comes out as it went in."""
    made = ran(COPIES)
    with open_trainer(config(ranks=3, shards=3), model_dir) as trainer:
        assert trainer.load(made.half) == b"at"
        assert trainer.digest() == made.digests[HALF - 1]
        trainer.save(tmp_path / "at", b"at", version=Version(0, HALF)).result()
        norms = [trainer.step(batch(step)).metrics["train/grad_norm"] for step in range(HALF, STEPS)]
    assert norms == pytest.approx(made.norms[HALF:], rel=1e-3)
    assert same(made.half, tmp_path / "at", "model", "optimizer")


@pytest.mark.slow
def test_critic_and_renewed_reference_are_cut_too_in_bfloat16(model_dir: Path, tmp_path: Path) -> None:
    """With a policy that is scored again by older versions, for which its parts are written over for a moment."""
    loss = LossConfig(advantage="ppo", kl=KLConfig(loss_coef=0.1, reference_every=2))
    results: dict[int, list[tuple[str, dict[str, float]]]] = {}
    for shards in (1, 2):
        asked = config(loss, ranks=2, shards=shards, dtype="bfloat16", check_logprobs=2)
        with open_trainer(asked, model_dir) as trainer:
            stepped = [trainer.step(batch(step)) for step in range(5)]
            results[shards] = [(result.reference, result.metrics) for result in stepped]
            trainer.save(tmp_path / f"{shards}", b"", version=Version(0, 5)).result()
            trainer.export(tmp_path / f"hf-{shards}")
            assert {shard.dtype for shard in trainer.shards()} == {"bfloat16"}
            digest = trainer.digest()
        with open_trainer(config(loss, ranks=2, shards=2, dtype="bfloat16"), model_dir) as other:
            other.load(tmp_path / f"{shards}")
            assert other.digest() == digest
        assert make_trainer(config(dtype="bfloat16"), tmp_path / f"hf-{shards}").digest() == digest
    files = ("model", "optimizer", "critic", "critic_optimizer", "reference")
    for file in files:
        whole, parts = (parameters(tmp_path / f"{shards}", file) for shards in (1, 2))
        assert {name: (value.shape, value.dtype) for name, value in whole.items()} == {
            name: (value.shape, value.dtype) for name, value in parts.items()
        }
    for (reference, metrics), (other, others) in zip(results[1], results[2], strict=True):
        assert bool(reference) and bool(other)
        for name in ("train/loss", "train/value_loss", "train/grad_norm", "train/value_grad_norm", "train/kl_loss"):
            assert others[name] == pytest.approx(metrics[name], rel=0.05, abs=1e-2), name
        found = {name for name in metrics if not name.startswith("train/float32_")}
        assert found == set(others)


def test_no_thread_of_the_ranks_is_left_when_they_have_parted(model_dir: Path) -> None:
    """One that was left aborted the process now and then when the interpreter was torn down."""

    def threads() -> set[str]:
        return {task.name for task in Path("/proc/self/task").iterdir() if "gloo" in (task / "comm").read_text()}

    before = threads()
    with open_trainer(config(**PARTS), model_dir) as trainer:
        trainer.step(batch(0))
        assert threads() > before
    assert threads() <= before


@pytest.mark.slow
def test_experts_are_published_by_the_names_of_checkpoints_whatever_holds_them(make_mixture: Models, tmp_path: Path) -> None:
    """Three experts in two parts: one has two of them whole, the other one."""
    directory = make_mixture(num_experts=3)
    saved = load_file(directory / "model.safetensors")
    alone = make_trainer(config(), directory)
    found = {shard.name: (shard.global_shape, shard.host().tobytes()) for shard in alone.shards()}
    assert found == {name: (tuple(value.shape), host_bytes(value).tobytes()) for name, value in saved.items()}
    assert alone.digest() == combine({name: tensor_digest(host_bytes(value), 4) for name, value in saved.items()})
    with open_trainer(config(**PARTS), directory) as trainer:
        assert trainer.digest() == alone.digest()
        held = {shard.name: shard.shape[0] for shard in trainer.shards()}
        assert held.keys() == saved.keys()
        assert [held[f"model.layers.0.mlp.experts.{expert}.up_proj.weight"] for expert in range(3)] == [16, 16, 0]
        for step in range(2):
            digest = trainer.step(batch(step)).digest
        trainer.save(tmp_path / "at", b"at", version=Version(0, 2)).result()
        trainer.export(tmp_path / "exported")
    assert alone.load(tmp_path / "at") == b"at"
    assert alone.digest() == digest
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert {name: value.shape for name, value in exported.items()} == {name: value.shape for name, value in saved.items()}
    assert combine({name: tensor_digest(host_bytes(value), 4) for name, value in exported.items()}) == digest


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_a_step_of_a_cut_model(model_dir: Path, preloaded: Preloaded) -> None:
    killed_in_a_step(config(**PARTS), model_dir, preloaded)
