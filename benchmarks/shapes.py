"""Model shapes by name: the configuration that a server is started from, and the parameters that a version of it holds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from streamrl.errors import ConfigError

Parameter = tuple[str, tuple[int, ...]]
"""Hugging Face parameter name and shape."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """A Qwen3 or (with experts) Qwen3-MoE architecture."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    intermediate: int
    vocab: int = 151_936
    max_positions: int = 40_960
    tied: bool = False
    experts: int = 0
    experts_per_token: int = 8
    expert_intermediate: int = 0
    dtype: str = "bfloat16"
    tensor_parallel: int = 1

    @property
    def item_bytes(self) -> int:
        """Bytes of a parameter, and of a key's or a value's number."""
        return {"bfloat16": 2, "float32": 4}[self.dtype]


_TINY = Shape(
    name="tiny", hidden=128, layers=4, heads=4, kv_heads=2, head_dim=32, intermediate=384, vocab=320, max_positions=4096, dtype="float32"
)
_MIXTURE = Shape(
    name="30B-A3B", hidden=2048, layers=48, heads=32, kv_heads=4, intermediate=6144, experts=128, expert_intermediate=768, tensor_parallel=2
)
_SHAPES = (
    _TINY,
    msgspec.structs.replace(_TINY, name="tiny-moe", layers=2, experts=8, experts_per_token=2, expert_intermediate=64),
    Shape(name="135M", hidden=576, layers=30, heads=9, kv_heads=3, head_dim=64, intermediate=1536, vocab=49_152, tied=True),
    Shape(name="0.6B", hidden=1024, layers=28, heads=16, kv_heads=8, intermediate=3072, tied=True),
    Shape(name="4B", hidden=2560, layers=36, heads=32, kv_heads=8, intermediate=9728, tied=True),
    Shape(name="8B", hidden=4096, layers=36, heads=32, kv_heads=8, intermediate=12_288),
    _MIXTURE,
    msgspec.structs.replace(_MIXTURE, name="30B-A3B-6", layers=6, tensor_parallel=1),
)  # fmt: skip
SHAPES = {shape.name: shape for shape in _SHAPES}


def find_shape(name: str) -> Shape | None:
    """Return the shape of that name, written in any case; None where there is none."""
    return next((shape for known, shape in SHAPES.items() if known.lower() == name.lower()), None)


def shape_of(name: str) -> Shape:
    """Return the shape of that name, written in any case. Raises ConfigError when there is none."""
    found = find_shape(name)
    if found is None:
        raise ConfigError(f"expected a shape out of {', '.join(SHAPES)}, got {name!r}", shape=name)
    return found


def model_config(shape: Shape) -> dict[str, Any]:
    """What stands in the model's config.json."""
    config: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM" if shape.experts else "Qwen3ForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.max_positions,
        "model_type": "qwen3_moe" if shape.experts else "qwen3",
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "tie_word_embeddings": shape.tied,
        "torch_dtype": shape.dtype,
        "vocab_size": shape.vocab,
    }
    if shape.experts:
        config |= {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": shape.expert_intermediate,
            "norm_topk_prob": True,
            "num_experts": shape.experts,
            "num_experts_per_tok": shape.experts_per_token,
        }
    return config


def write_model(shape: Shape, directory: Path) -> None:
    """Write a model directory that holds a configuration and no weights (for `--load-format dummy`)."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(model_config(shape), indent=2) + "\n", encoding="utf-8")


def parameters(shape: Shape) -> list[Parameter]:
    """All parameters under the names that a checkpoint of the model has; a tied head is not among them."""
    found: list[Parameter] = [("model.embed_tokens.weight", (shape.vocab, shape.hidden))]
    for layer in range(shape.layers):
        found.extend((f"model.layers.{layer}.{name}", size) for name, size in _layer(shape))
    found.append(("model.norm.weight", (shape.hidden,)))
    if not shape.tied:
        found.append(("lm_head.weight", (shape.vocab, shape.hidden)))
    return found


def num_elements(shape: Shape) -> int:
    """Parameters of the model, as a count of numbers."""
    return sum(math.prod(size) for _, size in parameters(shape))


def _layer(shape: Shape) -> Iterator[Parameter]:
    hidden, queries, keys = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "self_attn.q_proj.weight", (queries, hidden)
    yield "self_attn.k_proj.weight", (keys, hidden)
    yield "self_attn.v_proj.weight", (keys, hidden)
    yield "self_attn.o_proj.weight", (hidden, queries)
    yield "self_attn.q_norm.weight", (shape.head_dim,)
    yield "self_attn.k_norm.weight", (shape.head_dim,)
    if shape.experts:
        yield "mlp.gate.weight", (shape.experts, hidden)
        for expert in range(shape.experts):
            yield from _gated(f"mlp.experts.{expert}.", hidden, shape.expert_intermediate)
    else:
        yield from _gated("mlp.", hidden, shape.intermediate)
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)


def _gated(prefix: str, hidden: int, inner: int) -> Iterator[Parameter]:
    yield f"{prefix}gate_proj.weight", (inner, hidden)
    yield f"{prefix}up_proj.weight", (inner, hidden)
    yield f"{prefix}down_proj.weight", (hidden, inner)
