"""megatron-core on each of its meshes beside the torch backend: one digest, the same training within a bound, checkpoints of either.

Tensor ranks, ranks that divide experts, stages of layers, and ranks that share packed rows.
"""

import json
import math
import shutil
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from streamrl.config.loss import ExpertsConfig, KLConfig, LossConfig
from streamrl.config.tree import OptimizerConfig
from streamrl.errors import ConfigError
from streamrl.schemas.versions import Version
from streamrl.trainers.factory import make_trainer
from streamrl.trainers.megatron.buildable import read_architecture
from streamrl.trainers.ranks.local import open_trainer
from tests.support import meshes
from tests.support.digests import digest_of
from tests.support.errors import raises
from tests.support.meshes import HALF, Mesh, Ran, batch, slow, soak
from tests.support.preloaded import Preloaded
from tests.support.trainers import Models

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
TORCH: Mesh = {"backend": "torch"}
CUT: Mesh = {**TORCH, "ranks": 2, "shards": 2}
TENSOR, EXPERTS, BOTH = {"ranks": 2, "tensor": 2}, {"ranks": 2, "experts": 2}, {"ranks": 4, "tensor": 2, "pipeline": 2}
SHARED, SHARED_STAGES = {"ranks": 4, "tensor": 2, "context": 2}, {"ranks": 4, "pipeline": 2, "context": 2}


def config(mesh: Mesh, loss: LossConfig | None = None, **trainer: Any) -> Any:
    return meshes.config(loss, **{"backend": "megatron", **mesh, **trainer})


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "heads": {"vocab_size": 19, "tie_word_embeddings": False},
    "mixture": {"vocab_size": 19, "tie_word_embeddings": False},
    "tied": {"vocab_size": 19, "num_hidden_layers": 4},
    "untied": {"vocab_size": 17, "num_hidden_layers": 4, "tie_word_embeddings": False},
    "rows": {"vocab_size": 19},
}
"""Of tokens that two ranks do not divide. Of a tied embedding the first and the last stage have a copy each."""
LOSSES = {"mixture": LossConfig(proximal="sampler", experts=ExpertsConfig(balance_coef=0.1, z_coef=0.01))}


class Alone(NamedTuple):
    """A model, its run by the torch backend on one rank, and the parameters of that in float64."""

    initial: Path
    run: Ran
    truth: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def initial(make_model: Models, make_mixture: Models) -> Any:
    return cache(lambda name: (make_mixture if name == "mixture" else make_model)(**HEADS, **MODELS[name]))


@pytest.fixture(scope="module")
def alone(initial: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def made(name: str) -> Alone:
        asked, where = config(TORCH, LOSSES.get(name)), tmp_path_factory.mktemp("alone")
        truth = meshes.parameters(meshes.run(meshes.in_float64(asked, initial(name)), where / "truth").checkpoint)
        return Alone(initial(name), meshes.run(make_trainer(asked, initial(name)), where / "run"), truth)

    return made


MESHES = [
    *(slow("heads", TENSOR), soak("heads", {"ranks": 1}), soak("heads", {"ranks": 2}), soak("heads", {"ranks": 4, "tensor": 2})),
    *(slow("mixture", EXPERTS), slow("mixture", {"ranks": 4, "experts": 2}), soak("mixture", {"ranks": 1}), soak("mixture", {"ranks": 2})),
    *(slow("tied", BOTH), soak("untied", {"ranks": 2, "pipeline": 2}), soak("tied", {"ranks": 2, "pipeline": 2})),
    *(soak("tied", {"ranks": 4, "pipeline": 4}), soak("tied", {"ranks": 4, "pipeline": 2})),
    *(
        slow("rows", SHARED),
        soak("rows", SHARED_STAGES),
        soak("rows", {"ranks": 2, "context": 2}),
        soak("rows", {"ranks": 4, "context": 2}),
    ),
]


@pytest.mark.parametrize(("name", "mesh"), MESHES, ids=str)
def test_ranks_train_as_one_does(alone: Any, name: str, mesh: Mesh, tmp_path: Path) -> None:
    """One digest, a bound from float64, equal bits after a resume; torch goes on with its masters and moments, and it with torch's."""
    one, asked, loss = alone(name), config(mesh, LOSSES.get(name)), LOSSES.get(name)
    with open_trainer(asked, one.initial) as trainer:
        made = meshes.run(trainer, tmp_path)
        trainer.export(tmp_path / "out")
    first = meshes.parameters(one.initial)  # files of a model hold experts one by one
    moved = meshes.apart({key: value for key, value in one.truth.items() if key in first}, first) if name != "rows" else math.inf
    meshes.check_run(made, one.run, one.truth, moved=moved)
    assert digest_of(load_file(tmp_path / "out" / "model.safetensors").items(), "qwen3") == made.digests[-1]
    other = make_trainer(config(TORCH, loss), one.initial)
    assert other.load(made.checkpoint) == b"at" and other.digest() == made.digests[-1]
    with open_trainer(config(CUT, loss), one.initial) as trainer:
        assert trainer.load(made.half) == b"at" and trainer.digest() == made.digests[HALF - 1]
        trainer.save(tmp_path / "there", b"at", version=Version(0, HALF)).result()
    with open_trainer(asked, one.initial) as trainer:
        meshes.goes_on(trainer, made.half, made)
        meshes.goes_on(trainer, tmp_path / "there", made, HALF + 3)
        assert trainer.load(tmp_path / "there") == b"at"
        trainer.save(tmp_path / "back", b"at", version=Version(0, HALF)).result()
    assert meshes.same(tmp_path / "back", made.half, "model", "optimizer")


ESS = OptimizerConfig(learning_rate=1e-3, ess_scaling="sqrt")
WHOLE = {"minibatches": 1, "gradient_cosine": True, "optimizer": ESS, "check_logprobs": 2}
OPOB = LossConfig(advantage="opob", top_entropy=0.5)
GSPO = LossConfig(policy="gspo", clip_low=0.5, clip_high=0.5, reduction="sequence_mean", kl=KLConfig(loss_coef=0.1, estimator="k3"))
FIRST = [
    ("heads", TENSOR, None, {}, (2e-5, 1e-5, 1e-4)),
    slow("mixture", EXPERTS, LOSSES["mixture"], {}, (2e-5, 1e-4, 1e-4)),
    slow("tied", BOTH, OPOB, WHOLE, (2e-5, 2e-5, 1e-4)),
    slow("untied", {"ranks": 2, "pipeline": 2}, OPOB, WHOLE, (2e-5, 2e-5, 1e-4)),
    # A step between the two minibatches.
    *(slow("rows", mesh, GSPO, {}, (5e-5, 1e-4, 1e-3)) for mesh in (SHARED, SHARED_STAGES)),
]
"""With what a whole batch, all parameters or whole samples decide: energies, the effective sample size, the cosine, a load, a reference.
Bounds of log-probs, the gradient's norm with what else is told, and the loss: float32 sums in another order."""


@pytest.mark.parametrize(("name", "mesh", "loss", "options", "bounds"), FIRST)
def test_the_first_step_has_torchs_log_probs_and_gradient(
    initial: Any, name: str, mesh: Mesh, loss: LossConfig | None, options: dict[str, Any], bounds: tuple[float, ...]
) -> None:
    found = []
    for asked in (config(TORCH, loss, **{**options, "check_logprobs": 0}), config(mesh, loss, **options)):
        with open_trainer(asked, initial(name)) as trainer:
            first = trainer.step(batch(0))
            found.append((first, trainer.step(batch(1)).metrics["train/grad_cosine"] if options else 0.0))
    (ours, cosine), (theirs, other_cosine) = found
    assert ours.tokens is not None and theirs.tokens is not None
    assert abs(ours.tokens.logprobs - theirs.tokens.logprobs).max() < bounds[0]
    words = ("grad_norm", "ess_rollout", "train/lr", "expert", "balance", "router")
    told = {one: value for one, value in ours.metrics.items() if any(word in one for word in words)}
    assert len(told) == {"mixture": 7}.get(name, 3 if options else 2)
    assert {one: theirs.metrics[one] for one in told} == pytest.approx(told, rel=bounds[1])
    assert theirs.metrics["train/loss"] == pytest.approx(ours.metrics["train/loss"], rel=bounds[2], abs=1e-6 if loss is GSPO else None)
    if options:
        assert 0 < told["train/ess_rollout"] < 1 and other_cosine == pytest.approx(cosine, abs=1e-3)
    if "context" in mesh:
        assert theirs.choices is not None and theirs.choices.row_length % (4 * mesh.get("tensor", 1)) == 0


def write_llama(path: Path) -> Path:
    """Tied, with positions that are scaled."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, **HEADS, "intermediate_size": 48}
    rope = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8}
    settings: Any = {"tie_word_embeddings": True, "rope_parameters": {**rope, "rope_theta": 100.0}, **sizes}
    LlamaForCausalLM(LlamaConfig(vocab_size=16, **settings)).save_pretrained(path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), [("llama", TENSOR), ("mixture", EXPERTS), ("tied", BOTH)], ids=str)
def test_bfloat16_is_published_and_exported_as_it_is_digested(initial: Any, name: str, mesh: Mesh, tmp_path: Path) -> None:
    """Rank 0 publishes rows, also of what it holds columns of, and each tensor is published by one stage."""
    model, found = write_llama(tmp_path / "llama") if name == "llama" else initial(name), []
    for asked in (config(TORCH, dtype="bfloat16"), config(mesh, dtype="bfloat16", check_logprobs=2)):
        out = tmp_path / f"hf-{asked.trainer.backend}"
        with open_trainer(asked, model) as trainer:
            begun = trainer.digest()
            results = [trainer.step(batch(step)) for step in range(2)]
            shards = list(trainer.shards())
            trainer.save(tmp_path / asked.trainer.backend, b"", version=Version(0, 2)).result()
            trainer.export(out)
            found.append((begun, trainer.digest()))
        assert make_trainer(config(TORCH, dtype="bfloat16"), out).digest() == found[-1][1] == results[-1].digest
        stored = load_file(out / "model.safetensors")
        assert {shard.name for shard in shards} == stored.keys() and {shard.dtype for shard in shards} == {"bfloat16"}
        for shard in shards:
            first, *rest = shard.offset or (0,)
            rows = stored[shard.name][first : first + shard.shape[0]]
            assert not any(rest) and rows.shape == shard.shape
            assert rows.contiguous().view(torch.uint8).numpy().tobytes() == bytes(shard.host())
    assert found[0][0] == found[1][0]
    ours, theirs = (meshes.parameters(tmp_path / one, "optimizer") for one in ("torch", "megatron"))
    assert {key: value.dtype for key, value in ours.items()} == {key: value.dtype for key, value in theirs.items()}
    held = {shard.name: shard.shape[0] for shard in shards}
    if name == "tied":
        assert held["model.layers.0.self_attn.o_proj.weight"] and not held["model.layers.3.self_attn.o_proj.weight"]
        assert held["model.embed_tokens.weight"] and not held["model.norm.weight"]


@pytest.mark.slow
def test_tensor_ranks_hand_out_rows_unequally_or_none(make_model: Models, tmp_path: Path) -> None:
    """Of 4 rows of what three ranks hold columns of two publish 2 each, and the last one none."""
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 6}
    model = make_model(vocab_size=19, hidden_size=4, tie_word_embeddings=False, **heads)
    with open_trainer(config({"ranks": 3, "tensor": 3}), model) as trainer:
        result = trainer.step(batch(0))
        shards = {shard.name: shard for shard in trainer.shards()}
        trainer.export(tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert digest_of(stored.items(), "qwen3") == result.digest
    cut = [name for name in stored if name.endswith(("o_proj.weight", "down_proj.weight"))]
    assert cut and all(bytes(shards[name].host()) == stored[name][:2].numpy().tobytes() for name in cut)


@pytest.mark.slow
def test_experts_that_no_token_meets_learn_nothing_and_stop_nobody(make_mixture: Models, tmp_path: Path) -> None:
    """Every token meets the same two experts, which one rank holds: the other gets no token in any pass."""
    initial = make_mixture(num_experts=4)
    values = load_file(initial / "model.safetensors")
    for name, value in values.items():
        if name.endswith("mlp.gate.weight"):
            value.zero_()  # equal logits: topk takes the same ones for each token
    save_file(values, initial / "model.safetensors", metadata={"format": "pt"})
    norms = []
    for asked in (config(mesh, LOSSES["mixture"], minibatches=1) for mesh in (TORCH, EXPERTS)):
        with open_trainer(asked, initial) as trainer:
            result = trainer.step(batch(0))
            trainer.save(tmp_path / asked.trainer.backend, b"", version=Version(0, 1)).result()
        assert result.metrics["train/expert_load_min"] == 0
        norms.append(result.metrics["train/grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    shrunk = 1 - 1e-3 * OptimizerConfig().weight_decay
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.experts."
        kept = [
            [e for e in range(4) if torch.allclose(held[e], values[f"{name}{e}.down_proj.weight"] * shrunk, rtol=0, atol=1e-6)]
            for held in (meshes.parameters(tmp_path / backend)[f"{name}down_proj"] for backend in ("torch", "megatron"))
        ]
        assert kept[0] == kept[1] and kept[0] in ([0, 1], [2, 3]), "of one rank"


STAGES_4 = {"ranks": 4, "pipeline": 4}


@pytest.mark.parametrize(
    ("name", "mesh", "victim"),
    [("heads", TENSOR, 0), slow("mixture", EXPERTS, 0), slow("tied", STAGES_4, 1), soak("tied", STAGES_4, 0), soak("tied", STAGES_4, 2)],
)
def test_a_dead_rank_ends_the_step(initial: Any, name: str, mesh: Mesh, victim: int, preloaded: Preloaded) -> None:
    """Whichever it is; the first of the stages is this process's."""
    meshes.killed_in_a_step(config(mesh, LOSSES.get(name), rank_timeout_s=30.0), initial(name), preloaded, victim)


def test_meshes_that_do_not_divide_a_model_are_refused(initial: Any) -> None:
    refused: list[tuple[str, dict[str, int], dict[str, Any]]] = [
        ("heads", {"tensors": 3}, {"what": "num_attention_heads", "size": 4, "parts": 3}),
        ("heads", {"tensors": 4}, {"what": "num_key_value_heads", "size": 2, "parts": 4}),
        ("tied", {"tensors": 1, "stages": 3}, {"what": "num_hidden_layers", "size": 4, "parts": 3}),
        ("mixture", {"tensors": 1, "experts": 3}, {"what": "num_experts", "size": 4, "parts": 3}),
        ("mixture", {"tensors": 2, "experts": 1}, {"key": "trainer.tensor"}),
        ("heads", {"tensors": 1, "experts": 2}, {"key": "trainer.experts"}),
    ]
    for name, parts, values in refused:
        with raises(ConfigError, **values):
            read_architecture(initial(name), **parts)


@pytest.mark.parametrize(
    ("changes", "lost", "said"),
    [
        ({"model_type": "gpt2"}, "", "'gpt2'"),
        ({"use_sliding_window": True}, "", "use_sliding_window"),
        ({"vocab_size": 20}, "", "embed_tokens.weight of shape (20, 32)"),
        ({}, "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"),
    ],
)
def test_a_model_that_it_cannot_build_is_refused(initial: Any, tmp_path: Path, changes: dict[str, Any], lost: str, said: str) -> None:
    shutil.copytree(initial("heads"), tmp_path / "other")
    path, file = tmp_path / "other" / "config.json", tmp_path / "other" / "model.safetensors"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    save_file({name: value for name, value in load_file(file).items() if name != lost}, file)
    with pytest.raises(ConfigError) as caught, open_trainer(config({"ranks": 1}), tmp_path / "other"):
        pass
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("model", "bfloat16"), slow("mixture", "bfloat16"), soak("model", "float32"), soak("mixture", "float32")]
)
def test_what_lies_in_the_models_memory_is_digested_there(make_model: Models, make_mixture: Models, kind: str, dtype: str) -> None:
    """As a GPU does it, beside the digest of rounded leaves: at the start and behind a step."""
    directory = (make_model if kind == "model" else make_mixture)(dtype, **HEADS)
    with open_trainer(config({"ranks": 1}, dtype=dtype), directory) as opened:
        trainer: Any = opened
        held = trainer.held

        def in_place() -> str:
            found = held.digests()
            assert any(found.words.values())
            return trainer._parallel.digest(found.elements)

        def rounded() -> str:
            return digest_of([(name, leaf.detach().to(held._types[name])) for name, leaf in held.parameters], held.model_type)

        before = in_place()
        assert before == rounded()
        after = trainer.step(batch(0)).digest
        assert in_place() == after == rounded() != before
        assert any("embed" in name for name in held._in_place)
        assert not any("q_proj" in name for name in held._in_place), "rows of two groups"
