"""Models cut into parts and ranks that share packed rows, over gloo: the digests of one rank, and its training within a bound."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file

from streamrl.config.loss import CorrectionConfig, ExpertsConfig, KLConfig, LossConfig, RejectionConfig
from streamrl.config.tree import OptimizerConfig, TrainerConfig
from streamrl.core.batches import TrainBatch
from streamrl.errors import ConfigError, TrainingError
from streamrl.models.tensor_files import host_bytes
from streamrl.schemas.versions import Version
from streamrl.tensors.digest import combine, tensor_digest
from streamrl.tensors.mesh import mesh_of
from streamrl.trainers.factory import make_trainer
from streamrl.trainers.protocol import StepResult
from streamrl.trainers.ranks.local import open_trainer
from streamrl.trainers.torch.parallel import Parallel
from tests.support import meshes
from tests.support.batches import train_batch
from tests.support.compilers import COMPILES
from tests.support.errors import raises
from tests.support.meshes import STEPS, Mesh, Runs, batch, config, slow, soak
from tests.support.same_tensors import shapes
from tests.support.steps import check_alike, stepped
from tests.support.trainers import Models

# Meshes of up to four processes, on however few cores there are.
pytestmark = [pytest.mark.process, *COMPILES]
ONE: Mesh = {"ranks": 1}
PARTS: Mesh = {"ranks": 2, "shards": 2, "gather": "micro_batch"}
COPIES: Mesh = {"ranks": 4, "shards": 2, "gather": "micro_batch"}
THREE: Mesh = {"ranks": 3, "shards": 3, "gather": "step"}
"""With how long layers stay gathered. Of 16 rows the third of three parts has fewer."""


SHARED = [slow({"ranks": 4, "shards": 2, "context": 2}), soak({"ranks": 2, "context": 2}), soak({"ranks": 3, "shards": 3, "context": 3})]
"""Two copies in two parts for two rows, two ranks with the whole model each, one row over three parts."""


@pytest.fixture(scope="module")
def ran(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return meshes.runs(lambda mesh: config(**mesh), model_dir, tmp_path_factory)


@pytest.fixture(scope="module")
def truth(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return meshes.parameters(meshes.run(meshes.in_float64(config(), model_dir), tmp_path_factory.mktemp("truth")).checkpoint)


@pytest.mark.parametrize("mesh", [PARTS, slow(COPIES), slow(THREE), soak({"ranks": 2}), *SHARED], ids=str)
def test_a_mesh_ends_as_near_to_one_rank_as_that_to_float64(ran: Runs, truth: dict[str, torch.Tensor], mesh: Mesh, model_dir: Path) -> None:
    meshes.check_mesh(ran(mesh), ran(ONE), truth, make_trainer(config(), model_dir), model_dir)


@pytest.mark.parametrize("mesh", [slow(COPIES), soak(THREE), *SHARED], ids=str)
def test_on_one_mesh_a_restart_and_a_replay_give_the_same_bits(ran: Runs, mesh: Mesh, model_dir: Path) -> None:
    made = ran(mesh)  # before the other one begins: a process leads one group of ranks at a time
    with open_trainer(config(**mesh), model_dir) as trainer:
        assert [trainer.step(batch(step)).digest for step in range(2)] == made.digests[:2]
        meshes.goes_on(trainer, made.half, made)


@pytest.mark.slow
def test_another_mesh_goes_on_with_masters_and_moments(ran: Runs, model_dir: Path, tmp_path: Path) -> None:
    """From a checkpoint of two copies of two parts, on three parts, and back: what is not trained comes out as it went in."""
    made = ran(COPIES)
    with open_trainer(config(ranks=3, shards=3), model_dir) as trainer:
        assert trainer.load(made.half) == b"at"
        assert trainer.digest() == made.digests[meshes.HALF - 1]
        trainer.save(tmp_path / "at", b"at", version=Version(0, meshes.HALF)).result()
        norms = [trainer.step(batch(step)).metrics["train/grad_norm"] for step in range(meshes.HALF, STEPS)]
    assert norms == pytest.approx(made.norms[meshes.HALF :], rel=1e-3)
    assert meshes.same(made.half, tmp_path / "at", "model", "optimizer")


@pytest.mark.slow
def test_critic_and_renewed_reference_are_cut_too_in_bfloat16(model_dir: Path, tmp_path: Path) -> None:
    """With a policy that is scored again by older versions, for which its parts are written over for a moment."""
    loss = LossConfig(advantage="ppo", kl=KLConfig(loss_coef=0.1, reference_every=2))
    results: dict[int, list[StepResult]] = {}
    for shards in (1, 2):
        asked = config(loss, ranks=2, shards=shards, dtype="bfloat16", check_logprobs=2)
        with open_trainer(asked, model_dir) as trainer:
            results[shards] = [trainer.step(batch(step)) for step in range(5)]
            trainer.save(tmp_path / f"{shards}", b"", version=Version(0, 5)).result()
            trainer.export(tmp_path / f"hf-{shards}")
            assert {shard.dtype for shard in trainer.shards()} == {"bfloat16"}
            digest = trainer.digest()
        with open_trainer(config(loss, ranks=2, shards=2, dtype="bfloat16"), model_dir) as other:
            other.load(tmp_path / f"{shards}")
            assert other.digest() == digest
        assert make_trainer(config(dtype="bfloat16"), tmp_path / f"hf-{shards}").digest() == digest
    for file in ("model", "optimizer", "critic", "critic_optimizer", "reference"):
        whole, parts = (shapes(meshes.parameters(tmp_path / f"{shards}", file)) for shards in (1, 2))
        assert whole == parts
    names = ("train/loss", "train/value_loss", "train/grad_norm", "train/value_grad_norm", "train/kl_loss")
    check_alike(results[2], results[1], *names, rel=0.05, abs=1e-2)
    for one, other in zip(results[1], results[2], strict=True):
        assert one.reference and other.reference
        assert {name for name in one.metrics if not name.startswith("train/float32_")} == set(other.metrics)


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
    assert shapes(exported) == shapes(saved)
    assert combine({name: tensor_digest(host_bytes(value), 4) for name, value in exported.items()}) == digest


LOSSES = {
    "default": LossConfig(),
    "sequences": LossConfig(
        advantage="ppo",
        policy="gspo",
        whiten="on",
        top_entropy=0.5,
        entropy_coef=0.01,
        gae_lambda=0.9,
        kl=KLConfig(loss_coef=0.1, estimator="k3"),
        correction=CorrectionConfig(
            level="sequence", high=5.0, normalize=True, reject=(RejectionConfig(measure="k3", level="sequence_mean", high=0.5),)
        ),
    ),
    "chosen": LossConfig(policy="m2po", m2po_bound=0.01, top_entropy=0.5, reduction="token_mean", correction=CorrectionConfig(kind="none")),
}


SHARING = {"ranks": 2, "shards": 2, "context": 2, "check_logprobs": 2, "activations": 1}
AS_ONE = [{"ranks": 2, "shards": 2}, *map(slow, ({"ranks": 2}, {"ranks": 4, "shards": 2}, SHARING))]


@pytest.mark.parametrize("mesh", AS_ONE, ids=str)
def test_gradients_of_every_loss_are_those_of_one_rank(model_dir: Path, tmp_path: Path, mesh: Mesh) -> None:
    """Of demonstrations, of a batch, of its scores again, and of one group, which leaves ranks without work."""
    batches = [replace(batch(0), kind="sft"), batch(0), batch(1), batch(2)]
    optimizer = OptimizerConfig(clip_norm=0.0, ess_scaling="sqrt")
    for name, loss in LOSSES.items():
        found = []
        for asked in ({**mesh, "ranks": 1, "shards": 1, "context": 1}, mesh):
            where = tmp_path / name / str(len(found))
            with open_trainer(config(loss, **asked, gradient_cosine=True, optimizer=optimizer, micro_tokens=512), model_dir) as trainer:
                results = [trainer.step(one) for one in batches[:2]]
                trainer.save(where, b"extra", version=Version(0, 2)).result()
                assert trainer.load(where) == b"extra"
                found.append((results + [trainer.step(one) for one in batches[2:]], where))
        (alone, one), (together, two) = found
        check_alike(together, alone, rel=1e-3, abs=1e-4)
        for ours, theirs in zip(together, alone, strict=True):
            if theirs.tokens is not None:
                assert ours.tokens is not None
                assert ours.tokens.logprobs == pytest.approx(theirs.tokens.logprobs, abs=1e-5, nan_ok=True)
        # After two steps of a stage Adam's first moment is a mean of two gradients.
        for stem in {"default": ["optimizer"], "sequences": ["optimizer", "critic_optimizer"]}.get(name, []):
            moments, others = (
                {key: value for key, value in meshes.parameters(path, stem).items() if key.endswith("exp_avg")} for path in (one, two)
            )
            assert moments.keys() == others.keys() and max(float(value.abs().max()) for value in moments.values()) > 1e-2
            assert all(torch.allclose(value, others[key], rtol=1e-3, atol=1e-5) for key, value in moments.items())


def test_more_ranks_without_a_process_group_are_refused() -> None:
    with raises(TrainingError, expected=2, got=1):
        Parallel(mesh_of(TrainerConfig(ranks=2)), torch.device("cpu"))


def long_batch() -> TrainBatch:
    """Four samples of 512 tokens, of two groups; a fourth of each is predicted, anywhere in it."""
    rng = np.random.default_rng(0)
    samples = [
        {
            "prompt": rng.integers(2, 16, 2).tolist(),
            "answer": rng.integers(2, 16, 510).tolist(),
            "mask": (mask := rng.random(510) < 0.25).tolist(),
            "mu": np.where(mask, -3 + 0.5 * rng.standard_normal(510), 0).tolist(),
            "reward": float(index % 2),
            "task": index // 2,
            "rollout": index % 2,
        }
        for index in range(4)
    ]
    return train_batch(samples)


@pytest.mark.parametrize("rows", [512, slow(2048)])
def test_log_probs_and_gradient_of_long_samples_are_those_of_one_rank(make_model: Models, tmp_path: Path, rows: int) -> None:
    """A row of one sample, over which the ranks' work is exactly equal, and one of four, where a chunk is half a sample."""
    directory = make_model(max_position_embeddings=1024)
    given = long_batch()
    # A rate of 0 leaves the parameters; after one step Adam's first moment is the gradient, not clipped, times 1 - beta1.
    changes: dict[str, Any] = {"minibatches": 1, "micro_tokens": rows, "optimizer": OptimizerConfig(learning_rate=1e-3, clip_norm=0.0)}
    exact, alone = meshes.in_float64(config(**changes), directory), make_trainer(config(attention="packed", **changes), directory)
    first: dict[str, StepResult] = {}
    for name, trainer in (("exact", exact), ("alone", alone)):
        first[name] = trainer.step(given)
        trainer.save(tmp_path / name, b"", version=Version(0, 1)).result()
    with open_trainer(config(ranks=2, context=2, **changes), directory) as trainer:
        first["shared"] = trainer.step(given)
        trainer.save(tmp_path / "shared", b"", version=Version(0, 1)).result()
        second = trainer.step(replace(given, stage_step=1, version=Version(0, 1)))
    assert np.isfinite(second.metrics["train/loss"])
    assert first["shared"].choices is not None and first["shared"].choices.row_length == rows
    values: dict[str, Any] = {name: result.tokens for name, result in first.items()}
    logprobs = {name: found.logprobs for name, found in values.items()}
    far = np.abs(logprobs["alone"] - logprobs["exact"]).max()
    assert 0 < far < 1e-4
    assert np.abs(logprobs["shared"] - logprobs["exact"]).max() <= meshes.BOUND * far
    moments = {name: meshes.parameters(tmp_path / name, "optimizer") for name in first}
    gradient = {name: {key: value for key, value in found.items() if not key.endswith(".master")} for name, found in moments.items()}
    far = meshes.apart(gradient["alone"], gradient["exact"])
    assert far > 0
    assert meshes.apart(gradient["shared"], gradient["exact"]) <= meshes.BOUND * far
    assert first["shared"].metrics == pytest.approx(first["alone"].metrics, rel=1e-3, abs=1e-4)


@pytest.mark.soak
def test_layers_are_compiled_where_rows_are_shared(model_dir: Path) -> None:
    """On GPUs: test_context_gpu.py."""
    asked = {"compile": "on", "attention": "packed", "activations": 1}
    alone, shared = (stepped(config(ranks=count, context=count, **asked), model_dir, range(2)) for count in (1, 2))
    assert all(result.choices is not None and result.choices.compiled for result in (*alone, *shared))
    check_alike(shared, alone, "train/grad_norm", rel=1e-3)


@pytest.mark.parametrize("which", ["policy", "reference"])
def test_a_model_with_sliding_windows_is_refused(model_dir: Path, make_model: Models, which: str) -> None:
    """A reference is scored on the rows that ranks share, as the policy is."""
    windows = make_model(use_sliding_window=True, sliding_window=8, max_window_layers=1)
    kl = KLConfig(loss_coef=0.1, reference=str(windows)) if which == "reference" else KLConfig()
    asked = config(LossConfig(kl=kl), ranks=2, context=2)
    with raises(ConfigError, key="trainer.context"), open_trainer(asked, windows if which == "policy" else model_dir):
        pass


@pytest.mark.slow
def test_the_load_of_experts_is_of_all_tokens(make_mixture: Models) -> None:
    directory, loss = make_mixture(), LossConfig(experts=ExpertsConfig(balance_coef=0.1, z_coef=0.01))
    asked = (config(loss, ranks=count, context=count, attention="packed") for count in (1, 2))
    alone, shared = (stepped(one, directory, [0]) for one in asked)
    assert any("expert" in name for name in alone[0].metrics)
    check_alike(shared, alone, rel=2e-3, abs=1e-4)
