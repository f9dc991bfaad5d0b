"""megatron-core beside the torch backend: one digest, the same training within a bound, checkpoints of each resumed by the other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from streamrl.config.tree import Config, OptimizerConfig, TrainerConfig
from streamrl.errors import ConfigError
from streamrl.schemas.versions import Version
from streamrl.trainers.factory import make_trainer
from streamrl.trainers.ranks.local import open_trainer
from tests.support.digests import digest_of
from tests.support.errors import raises
from tests.support.meshes import STEPS, Runs, apart, batch, check_run, in_float64, killed_in_a_step, parameters, run, runs, slow, soak
from tests.support.preloaded import Preloaded
from tests.support.trainers import Models

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
MESHES = [slow((2, 2)), *map(soak, ((1, 1), (2, 1), (4, 2)))]
"""Ranks and tensor."""


def config(ranks: int, tensor: int, backend: str = "megatron", **changes: object) -> Config:
    options = {"optimizer": OptimizerConfig(learning_rate=1e-3), "micro_tokens": 48, "minibatches": 2, "rank_timeout_s": 120.0, **changes}
    return Config(trainer=TrainerConfig(backend=backend, ranks=ranks, tensor=tensor, **options))  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="module")
def initial(make_model: Models) -> Path:
    """Qwen3 of 19 tokens, which two ranks do not divide, with two groups of two heads and a head of its own."""
    return make_model(vocab_size=19, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def ran(initial: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """`ran(mesh)`: a run on it, made once; of (0, 0) by the torch backend on one rank."""

    return runs(lambda mesh: config(1, 1, "torch") if mesh == (0, 0) else config(*mesh), initial, tmp_path_factory)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_model_has_one_digest_whoever_holds_it_and_trains_as_near_to_float64_as_torchs(
    ran: Runs, initial: Path, mesh: tuple[int, int], tmp_path: Path
) -> None:
    truth = parameters(run(in_float64(config(1, 1, "torch"), initial), tmp_path).checkpoint)
    check_run(ran(mesh), ran((0, 0)), truth, moved=apart(truth, parameters(initial)))
    alone = make_trainer(config(1, 1, "torch"), initial)
    assert alone.load(ran(mesh).checkpoint) == b"at"
    assert alone.digest() == ran(mesh).digests[-1]


def test_the_first_step_has_torchs_log_probs_and_gradient(initial: Path) -> None:
    found = []
    for asked in (config(1, 1, "torch"), config(2, 2)):
        with open_trainer(asked, initial) as trainer:
            result = trainer.step(batch(0))
            assert result.tokens is not None
            found.append((result.tokens.logprobs, result.metrics["train/grad_norm"], result.metrics["train/loss"]))
    (ours, norm, loss), (theirs, other_norm, other_loss) = found
    assert abs(ours - theirs).max() < 2e-5  # float32 sums in another order
    assert other_norm == pytest.approx(norm, rel=1e-5) and other_loss == pytest.approx(loss, rel=1e-4)


@pytest.mark.slow
def test_a_restart_gives_the_same_bits(ran: Runs, initial: Path) -> None:
    made, half = ran((2, 2)), STEPS // 2
    with open_trainer(config(2, 2), initial) as trainer:
        assert trainer.load(made.half) == b"at"
        assert [trainer.step(batch(step)).digest for step in range(half, STEPS)] == made.digests[half:]


@pytest.mark.parametrize("asked", [slow(config(2, 1, "torch", shards=2), id="torch"), soak(config(2, 1), id="replicas")])
def test_another_backend_and_mesh_goes_on_with_masters_and_moments(ran: Runs, initial: Path, asked: Config, tmp_path: Path) -> None:
    """From columns of two tensor ranks to rows of two parts or to two whole copies, and back."""
    made = ran((2, 2))
    with open_trainer(asked, initial) as trainer:
        assert trainer.load(made.half) == b"at"
        assert trainer.digest() == made.digests[STEPS // 2 - 1]
        trainer.save(tmp_path / "there", b"at", version=Version(0, STEPS // 2)).result()
    with open_trainer(config(2, 2), initial) as trainer:
        assert trainer.load(tmp_path / "there") == b"at"
        trainer.save(tmp_path / "back", b"at", version=Version(0, STEPS // 2)).result()
        assert [trainer.step(batch(step)).digest for step in range(STEPS // 2, STEPS)] == made.digests[STEPS // 2 :]
    for stem in ("model", "optimizer"):
        before, after = parameters(made.half, stem), parameters(tmp_path / "back", stem)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_bfloat16_of_a_tied_llama_is_published_and_exported_as_it_is_digested(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    rope = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8}
    settings = LlamaConfig(vocab_size=16, tie_word_embeddings=True, rope_parameters={**rope, "rope_theta": 100.0}, **sizes)  # pyright: ignore[reportArgumentType]
    LlamaForCausalLM(settings).save_pretrained(tmp_path / "llama")
    found: list[tuple[str, str]] = []
    for asked in (config(1, 1, "torch", dtype="bfloat16"), config(2, 2, dtype="bfloat16", check_logprobs=2)):
        with open_trainer(asked, tmp_path / "llama") as trainer:
            begun = trainer.digest()
            results = [trainer.step(batch(step)) for step in range(2)]
            shards = list(trainer.shards())
            assert {shard.dtype for shard in shards} == {"bfloat16"}
            trainer.save(tmp_path / asked.trainer.backend, b"", version=Version(0, 2)).result()
            out = tmp_path / f"hf-{asked.trainer.backend}"
            trainer.export(out)
            found.append((begun, trainer.digest()))
        stored = load_file(out / "model.safetensors")
        for shard in shards:  # of rank 0: rows, also of what it holds columns of
            first, *rest = shard.offset or (0,)
            rows = stored[shard.name][first : first + shard.shape[0]]
            assert not any(rest) and rows.shape == shard.shape
            assert rows.contiguous().view(torch.uint8).numpy().tobytes() == bytes(shard.host())
        assert len(shards) == len(stored)
        model = LlamaForCausalLM.from_pretrained(out)
        assert digest_of(model.named_parameters(), "llama") == found[-1][1] == results[-1].digest
    assert found[0][0] == found[1][0]
    ours, theirs = (parameters(tmp_path / name, "optimizer") for name in ("torch", "megatron"))
    assert {key: value.dtype for key, value in ours.items()} == {key: value.dtype for key, value in theirs.items()}


@pytest.mark.slow
def test_tensor_ranks_hand_out_rows_unequally_or_none(make_model: Models, tmp_path: Path) -> None:
    """Of 4 rows of what three ranks hold columns of two publish 2 each, and the last one none."""
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 6}
    model = make_model(vocab_size=19, hidden_size=4, tie_word_embeddings=False, **heads)
    with open_trainer(config(3, 3), model) as trainer:
        result = trainer.step(batch(0))
        shards = {shard.name: shard for shard in trainer.shards()}
        trainer.export(tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert digest_of(stored.items(), "qwen3") == result.digest
    cut = [name for name in stored if name.endswith(("o_proj.weight", "down_proj.weight"))]
    assert cut and all(bytes(shards[name].host()) == stored[name][:2].numpy().tobytes() for name in cut)


def test_a_dead_rank_ends_the_step(initial: Path, preloaded: Preloaded) -> None:
    killed_in_a_step(config(2, 2, rank_timeout_s=30.0), initial, preloaded)


@pytest.mark.parametrize(
    ("changes", "tensor", "said"),
    [
        ({}, 3, "num_attention_heads = 4, got 4 / 3"),
        ({}, 4, "num_key_value_heads = 2, got 2 / 4"),
        ({"model_type": "gpt2"}, 1, "'gpt2'"),
        ({"use_sliding_window": True}, 1, "use_sliding_window"),
        ({"vocab_size": 20}, 1, "embed_tokens.weight of shape (20, 32)"),
    ],
)
def test_a_model_that_it_cannot_build_is_refused(initial: Path, tmp_path: Path, changes: dict[str, Any], tensor: int, said: str) -> None:
    shutil.copytree(initial, tmp_path / "other")
    path = tmp_path / "other" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    if tensor == 1:
        with pytest.raises(ConfigError) as caught, open_trainer(config(1, 1), tmp_path / "other"):
            pass
    else:
        from streamrl.trainers.megatron.buildable import read_architecture

        with pytest.raises(ConfigError) as caught:
            read_architecture(tmp_path / "other", tensor)
    assert said in str(caught.value)


def test_a_tensor_that_is_missing_is_refused(initial: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    shutil.copytree(initial, tmp_path / "other")
    file = tmp_path / "other" / "model.safetensors"
    values = load_file(file)
    del values["model.layers.1.mlp.up_proj.weight"]
    save_file(values, file)
    with raises(ConfigError, missing="model.layers.1.mlp.up_proj.weight"), open_trainer(config(1, 1), tmp_path / "other"):
        pass


@pytest.mark.parametrize(
    ("kind", "dtype"), [("model", "bfloat16"), slow("mixture", "bfloat16"), soak("model", "float32"), soak("mixture", "float32")]
)
def test_what_lies_in_the_models_memory_is_digested_there(make_model: Models, make_mixture: Models, kind: str, dtype: str) -> None:
    """As a GPU does it, beside the digest of rounded leaves: at the start and behind a step."""
    directory = (make_model if kind == "model" else make_mixture)(dtype, num_attention_heads=4, num_key_value_heads=2)
    with open_trainer(config(1, 1, dtype=dtype), directory) as opened:
        trainer: Any = opened
        held = trainer.held

        def in_place() -> str:
            found = held.digests()
            assert any(found.words.values())
            return trainer._parallel.digest(found.elements)

        def rounded() -> str:
            return digest_of([(name, leaf.detach().to(held._types[name])) for name, leaf in held.parameters], held.model_type)

        assert in_place() == rounded()
        before = in_place()
        after = trainer.step(batch(0)).digest
        assert in_place() == after != before
        assert after == rounded()
        assert any("embed" in name for name in held._in_place)
        assert not any("q_proj" in name for name in held._in_place), "rows of two groups"
