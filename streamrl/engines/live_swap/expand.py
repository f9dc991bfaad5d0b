"""Names that checkpoints use for what a transformers model keeps fused: SGLang's load_weights knows the checkpoint's names only."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import Tensor

_EXPERTS = re.compile(r"^(?P<layer>.*\.mlp\.experts)\.(?P<kind>gate_up_proj|down_proj)$")


def expand(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensor under the names that load_weights takes; views of it, never copies.

    transformers keeps the experts of a layer in two tensors, `gate_up_proj` [experts, 2 * intermediate, hidden] and `down_proj`
    [experts, hidden, intermediate]; a checkpoint has three matrices for each expert.
    """
    match = _EXPERTS.match(name)
    if match is None or tensor.dim() != 3:
        yield name, tensor
        return
    for expert in range(tensor.shape[0]):
        prefix = f"{match['layer']}.{expert}"
        if match["kind"] == "down_proj":
            yield f"{prefix}.down_proj.weight", tensor[expert]
        else:
            half = tensor.shape[1] // 2
            yield f"{prefix}.gate_proj.weight", tensor[expert, :half]
            yield f"{prefix}.up_proj.weight", tensor[expert, half:]
