"""Useful floating-point operations of a training step, and the peak of a device, for the model FLOPs utilisation (MFU, arXiv 2204.02311).

The convention: 6 operations a parameter and token, forward and backward together. The input embedding is looked up and does not count; the
output head counts at trained tokens only; of experts those that a token meets. Attention counts what causal masks leave of the samples' own
lengths, half of their squares. A sample's tokens are its prompt's and its answer's, also where a group's prompt is computed once. Nothing
is counted twice: not what activation checkpointing computes again, nor scores before the step, references and critics. Their time counts,
and the optimizer's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

PEAKS: Mapping[str, float] = MappingProxyType({"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12})
"""FLOP/s of dense matrix products in bfloat16 by device name, from the makers' data sheets."""
CONVENTION = (
    "6 FLOPs a parameter and token without the input embedding, the head at trained tokens only, causal attention by the samples' lengths, "
    "no recomputation; the optimizer's time is included"
)
"""The convention in one line, to stand beside a figure."""

_EXPERTS = re.compile(r"\.experts\.")
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_LATENT = ("kv_lora_rank", "qk_nope_head_dim")
"""Of multi-head latent attention, whose `head_dim` is a part of a head alone."""


class ModelFlops(msgspec.Struct, frozen=True, kw_only=True):
    """What a causal language model multiplies."""

    body: float
    """Parameters that a token meets between the input embedding and the output head."""
    head: float
    """Parameters of the output head."""
    attention: float
    """Layers x heads x dimensions of a head."""

    def step(self, lengths: npt.NDArray[np.integer], trained: int) -> float:
        """Useful FLOPs of one forward and backward pass over samples.

        Args:
            lengths: [N] tokens of each sample, its prompt's included.
            trained: tokens that are trained on, of all samples.
        """
        exact = lengths.astype(np.float64)
        # Forward: 2 products of 2 FLOPs a number, over half of the square; forward and backward: three times that.
        return 6 * self.body * float(exact.sum()) + 6 * self.head * trained + 6 * self.attention * float((exact**2).sum())


def model_flops(config: Any, body: Iterable[tuple[str, int]], head: int) -> ModelFlops | None:
    """What a model multiplies; None where this convention has no answer.

    That is where layers see a part of a sample, have no heads, or heads whose widths differ between keys and values (multi-head latent
    attention), and where nobody says how many experts a token meets.

    Args:
        config: of the text model, as transformers has it.
        body: name and number of elements of each parameter but the input embedding's and the head's.
        head: elements of the output head.
    """
    heads: int | None = getattr(config, "num_attention_heads", None)
    if not heads or not sees_all(config) or any(getattr(config, name, None) is not None for name in _LATENT):
        return None
    met = 0.0
    for name, count in body:
        share = _share_of_experts(config) if _EXPERTS.search(name) else 1.0
        if share is None:
            return None
        met += share * count
    width: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    return ModelFlops(body=met, head=head, attention=config.num_hidden_layers * heads * width)


def flops_of(module: Any) -> ModelFlops | None:
    """`model_flops` of a causal language model of transformers."""
    embedding, head = module.get_input_embeddings().weight, module.get_output_embeddings().weight
    body = [(name, p.numel()) for name, p in module.get_decoder().named_parameters() if p is not embedding]
    return model_flops(module.config.get_text_config(), body, head.numel())


def peak_flops(device: str, dtype: str) -> float | None:
    """FLOP/s that a device of that name reaches at most with parameters of that type; None where it is not known."""
    return PEAKS.get(device) if dtype == "bfloat16" else None


def sees_all(config: Any) -> bool:
    """Whether every layer attends to all that is before a token: False for sliding windows, linear attention, state spaces, encoders.

    Args:
        config: of the text model, as transformers has it.
    """
    windows = windows_of(config)
    return windows is not None and all(window is None for window in windows)


def windows_of(config: Any) -> list[int | None] | None:
    """Return the tokens that each layer attends to, the query's own among them, None: all before it; None where a layer does otherwise.

    Args:
        config: of the text model, as transformers has it.
    """
    kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    if kinds is None:
        windowed = window is not None and getattr(config, "use_sliding_window", True)
        kinds = ["sliding_attention" if windowed else "full_attention"] * getattr(config, "num_hidden_layers", 1)
    all_ways = any(getattr(config, name, False) for name in ("is_encoder_decoder", "use_bidirectional_attention"))
    known = {"full_attention"} if window is None else {"full_attention", "sliding_attention"}
    if all_ways or set(kinds) - known:
        return None
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _share_of_experts(config: Any) -> float | None:
    of_all = next((count for name in _EXPERT_COUNTS if (count := getattr(config, name, None))), None)
    of_token = getattr(config, "num_experts_per_tok", None)
    return of_token / of_all if of_all and of_token else None
