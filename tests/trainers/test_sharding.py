"""A model cut into parts: the same digests and, within a bound, the same training in every mesh. Rank 0 is this process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from streamrl.config.loss import KLConfig, LossConfig
from streamrl.config.tree import Config, OptimizerConfig, TrainerConfig
from streamrl.schemas.versions import Version
from streamrl.tensors.digest import combine, tensor_digest
from streamrl.trainers.factory import make_trainer
from streamrl.trainers.ranks.local import open_trainer
from streamrl.trainers.torch.checkpoint import host_bytes
from tests.support.meshes import BOUND, STEPS, Ran, apart, batch, in_float64, killed_in_a_step, parameters, run, slow, soak
from tests.support.preloaded import Preloaded
from tests.support.trainers import Models

# Five meshes, one of them of four processes, on however few cores there are.
pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
MESHES = {(1, 1): "auto", (2, 1): "auto", (2, 2): "micro_batch", (4, 2): "micro_batch", (3, 3): "step"}
"""Ranks and shards, and how long layers stay gathered. Of 16 rows the third of three parts has fewer."""


def config(ranks: int, shards: int, **changes: object) -> Config:
    # Few tokens a pass, so that ranks have several micro-batches, and unequally many.
    options = {"optimizer": OptimizerConfig(learning_rate=1e-3), "micro_tokens": 48, "minibatches": 2, "rank_timeout_s": 120.0, **changes}
    return Config(trainer=TrainerConfig(ranks=ranks, shards=shards, **options))  # pyright: ignore[reportArgumentType]


Runs = Callable[[tuple[int, int]], Ran]


@pytest.fixture(scope="module")
def ran(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """`ran(mesh)`: a run on it, made once."""

    @cache
    def made(mesh: tuple[int, int]) -> Ran:
        with open_trainer(config(*mesh, gather=MESHES[mesh]), model_dir) as trainer:
            return run(trainer, tmp_path_factory.mktemp("run"))

    return made


@pytest.fixture(scope="module")
def truth(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return parameters(run(in_float64(config(1, 1), model_dir), tmp_path_factory.mktemp("truth")).checkpoint)


@pytest.mark.parametrize("mesh", [(2, 2), slow((4, 2)), slow((3, 3)), soak((2, 1))], ids=str)
def test_a_mesh_has_the_digests_of_one_rank_and_ends_as_near_to_it_as_that_to_float64(
    ran: Runs, truth: dict[str, torch.Tensor], mesh: tuple[int, int], model_dir: Path
) -> None:
    one, made = ran((1, 1)), ran(mesh)
    alone = make_trainer(config(1, 1), model_dir)
    assert made.begun == one.begun == alone.digest()
    assert alone.load(made.checkpoint) == b"at"
    assert alone.digest() == made.digests[-1]
    far = apart(parameters(one.checkpoint), truth)
    assert 0 < far < 1e-3 * apart(truth, parameters(model_dir))  # else the bound would hold for anything
    assert 0 < apart(parameters(made.checkpoint), parameters(one.checkpoint)) <= BOUND * far
    assert made.norms == pytest.approx(one.norms, rel=1e-3)


@pytest.mark.parametrize("mesh", [slow((4, 2)), soak((3, 3))], ids=str)
def test_on_one_mesh_a_restart_and_a_replay_give_the_same_bits(ran: Runs, mesh: tuple[int, int], model_dir: Path) -> None:
    made, half = ran(mesh), STEPS // 2
    with open_trainer(config(*mesh, gather=MESHES[mesh]), model_dir) as trainer:
        again = [trainer.step(batch(step)).digest for step in range(2)]
        assert again == made.digests[:2]
        assert trainer.load(made.half) == b"at"
        assert [trainer.step(batch(step)).digest for step in range(half, STEPS)] == made.digests[half:]


@pytest.mark.slow
def test_another_mesh_goes_on_with_masters_and_moments(ran: Runs, model_dir: Path, tmp_path: Path) -> None:
    """From a checkpoint of two copies of two parts, on three parts, and back: what is not trained comes out as it went in."""
    made = ran((4, 2))
    with open_trainer(config(3, 3), model_dir) as trainer:
        assert trainer.load(made.half) == b"at"
        assert trainer.digest() == made.digests[STEPS // 2 - 1]
        trainer.save(tmp_path / "at", b"at", version=Version(0, STEPS // 2)).result()
        norms = [trainer.step(batch(step)).metrics["train/grad_norm"] for step in range(STEPS // 2, STEPS)]
    assert norms == pytest.approx(made.norms[STEPS // 2 :], rel=1e-3)
    for file in ("model", "optimizer"):
        before, after = (parameters(path, file) for path in (made.half, tmp_path / "at"))
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_critic_and_renewed_reference_are_cut_too_in_bfloat16(model_dir: Path, tmp_path: Path) -> None:
    """With a policy that is scored again by older versions, for which its parts are written over for a moment."""
    loss = LossConfig(advantage="ppo", kl=KLConfig(loss_coef=0.1, reference_every=2))
    results: dict[int, list[tuple[str, dict[str, float]]]] = {}
    for shards in (1, 2):
        asked = config(2, shards, dtype="bfloat16", check_logprobs=2)
        with open_trainer(Config(trainer=asked.trainer, loss=loss), model_dir) as trainer:
            stepped = [trainer.step(batch(step)) for step in range(5)]
            results[shards] = [(result.reference, result.metrics) for result in stepped]
            trainer.save(tmp_path / f"{shards}", b"", version=Version(0, 5)).result()
            trainer.export(tmp_path / f"hf-{shards}")
            assert {shard.dtype for shard in trainer.shards()} == {"bfloat16"}
            digest = trainer.digest()
        with open_trainer(Config(trainer=config(2, 2, dtype="bfloat16").trainer, loss=loss), model_dir) as other:
            other.load(tmp_path / f"{shards}")
            assert other.digest() == digest
        assert make_trainer(config(1, 1, dtype="bfloat16"), tmp_path / f"hf-{shards}").digest() == digest
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
    with open_trainer(config(2, 2), model_dir) as trainer:
        trainer.step(batch(0))
        assert threads() > before
    assert threads() <= before


@pytest.mark.slow
def test_experts_are_published_by_the_names_of_checkpoints_whatever_holds_them(make_mixture: Models, tmp_path: Path) -> None:
    """Three experts in two parts: one has two of them whole, the other one."""
    directory = make_mixture(num_experts=3)
    saved = load_file(directory / "model.safetensors")
    alone = make_trainer(config(1, 1), directory)
    found = {shard.name: (shard.global_shape, shard.host().tobytes()) for shard in alone.shards()}
    assert found == {name: (tuple(value.shape), host_bytes(value).tobytes()) for name, value in saved.items()}
    assert alone.digest() == combine({name: tensor_digest(host_bytes(value), 4) for name, value in saved.items()})
    with open_trainer(config(2, 2), directory) as trainer:
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
    killed_in_a_step(config(2, 2), model_dir, preloaded)
