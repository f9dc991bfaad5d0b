"""Any Hugging Face causal LM over the slot cache: its own modules, with our attention in place of theirs.

transformers lets a model's attention be named; ours reads and writes the cache that lies on the attention module itself.
No mask function is registered for the name: transformers then makes no mask, and ours comes from the pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from streamrl.engines.local.cache import HeadShape, Pass, SlotCache
from streamrl.errors import EngineError

ATTENTION_NAME = "streamrl_slots"


class SlotState:
    """What the attention modules of one model share: the cache and the pass under way. `probe` collects shapes instead."""

    def __init__(self) -> None:
        self.cache: SlotCache | None = None
        self.step: Pass | None = None
        self.index: dict[int, Tensor] = {}
        """Cache index by number of key-value heads, for the pass under way."""
        self.probe: dict[int, HeadShape] = {}


class ModuleForward:
    """Prefill and decode through a model's own modules (`local_model.Forward`).

    Raises:
        EngineError: the architecture keeps other state than keys and values, or does not take a named attention.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._state = SlotState()
        AttentionInterface.register(ATTENTION_NAME, _attend)
        model.set_attn_implementation(ATTENTION_NAME)
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                module.streamrl_slots = self._state  # type: ignore[assignment]
        self._decoder = model.get_decoder()

    def head_shapes(self) -> Sequence[HeadShape]:
        """Heads of every layer, found by a pass over one token."""
        device = next(self._model.parameters()).device
        with torch.inference_mode():
            token = torch.zeros(1, 1, dtype=torch.long, device=device)
            self._decoder(input_ids=token, position_ids=token, use_cache=False)
        layers = self._model.config.get_text_config().num_hidden_layers
        shapes, self._state.probe = self._state.probe, {}
        if sorted(shapes) != list(range(layers)):
            raise EngineError(
                f"expected {layers} attention layers with keys and values in a {self._model.config.model_type} model, got {sorted(shapes)}",
                hint="models with recurrent state (Mamba, linear attention) cannot be decoded by the local engine",
            )
        return [shapes[layer] for layer in range(layers)]

    def attach(self, cache: SlotCache) -> None:
        """Use this cache from now on."""
        self._state.cache = cache

    def prefill(self, tokens: Tensor, step: Pass) -> None:
        """Run over tokens [m, T], right-padded prompts."""
        self._begin(step)
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        self._decoder(input_ids=tokens, position_ids=positions, use_cache=False)

    def decode(self, tokens: Tensor, step: Pass) -> Tensor:
        """One token a row, [n], to logits [n, V]."""
        self._begin(step)
        return self._model(input_ids=tokens[:, None], position_ids=step.positions[:, None], use_cache=False).logits[:, 0]

    def _begin(self, step: Pass) -> None:
        self._state.step = step
        self._state.index.clear()


def check_config(config: PretrainedConfig) -> None:
    """Refuse what the attention below would compute wrongly."""
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ())
    if strange := kinds - {"full_attention", "sliding_attention"}:
        raise EngineError(
            f"expected layers of full or sliding attention in a {config.model_type} model, got {sorted(strange)}",
            hint="the local engine keeps keys and values only",
            layers=sorted(strange),
        )


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: [B, H, T, D] queries, [B, N, T, D] keys and values to [B, T, H, Dv]."""
    state: SlotState = module.streamrl_slots  # type: ignore[assignment]
    layer: int = module.layer_idx  # type: ignore[assignment]
    if kwargs.get("s_aux") is not None:
        raise EngineError("expected plain softmax attention, got attention sinks", hint="the local engine does not have them")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    cache, step = state.cache, state.step
    if cache is None or step is None:
        state.probe[layer] = HeadShape(key.shape[1], key.shape[-1], value.shape[-1])
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None
    if step.kind == "prefill":
        cache.write_prefill(layer, step, key, value)
        return _attend_prefill(query, key, value, scale, sliding_window, softcap), None
    if key.shape[1] not in state.index:
        state.index[key.shape[1]] = cache.flat_index(step, key.shape[1])
    cache.write_decode(layer, state.index[key.shape[1]], key[:, :, 0], value[:, :, 0])
    hidden = step.hidden
    if sliding_window is not None and step.longest > sliding_window:
        hidden = _window(step, sliding_window, query.dtype)
    return cache.attend_decode(layer, step, query[:, :, 0], scale=scale, hidden=hidden, softcap=softcap)[:, None], None


def _attend_prefill(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float | None) -> Tensor:
    length = query.shape[2]
    if softcap is None and (window is None or length <= window):
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
        return out.transpose(1, 2)
    at = torch.arange(length, device=query.device)
    seen = at[:, None] >= at
    if window is not None:
        seen &= at[:, None] - at < window
    if softcap is None:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale, enable_gqa=True).transpose(1, 2)
    repeats = query.shape[1] // key.shape[1]
    scores = torch.matmul(query, key.repeat_interleave(repeats, 1).transpose(2, 3)) * scale
    scores = (torch.tanh(scores / softcap) * softcap).masked_fill(~seen, -torch.inf)
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, value.repeat_interleave(repeats, 1)).transpose(1, 2)


def _window(step: Pass, window: int, dtype: torch.dtype) -> Tensor:
    at = torch.arange(step.longest, device=step.positions.device)
    distance = step.positions[:, None] - at
    outside = (distance < 0) | (distance >= window)
    return torch.zeros(outside.shape, dtype=dtype, device=outside.device).masked_fill_(outside, -torch.inf)[:, None]
