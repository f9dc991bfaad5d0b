"""Routed experts as engines say them, and what a model's `config.json` says of its experts."""

from __future__ import annotations

import base64
import binascii
import json
from pathlib import Path

import msgspec
import numpy as np

from streamrl.errors import SchemaError
from streamrl.schemas.experts import RoutedExperts, compact


class Routing(msgspec.Struct, frozen=True):
    """What a model's `config.json` says about its experts."""

    layers: int
    per_token: int
    experts: int


def read_routing(model_dir: Path) -> Routing | None:
    """The routing of the model in `model_dir`; None for a model without experts."""
    described = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    described = described.get("text_config") or described
    experts = next((described[key] for key in ("num_experts", "n_routed_experts", "num_local_experts") if described.get(key)), 0)
    if not experts or not described.get("num_experts_per_tok"):
        return None
    return Routing(int(described["num_hidden_layers"]), int(described["num_experts_per_tok"]), int(experts))


def from_sglang(text: str, routing: Routing, *, tokens: int) -> RoutedExperts:
    """SGLang's base64 of int32 [tokens, layers * experts per token] in the compact dtype.

    Layers without experts are zeros in it.

    Raises:
        SchemaError: another number of tokens, or an id that the model has no expert for.
    """
    try:
        ids = np.frombuffer(base64.b64decode(text, validate=True), "<i4")
    except (binascii.Error, ValueError) as error:
        raise SchemaError(f"expected routed experts as base64 of int32, got: {error}") from error
    shape = (tokens, routing.layers, routing.per_token)
    if ids.size != tokens * routing.layers * routing.per_token:
        raise SchemaError(f"expected routed experts of shape {shape}, got {ids.size} numbers", shape=shape, numbers=ids.size)
    if ids.size and (ids.min() < 0 or ids.max() >= routing.experts):
        raise SchemaError(
            f"expected experts 0 .. {routing.experts - 1}, got {ids.min()} .. {ids.max()}", experts=routing.experts, highest=int(ids.max())
        )
    return compact(ids.reshape(shape), routing.experts)


def from_text(dtype: str, shape: tuple[int, int, int], text: str) -> RoutedExperts:
    """What `RoutedExperts.text` gave, read again; raises SchemaError when it is not."""
    try:
        found = RoutedExperts(dtype, shape, base64.b64decode(text, validate=True))
    except binascii.Error as error:
        raise SchemaError(f"expected routed experts in base64, got: {error}") from error
    found.array()
    return found
