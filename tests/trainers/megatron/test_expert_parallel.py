"""Models of experts by megatron-core, whole and divided over ranks, beside the torch backend."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from streamrl.config.loss import ExpertsConfig, LossConfig
from streamrl.config.tree import Config, OptimizerConfig, TrainerConfig
from streamrl.errors import ConfigError
from streamrl.schemas.versions import Version
from streamrl.trainers.factory import make_trainer
from streamrl.trainers.megatron.model import read_architecture
from streamrl.trainers.ranks.local import open_trainer
from tests.support.errors import raises
from tests.support.meshes import STEPS, Runs, apart, batch, check_run, in_float64, killed_in_a_step, parameters, run, runs, slow, soak
from tests.support.preloaded import Preloaded
from tests.support.trainers import Models

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
MESHES = [slow((2, 2)), slow((4, 2)), soak((1, 1)), soak((2, 1))]
"""Ranks and experts."""
LOSS = LossConfig(proximal="sampler", experts=ExpertsConfig(balance_coef=0.1, z_coef=0.01))


def config(ranks: int, experts: int, backend: str = "megatron", **changes: object) -> Config:
    options = {"optimizer": OptimizerConfig(learning_rate=1e-3), "micro_tokens": 48, "minibatches": 2, "rank_timeout_s": 120.0, **changes}
    trainer = TrainerConfig(backend=backend, ranks=ranks, experts=experts, **options)  # pyright: ignore[reportArgumentType]
    return Config(trainer=trainer, loss=LOSS)


@pytest.fixture(scope="module")
def initial(make_mixture: Models) -> Path:
    return make_mixture(vocab_size=19, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def ran(initial: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """`ran(mesh)`: a run on it, made once; of (0, 0) by the torch backend on one rank."""

    return runs(lambda mesh: config(1, 1, "torch") if mesh == (0, 0) else config(*mesh), initial, tmp_path_factory)


@pytest.fixture(scope="module")
def truth(initial: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return parameters(run(in_float64(config(1, 1, "torch"), initial), tmp_path_factory.mktemp("truth")).checkpoint)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_mixture_has_one_digest_whoever_holds_its_experts_and_trains_as_near_to_float64_as_torchs(
    ran: Runs, truth: dict[str, torch.Tensor], initial: Path, mesh: tuple[int, int]
) -> None:
    first = parameters(initial)
    dense = {name: value for name, value in truth.items() if name in first}  # files of a model hold experts one by one
    check_run(ran(mesh), ran((0, 0)), truth, moved=apart(dense, first))
    alone = make_trainer(config(1, 1, "torch"), initial)
    assert alone.load(ran(mesh).checkpoint) == b"at"
    assert alone.digest() == ran(mesh).digests[-1]


@pytest.mark.slow
def test_the_first_step_has_torchs_log_probs_gradient_and_load(initial: Path) -> None:
    found = []
    for asked in (config(1, 1, "torch"), config(2, 2)):
        with open_trainer(asked, initial) as trainer:
            result = trainer.step(batch(0))
            assert result.tokens is not None
            found.append((result.tokens.logprobs, result.metrics))
    (ours, metrics), (theirs, other) = found
    assert abs(ours - theirs).max() < 2e-5  # float32 sums in another order
    names = ["train/grad_norm", "train/loss", *(name for name in metrics if "expert" in name or "balance" in name or "router" in name)]
    assert len(names) == 7
    assert {name: other[name] for name in names} == pytest.approx({name: metrics[name] for name in names}, rel=1e-4)


@pytest.mark.slow
def test_experts_that_no_token_meets_learn_nothing_and_stop_nobody(make_mixture: Models, tmp_path: Path) -> None:
    """Every token meets the same two experts, which one rank holds: the other gets no token in any pass."""
    from safetensors.torch import load_file, save_file

    initial = make_mixture(num_experts=4)
    values = load_file(initial / "model.safetensors")
    for name, value in values.items():
        if name.endswith("mlp.gate.weight"):
            value.zero_()  # equal logits: topk takes the same ones for each token
    save_file(values, initial / "model.safetensors", metadata={"format": "pt"})
    found = []
    for asked in (config(1, 1, "torch", minibatches=1), config(2, 2, minibatches=1)):
        with open_trainer(asked, initial) as trainer:
            result = trainer.step(batch(0))
            trainer.save(tmp_path / asked.trainer.backend, b"", version=Version(0, 1)).result()
            assert result.metrics["train/expert_load_min"] == 0
            found.append(result.metrics["train/grad_norm"])
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    shrunk = 1 - 1e-3 * OptimizerConfig().weight_decay
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.experts."
        kept = [
            [e for e in range(4) if torch.allclose(held[e], values[f"{name}{e}.down_proj.weight"] * shrunk, rtol=0, atol=1e-6)]
            for held in (parameters(tmp_path / backend)[f"{name}down_proj"] for backend in ("torch", "megatron"))
        ]
        assert kept[0] == kept[1] and kept[0] in ([0, 1], [2, 3]), "of one rank"


@pytest.mark.parametrize("asked", [slow(config(2, 1, "torch", shards=2), id="torch"), soak(config(2, 1), id="replicas")])
def test_another_backend_and_mesh_goes_on_with_masters_and_moments(ran: Runs, initial: Path, asked: Config, tmp_path: Path) -> None:
    made, half = ran((2, 2)), STEPS // 2
    with open_trainer(asked, initial) as trainer:
        assert trainer.load(made.half) == b"at"
        assert trainer.digest() == made.digests[half - 1]
        trainer.save(tmp_path / "there", b"at", version=Version(0, half)).result()
    with open_trainer(config(2, 2), initial) as trainer:
        assert trainer.load(tmp_path / "there") == b"at"
        trainer.save(tmp_path / "back", b"at", version=Version(0, half)).result()
        assert [trainer.step(batch(step)).digest for step in range(half, STEPS)] == made.digests[half:]
    for stem in ("model", "optimizer"):
        before, after = parameters(made.half, stem), parameters(tmp_path / "back", stem)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_bfloat16_is_published_and_exported_as_it_is_digested(make_mixture: Models, tmp_path: Path) -> None:
    initial, found = make_mixture("bfloat16"), list[tuple[str, str]]()
    for asked in (config(1, 1, "torch", dtype="bfloat16"), config(2, 2, dtype="bfloat16", check_logprobs=2)):
        with open_trainer(asked, initial) as trainer:
            begun = trainer.digest()
            for step in range(2):
                trainer.step(batch(step))
            assert {shard.dtype for shard in trainer.shards()} == {"bfloat16"}
            out = tmp_path / asked.trainer.backend
            trainer.export(out)
            found.append((begun, trainer.digest()))
        assert make_trainer(config(1, 1, "torch", dtype="bfloat16"), out).digest() == found[-1][1]
    assert found[0][0] == found[1][0]


@pytest.mark.slow
def test_a_dead_expert_rank_ends_the_step(initial: Path, preloaded: Preloaded) -> None:
    killed_in_a_step(config(2, 2, rank_timeout_s=30.0), initial, preloaded)


def test_meshes_that_do_not_divide_a_mixture_are_refused(initial: Path, make_model: Models) -> None:
    with raises(ConfigError, what="num_experts", size=4, parts=3):
        read_architecture(initial, 1, 3)
    with raises(ConfigError, key="trainer.tensor"):
        read_architecture(initial, 2, 1)
    with raises(ConfigError, key="trainer.experts"):
        read_architecture(make_model(), 1, 2)
