"""How the tokens that a micro-batch predicts were drawn, as what `streamrl.algorithms.logprobs` takes. `M` predicted tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from streamrl.algorithms.logit_bias import LogitBias
from streamrl.algorithms.recorded import Recorded
from streamrl.core.batches import TrainBatch
from streamrl.core.candidates import restricted_tokens
from streamrl.core.packing import MicroBatch
from streamrl.schemas.candidates import CandidateSets
from streamrl.tensors.transfer import on_device


class Drawn(NamedTuple):
    """Beside their temperatures."""

    cut: dict[str, Any]
    """`top_p_M`, `top_k_M`, `min_p_M` and `recorded`; empty where nothing is cut off."""
    logit_bias: LogitBias | None

    @property
    def whole(self) -> bool:
        """Whether they were drawn from the model's own distribution."""
        return not self.cut and self.logit_bias is None


def drawn(batch: TrainBatch, micro: MicroBatch, device: torch.device) -> Drawn:
    """Of the tokens at `micro.target`."""
    target = micro.target
    top_p, top_k = batch.top_p[target], batch.top_k[target]
    min_p = np.zeros(0, np.float32) if batch.min_p is None else batch.min_p[target]
    cut: dict[str, Any] = {}
    if (top_p < 1).any() or (top_k > 0).any() or min_p.any():
        cut = {"top_p_M": on_device(top_p, device), "top_k_M": on_device(top_k.astype(np.int64), device)}
        cut["min_p_M"] = on_device(min_p, device) if min_p.any() else None
        if batch.candidates is not None:
            cut["recorded"] = recorded(batch.candidates.at(np.where(restricted_tokens(batch)[target], target, -1)), device)
    return Drawn(cut, logit_bias(batch, micro, device))


def recorded(sets: CandidateSets, device: torch.device) -> Recorded:
    """The same as tensors."""
    counts = sets.counts
    token = np.repeat(np.arange(len(counts)), counts)
    return Recorded(on_device(sets.ids.astype(np.int64), device), on_device(token, device), on_device(counts > 0, device), sets.bounds)


def logit_bias(batch: TrainBatch, micro: MicroBatch, device: torch.device) -> LogitBias | None:
    """What was added to their logits; None where that is nothing."""
    biases = batch.logit_biases
    if biases is None:
        return None
    found, of = np.unique(biases.of[micro.target], return_inverse=True)
    if not (found >= 0).any():
        return None
    tables = list(biases.tables())
    chosen = [tables[index] for index in found.tolist() if index >= 0]

    def tensors(place: int) -> tuple[Tensor, ...]:
        return tuple(on_device(table[place], device) for table in chosen)

    return LogitBias(on_device((of - (found[0] < 0)).astype(np.int64), device), tensors(0), tensors(1))
