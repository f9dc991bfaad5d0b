"""The table of names: what checkpoints have, whatever the installed transformers makes of it, also of rows of a parameter."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from streamrl.models.tensor_files import host_bytes
from streamrl.tensors.concatenation import place_of
from streamrl.tensors.digest import MASK, combine, slice_digest, tensor_digest
from streamrl.tensors.mesh import Mesh
from streamrl.tensors.names import ARCHITECTURES, Named, named, unlisted
from tests.support.digests import digest_of

GOLDEN = Path(__file__).parents[1] / "golden" / "names.json"
"""Per model: how many tensors, and the SHA-256 of their names, shapes and order. Written once: the names of a version never change."""
DENSE = ("llama", "qwen2", "qwen3")
HEADS = "num_attention_heads num_key_value_heads head_dim"


def sizes(text: str, *numbers: int) -> dict[str, Any]:
    """A configuration's keys, separated by blanks, with these numbers."""
    return dict(zip(text.split(), numbers, strict=True))


TINY = sizes("vocab_size hidden_size intermediate_size moe_intermediate_size num_hidden_layers " + HEADS, 32, 16, 32, 8, 2, 2, 1, 8)
TINY |= sizes("num_experts num_local_experts n_routed_experts num_experts_per_tok max_position_embeddings", 4, 4, 4, 4, 64)
DEEPSEEK = sizes("n_group topk_group first_k_dense_replace n_shared_experts kv_lora_rank q_lora_rank v_head_dim", 1, 1, 1, 1, 8, 8, 8)
DEEPSEEK |= sizes("qk_rope_head_dim qk_nope_head_dim", 4, 4)
QWEN_30B = sizes("vocab_size hidden_size intermediate_size moe_intermediate_size num_hidden_layers", 151_936, 2048, 6144, 768, 48)
QWEN_30B |= sizes(HEADS + " num_experts num_experts_per_tok tie_word_embeddings", 32, 4, 128, 128, 8, False)


def tiny(model_type: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **TINY, **(DEEPSEEK if "deepseek" in model_type else {})))


def tensors_of(model: Any) -> dict[str, tuple[int, ...]]:
    """Name and shape of a model's tensors, in the order of a version's bytes."""
    found = [one for name, p in model.named_parameters() for one in named(model.config.model_type, name, tuple(p.shape))]
    return {one.name: one.shape for one in sorted(found, key=lambda one: place_of(one.name))}


def stamp(tensors: dict[str, tuple[int, ...]]) -> list[object]:
    text = "".join(f"{name} {list(shape)}\n" for name, shape in tensors.items())
    return [len(tensors), hashlib.sha256(text.encode()).hexdigest()]


@pytest.mark.parametrize("model_type", [*DENSE, *ARCHITECTURES])
def test_the_tensors_are_those_of_a_checkpoint(model_type: str, tmp_path: Path) -> None:
    """Names, shapes and bytes of what transformers itself writes."""
    model = tiny(model_type)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    mine: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        for one in named(model_type, name, tuple(parameter.shape)):
            mine[one.name] = parameter.detach().reshape(-1)[one.first : one.first + one.numel].view(one.shape)
    buffers = {name for name, _ in model.named_buffers()}
    assert mine.keys() == saved.keys() - buffers
    assert all(torch.equal(mine[name], saved[name]) for name in mine)
    # What an older transformers calls them all the same is left as it is, and one digest is the other's.
    assert digest_of(mine.items(), model_type) == digest_of(model.named_parameters(), model_type)
    assert digest_of(mine.items(), model_type) == combine({n: tensor_digest(host_bytes(p), p.element_size()) for n, p in mine.items()})


def test_names_shapes_and_order_are_as_they_have_always_been() -> None:
    found: dict[str, Any] = {model_type: stamp(tensors_of(tiny(model_type))) for model_type in (*DENSE, *ARCHITECTURES)}
    with torch.device("meta"):
        config = AutoConfig.for_model("qwen3_moe", **QWEN_30B)
        found["Qwen3-30B-A3B"] = stamp(tensors_of(AutoModelForCausalLM.from_config(config)))
    assert found["Qwen3-30B-A3B"][0] == 18_867
    assert found == json.loads(GOLDEN.read_text())


@settings(max_examples=200, deadline=None)
@given(experts=st.integers(1, 9), height=st.integers(1, 3), width=st.integers(1, 4), shards=st.integers(1, 5), down=st.booleans())
def test_rows_of_ranks_add_up(experts: int, height: int, width: int, shards: int, down: bool) -> None:
    shape = (experts, height if down else 2 * height, width)
    name = f"model.layers.0.mlp.experts.{'down_proj' if down else 'gate_up_proj'}"
    parameter = torch.randn(shape)
    mesh = Mesh(shard=shards)
    whole = {one.name: one for one in named("mixtral", name, shape)}
    sums = dict.fromkeys(whole, 0)
    counts = dict.fromkeys(whole, 0)
    for part in range(shards):
        rows = mesh.rows(experts, part)
        held = parameter[rows.start : rows.stop].reshape(-1)
        ones: list[Named] = list(named("mixtral", name, shape, rows))
        assert [one.name for one in ones] == list(whole)
        for one in ones:
            data = host_bytes(held[one.first : one.first + one.numel])
            sums[one.name] += slice_digest(data, 4, one.shape, one.offset, one.held)
            counts[one.name] += one.numel
    for one_name, one in whole.items():
        expected = tensor_digest(host_bytes(parameter.reshape(-1)[one.first : one.first + one.numel]), 4)
        assert (sums[one_name] & MASK, counts[one_name]) == (expected, one.numel)


def test_what_is_not_known_keeps_its_name() -> None:
    assert [one.name for one in named("gpt_oss", "layers.0.mlp.experts.gate_up_proj", (2, 4, 3))] == ["layers.0.mlp.experts.gate_up_proj"]
    assert [(one.shape, one.offset, one.held) for one in named("llama", "scale", ())] == [((), (), ())]
    assert [(one.offset, one.held) for one in named("llama", "none", (0, 4))] == [((0, 0), (0, 4))]
    assert [(one.offset, one.held) for one in named("llama", "w", (5, 2), range(3, 5))] == [((3, 0), (2, 2))]
    assert [(one.offset, one.held) for one in named("llama", "w", (5, 2), range(5, 5))] == [((5, 0), (0, 2))]


@pytest.mark.parametrize(
    ("model_type", "said"), [("glm4_moe_lite", "model.layers.0.mlp.experts.gate_up_proj"), ("qwen3_moe", ""), ("qwen3", "")]
)
def test_experts_of_an_architecture_that_is_not_listed_are_named(model_type: str, said: str) -> None:
    names = ["model.embed_tokens.weight", *(f"model.layers.0.mlp.experts.{what}" for what in ("gate_up_proj", "down_proj"))]
    assert unlisted(model_type, names if model_type != "qwen3" else names[:1]) == said
