"""Stages of layers on ranks of their own: one digest, the same training within a bound, checkpoints that other meshes go on with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file

from streamrl.config.tree import Config, LossConfig, OptimizerConfig, TrainerConfig
from streamrl.errors import ConfigError
from streamrl.schemas.versions import Version
from streamrl.trainers.factory import make_trainer
from streamrl.trainers.ranks.local import open_trainer
from tests.support.digests import digest_of
from tests.support.errors import raises
from tests.support.meshes import STEPS, Ran, apart, batch, check_run, in_float64, killed_in_a_step, parameters, run, slow, soak
from tests.support.preloaded import Preloaded
from tests.support.trainers import Models

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
TIED, UNTIED = "tied", "untied"
BOTH = (4, 2, 2)
MESHES = [slow(TIED, BOTH), soak(UNTIED, (2, 1, 2)), *(soak(TIED, mesh) for mesh in ((2, 1, 2), (4, 1, 4), (4, 1, 2)))]
"""Ranks, tensor and pipeline: two stages of two tensor ranks each, two stages, four, two with a replica."""


def config(ranks: int, tensor: int, pipeline: int, backend: str = "megatron", **changes: object) -> Config:
    options = {"optimizer": OptimizerConfig(learning_rate=1e-3), "micro_tokens": 48, "minibatches": 2, "rank_timeout_s": 120.0, **changes}
    return Config(trainer=TrainerConfig(backend=backend, ranks=ranks, tensor=tensor, pipeline=pipeline, **options))  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="module")
def initial(request: pytest.FixtureRequest, make_model: Models) -> Path:
    """Qwen3 of four layers, of tokens that two ranks do not divide. Of a tied embedding the first and the last stage have a copy each."""
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    return make_model(vocab_size=19 if request.param == TIED else 17, tie_word_embeddings=request.param == TIED, **sizes)


@pytest.fixture(scope="module")
def alone(initial: Path, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """By the torch backend on one rank."""
    return run(make_trainer(config(1, 1, 1, "torch"), initial), tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def truth(initial: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return parameters(run(in_float64(config(1, 1, 1, "torch"), initial), tmp_path_factory.mktemp("truth")).checkpoint)


@pytest.mark.parametrize(("initial", "mesh"), MESHES, indirect=["initial"], ids=str)
def test_stages_train_as_one_rank_does(
    initial: Path, alone: Ran, truth: dict[str, torch.Tensor], mesh: tuple[int, int, int], tmp_path: Path
) -> None:
    """One digest, a bound from float64, equal bits after a resume, and every other backend and mesh goes on with its checkpoint."""
    with open_trainer(config(*mesh), initial) as trainer:
        made = run(trainer, tmp_path)
        trainer.export(tmp_path / "out")
    check_run(made, alone, truth, moved=apart(truth, load_file(initial / "model.safetensors")))
    assert digest_of(load_file(tmp_path / "out" / "model.safetensors").items(), "qwen3") == made.digests[-1]
    half = STEPS // 2
    other = make_trainer(config(1, 1, 1, "torch"), initial)
    assert other.load(made.half) == b"at" and other.digest() == made.digests[half - 1]
    other.save(tmp_path / "torch", b"at", version=Version(0, half)).result()
    with open_trainer(config(*mesh), initial) as trainer:
        for checkpoint in (made.half, tmp_path / "torch"):
            assert trainer.load(checkpoint) == b"at"
            assert [trainer.step(batch(step)).digest for step in range(half, half + 3)] == made.digests[half : half + 3]


@pytest.mark.slow
@pytest.mark.parametrize(("initial", "mesh"), [(TIED, BOTH), (UNTIED, (2, 1, 2))], indirect=["initial"], ids=str)
def test_the_first_step_has_torchs_log_probs_and_gradient(initial: Path, mesh: tuple[int, int, int]) -> None:
    """With what the whole batch and all parameters decide: the rate by the effective sample size, energies, the cosine of a second step."""
    found = []
    options = {"minibatches": 1, "gradient_cosine": True, "optimizer": OptimizerConfig(learning_rate=1e-3, ess_scaling="sqrt")}
    for asked in (config(1, 1, 1, "torch", **options), config(*mesh, check_logprobs=2, **options)):
        with open_trainer(replace(asked, loss=LossConfig(advantage="opob", top_entropy=0.5)), initial) as trainer:
            result = trainer.step(batch(0))
            assert result.tokens is not None
            cosine = trainer.step(batch(1)).metrics["train/grad_cosine"]
            found.append((result.tokens.logprobs, [result.metrics[f"train/{name}"] for name in ("grad_norm", "ess_rollout", "lr")], cosine))
            found[-1] += (result.metrics["train/loss"],)
    (ours, numbers, cosine, loss), (theirs, others, other_cosine, other_loss) = found
    assert abs(ours - theirs).max() < 2e-5  # float32 sums in another order
    assert others == pytest.approx(numbers, rel=2e-5) and other_loss == pytest.approx(loss, rel=1e-4)
    assert 0 < others[1] < 1 and other_cosine == pytest.approx(cosine, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("initial", [TIED], indirect=True)
def test_each_tensor_is_published_by_one_stage(initial: Path, tmp_path: Path) -> None:
    """In bfloat16, by all four ranks: rows of rank 0 and of the others make each tensor, once."""
    with open_trainer(config(4, 2, 2, dtype="bfloat16"), initial) as trainer:
        result = trainer.step(batch(0))
        shards = list(trainer.shards())
        trainer.export(tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert digest_of(stored.items(), "qwen3") == result.digest
    assert {shard.name for shard in shards} == stored.keys()
    for shard in shards:
        first, rows = (shard.offset or (0,))[0], shard.shape[0]
        assert stored[shard.name][first : first + rows].contiguous().view(torch.uint8).numpy().tobytes() == bytes(shard.host())
    held = {shard.name: shard.shape[0] for shard in shards}
    assert held["model.layers.0.self_attn.o_proj.weight"] and not held["model.layers.3.self_attn.o_proj.weight"]
    assert held["model.embed_tokens.weight"] and not held["model.norm.weight"]


@pytest.mark.parametrize("victim", [slow(1), soak(0), soak(2)])
def test_a_dead_stage_ends_the_step_of_the_others(make_model: Models, victim: int, preloaded: Preloaded) -> None:
    """Whichever it is, of four: the first, which only sends, is this process's, so three others."""
    killed_in_a_step(config(4, 1, 4, rank_timeout_s=30.0), make_model(num_hidden_layers=4), preloaded, victim)


def test_layers_that_stages_do_not_divide_are_refused(make_model: Models) -> None:
    from streamrl.trainers.megatron.buildable import read_architecture

    with raises(ConfigError, what="num_hidden_layers", size=4, parts=3):
        read_architecture(make_model(num_hidden_layers=4), 1, stages=3)
