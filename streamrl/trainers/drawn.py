"""How the tokens that a micro-batch predicts were drawn, as what `streamrl.algorithms.logprobs` takes. `M` predicted tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from streamrl.algorithms.divergences import Divergence, binary_divergence, candidate_divergence
from streamrl.algorithms.logit_bias import LogitBias
from streamrl.algorithms.recorded import Recorded
from streamrl.core.batches import TrainBatch
from streamrl.core.candidates import restricted_tokens
from streamrl.core.packing import Indices, MicroBatch
from streamrl.errors import TrainingError
from streamrl.schemas.candidates import CandidateSets, no_candidates
from streamrl.tensors.transfer import on_device


class Drawn(NamedTuple):
    """Beside their temperatures."""

    cut: dict[str, Any]
    """`top_p_M`, `top_k_M`, `min_p_M` and `recorded`; empty where nothing is cut off."""
    logit_bias: LogitBias | None
    likeliest: Likeliest | None = None
    """Where it is asked how far the policy has gone from the sampler by these."""

    @property
    def whole(self) -> bool:
        """Whether their own log-probs under the model's own distribution are all that is wanted."""
        return not self.cut and self.logit_bias is None and self.likeliest is None

    @property
    def wanted(self) -> dict[str, Any]:
        """What a function of `streamrl.algorithms.logprobs` is given of them beside their temperatures."""
        return {**self.cut, "logit_bias": self.logit_bias, "candidates": None if self.likeliest is None else self.likeliest.recorded}

    def told(self, found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What that gave, with how far the policy has gone, [M], in place of the candidates' log-probs where these were asked for."""
        return found if self.likeliest is None else (*found[:2], self.likeliest.apart(*found).to(found[0].dtype))


class Likeliest(NamedTuple):
    """The candidates of the tokens, as their sampler saw them."""

    divergence: Divergence
    recorded: Recorded
    logprobs: Tensor
    """[S] log mu of the candidates."""
    sampler: Tensor
    """[M] log mu of the tokens."""
    whole: Tensor
    """[M] bool, whether they are all that could be drawn."""

    def apart(self, logprobs: Tensor, _: Tensor, known: Tensor) -> Tensor:
        """[M] how far it is from mu to pi, [M] log pi and [S] log pi of the candidates; by the token alone where none are known."""
        own = binary_divergence(logprobs.detach(), self.sampler.to(logprobs.dtype), self.divergence)
        return torch.where(
            self.recorded.said, candidate_divergence(known, self.logprobs, self.recorded, self.whole, self.divergence), own.double()
        )


def drawn(batch: TrainBatch, micro: MicroBatch, device: torch.device, divergence: Divergence | None = None) -> Drawn:
    """Of the tokens at `micro.target`; with `divergence` it is asked how far the policy has gone, by the sampler's likeliest tokens."""
    target = micro.target
    top_p, top_k = batch.top_p[target], batch.top_k[target]
    min_p = np.zeros(0, np.float32) if batch.min_p is None else batch.min_p[target]
    cut: dict[str, Any] = {}
    if (top_p < 1).any() or (top_k > 0).any() or min_p.any():
        cut = {"top_p_M": on_device(top_p, device), "top_k_M": on_device(top_k.astype(np.int64), device)}
        cut["min_p_M"] = on_device(min_p, device) if min_p.any() else None
        if batch.candidates is not None:
            cut["recorded"] = recorded(batch.candidates.at(np.where(restricted_tokens(batch)[target], target, -1)), device)
    return Drawn(cut, logit_bias(batch, micro, device), None if divergence is None else _likeliest(batch, target, device, divergence))


def recorded(sets: CandidateSets, device: torch.device) -> Recorded:
    """The same as tensors."""
    counts = sets.counts
    token = np.repeat(np.arange(len(counts)), counts)
    return Recorded(on_device(sets.ids.astype(np.int64), device), on_device(token, device), on_device(counts > 0, device), sets.bounds)


def _likeliest(batch: TrainBatch, target: Indices, device: torch.device, divergence: Divergence) -> Likeliest:
    sets = no_candidates(len(target)) if batch.candidates is None else batch.candidates.at(target)
    logprobs = np.zeros(0, np.float32) if sets.logprobs is None else sets.logprobs
    if len(logprobs) != len(sets.ids):
        raise TrainingError("expected log-probs of the candidates, by which loss.dppo_divergence goes, got none", field="candidates")
    numbers = logprobs, batch.sampler_logprobs[target], restricted_tokens(batch)[target]
    return Likeliest(divergence, recorded(sets, device), *(on_device(one, device) for one in numbers))


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
