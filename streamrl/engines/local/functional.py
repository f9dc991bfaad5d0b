"""The fast forward pass: the Llama family (Llama, Qwen2, Qwen3) written as about twenty tensor operations a layer.

Letters: `n` rows, `m` prompts, `T` longest, `E` hidden width, `H` query heads, `N` key-value heads, `D` head width.
Query, key and value matrices lie without a gap in the weight buffers, as do gate and up: each group is one matrix product.
The result equals transformers' modules up to the order of summation (tests: 1e-5).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig

from streamrl.engines.local.cache import HeadShape, Pass, SlotCache

MODEL_TYPES = ("llama", "qwen2", "qwen3")
GLUED = ("k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias", "up_proj.weight")
"""Parameters that follow their predecessor in a weight buffer without a gap."""
ORDER = (
    "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight",
    "self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias",
    "self_attn.o_proj.weight", "self_attn.q_norm.weight", "self_attn.k_norm.weight",
    "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight",
    "input_layernorm.weight", "post_attention_layernorm.weight",
)  # fmt: skip
"""All parameters of a layer, in the order of the buffer; those a model lacks are left out."""


def supports(config: PretrainedConfig, names: Sequence[str]) -> bool:
    """Whether this file knows everything a model of this configuration and these parameter names does."""
    if config.model_type not in MODEL_TYPES or config.hidden_act != "silu":
        return False
    if set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        return False
    known = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    known |= {f"model.layers.{layer}.{name}" for layer in range(config.num_hidden_layers) for name in ORDER}
    return set(names) <= known and config.rope_parameters["rope_type"] in ("default", "linear", "llama3", "yarn")


def buffer_order(config: PretrainedConfig, names: Sequence[str]) -> list[str]:
    """The parameter names in the order in which their bytes must lie in a buffer."""
    layered = [f"model.layers.{layer}.{name}" for layer in range(config.num_hidden_layers) for name in ORDER]
    present = set(names)
    return [name for name in layered if name in present] + [name for name in names if not name.startswith("model.layers.")]


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """One layer's weights: views of a buffer, but for `norm_qk`."""

    norm_in: Tensor
    """[E]"""
    qkv: Tensor
    """[(H + 2 N) D, E]"""
    qkv_bias: Tensor | None
    norm_qk: Tensor | None
    """[H + N, D]: the query norm for the first H heads, the key norm for the rest."""
    out: Tensor
    """[E, H D]"""
    norm_mlp: Tensor
    gate_up: Tensor
    """[2 I, E]"""
    down: Tensor
    """[E, I]"""


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """One version's weights."""

    embed: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor


class FunctionalForward:
    """Prefill and decode (`local_model.Forward`). `use` chooses the weights, which `collect` makes from a buffer's views.

    Args:
        config: the model's.
        rotary: transformers' rotary module, asked once for its cosines and sines.
        max_len: longest sequence.
        dtype: type of the weights.
    """

    def __init__(self, config: PretrainedConfig, rotary: nn.Module, *, max_len: int, dtype: torch.dtype, device: torch.device) -> None:
        self._config = config
        self._eps = config.rms_norm_eps
        self._heads = config.num_attention_heads
        self._kv_heads = config.num_key_value_heads
        self._width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._scale = self._width**-0.5
        self._weights: Weights | None = None
        self._cache: SlotCache | None = None
        with torch.inference_mode():
            positions = torch.arange(max_len, device=device)[None]
            cos, sin = rotary(torch.zeros(1, dtype=dtype, device=device), positions)
        half = self._width // 2
        self._cos = cos[0].clone()
        # rotate_half(x) * sin = roll(x, half) * signed sin, one operation less.
        self._sin = torch.cat((-sin[0][:, :half], sin[0][:, half:]), -1)

    def head_shapes(self) -> Sequence[HeadShape]:
        """Heads of every layer."""
        return [HeadShape(self._kv_heads, self._width, self._width)] * self._config.num_hidden_layers

    def attach(self, cache: SlotCache) -> None:
        """Use this cache from now on."""
        self._cache = cache

    def collect(self, views: Mapping[str, Tensor]) -> Weights:
        """Weights of one buffer from its parameters' views; only the small query and key norms are copied."""
        heads, kv_heads, width, hidden = self._heads, self._kv_heads, self._width, self._config.hidden_size
        rows = (heads + 2 * kv_heads) * width
        layers = []
        for layer in range(self._config.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            bias = views.get(prefix + "self_attn.q_proj.bias")
            norm_qk = None
            if (q_norm := views.get(prefix + "self_attn.q_norm.weight")) is not None:
                k_norm = views[prefix + "self_attn.k_norm.weight"]
                norm_qk = torch.cat((q_norm.expand(heads, width), k_norm.expand(kv_heads, width)))
            layers.append(
                Layer(
                    norm_in=views[prefix + "input_layernorm.weight"],
                    qkv=_glued(views[prefix + "self_attn.q_proj.weight"], (rows, hidden)),
                    qkv_bias=None if bias is None else _glued(bias, (rows,)),
                    norm_qk=norm_qk,
                    out=views[prefix + "self_attn.o_proj.weight"],
                    norm_mlp=views[prefix + "post_attention_layernorm.weight"],
                    gate_up=_glued(views[prefix + "mlp.gate_proj.weight"], (2 * self._config.intermediate_size, hidden)),
                    down=views[prefix + "mlp.down_proj.weight"],
                )
            )
        embed = views["model.embed_tokens.weight"]
        return Weights(embed=embed, layers=tuple(layers), norm=views["model.norm.weight"], head=views.get("lm_head.weight", embed))

    def use(self, weights: Weights) -> None:
        """Serve these weights from the next pass on."""
        self._weights = weights

    def prefill(self, tokens: Tensor, step: Pass) -> None:
        """Run over tokens [m, T], right-padded prompts; the last layer only makes keys and values."""
        weights, cache = self._ready()
        m, length = tokens.shape
        x = functional.embedding(tokens.reshape(-1), weights.embed)
        cos, sin = self._cos[:length].repeat(m, 1)[:, None], self._sin[:length].repeat(m, 1)[:, None]
        for number, layer in enumerate(weights.layers):
            queries, keys, values = self._project(x, layer, cos, sin)
            keys = keys.view(m, length, self._kv_heads, self._width).transpose(1, 2)
            values = values.view(m, length, self._kv_heads, self._width).transpose(1, 2)
            cache.write_prefill(number, step, keys, values)
            if number + 1 == len(weights.layers):
                return
            queries = queries.view(m, length, self._heads, self._width).transpose(1, 2)
            out = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=self._scale, enable_gqa=True)
            x = self._finish(x, layer, out.transpose(1, 2).reshape(m * length, -1))

    def decode(self, tokens: Tensor, step: Pass) -> Tensor:
        """One token a row, [n], to logits [n, V]."""
        weights, cache = self._ready()
        x = functional.embedding(tokens, weights.embed)
        cos, sin = self._cos[step.positions][:, None], self._sin[step.positions][:, None]
        index = cache.flat_index(step, self._kv_heads)
        for number, layer in enumerate(weights.layers):
            queries, keys, values = self._project(x, layer, cos, sin)
            cache.write_decode(number, index, keys, values)
            out = cache.attend_decode(number, step, queries, scale=self._scale, hidden=step.hidden)
            x = self._finish(x, layer, out.flatten(1))
        return functional.linear(self._norm(x, weights.norm), weights.head)

    def _ready(self) -> tuple[Weights, SlotCache]:
        assert self._weights is not None and self._cache is not None
        return self._weights, self._cache

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, self._eps)

    def _project(self, x: Tensor, layer: Layer, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[t, E] to queries [t, H, D], keys [t, N, D] (both rotated) and values [t, N, D]."""
        qkv = functional.linear(self._norm(x, layer.norm_in), layer.qkv, layer.qkv_bias).view(len(x), -1, self._width)
        rotated = self._heads + self._kv_heads
        qk = qkv[:, :rotated]
        if layer.norm_qk is not None:
            qk = functional.rms_norm(qk, (self._width,), None, self._eps) * layer.norm_qk
        qk = qk * cos + torch.roll(qk, self._width // 2, -1) * sin
        return qk[:, : self._heads], qk[:, self._heads :], qkv[:, rotated:]

    def _finish(self, x: Tensor, layer: Layer, attended: Tensor) -> Tensor:
        """The rest of a layer: output projection, feed-forward, both residual sums."""
        x = torch.addmm(x, attended, layer.out.t())
        gate, up = functional.linear(self._norm(x, layer.norm_mlp), layer.gate_up).chunk(2, -1)
        return torch.addmm(x, functional.silu(gate) * up, layer.down.t())


def _glued(first: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A view of `shape` that begins at `first` and runs on into the parameters that follow it in the buffer."""
    strides = (shape[1], 1) if len(shape) == 2 else (1,)
    return first.as_strided(shape, strides)
