"""The off-policy correction of a batch or a micro-batch: one weight and one decision for each token, from `loss.correction`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from streamrl.algorithms.importance import importance_weights
from streamrl.algorithms.nonfinite import finite_tokens
from streamrl.algorithms.rejection import accept, veto
from streamrl.algorithms.sequences import Selected, Sequences
from streamrl.algorithms.staleness_weights import decay_weights, fresh
from streamrl.config.loss import CorrectionConfig


class Correction(NamedTuple):
    """What a policy loss is multiplied by. Shaped as the tokens, without gradient."""

    weights: Tensor
    """0 where `keep` is false."""
    keep: Tensor
    """Bool: trained, finite, and not rejected. Losses divide by what was there before it: a rejected token keeps its place."""
    metrics: dict[str, Tensor]
    """Per-token metrics, summed with the weights of the reduction as the loss is."""
    sums: Tensor
    """[2] float64: sum and number of the importance weights of the trained, finite tokens, rejected ones included and before any decay by
    age. Added up over the batch's parts they give `importance.normalization`."""

    def scaled(self, factor: float) -> Correction:
        """The same with every weight times `factor`."""
        return self._replace(weights=self.weights * factor)


def correct(proximal: Tensor, sampler: Tensor, staleness: Tensor, sequences: Sequences, config: CorrectionConfig) -> Correction:
    """Weights w of the tokens, and which of them are kept.

    With l = log pi - log mu: importance weights of l (`importance.importance_weights`), times decay ^ age; kept are finite tokens that
    pass the rejection (`rejection.accept`), are in no vetoed sample and are young enough. Everything is computed in float64.

    Batch normalisation takes two steps, because the mean is the whole batch's: `sums` of all parts are added up, and the correction is
    `scaled` by `normalization(sums)`. It makes the mean of the importance weights 1 before rejection, which thus cannot change the others'
    weights, and before the decay by age, which would else have no effect on a batch whose tokens are all equally old.

    Args:
        proximal: log pi of the proximal policy, or of the current one (`ratio = "current"`), where it may carry a gradient: none is used.
        sampler: log mu.
        staleness: ages in versions, int.
        sequences: which tokens are trained, and of which sample; what the others hold is never read.
        config: the section `loss.correction`; `ratio` and `normalize` are the caller's.
    """
    with torch.no_grad():
        finite = finite_tokens(sequences.mask, proximal, sampler)
        among = Selected(sequences, finite)
        log_ratio = proximal.double() - sampler.double()
        weights, metrics = importance_weights(log_ratio, among, kind=config.kind, level=config.level, low=config.low, high=config.high)
        sums = torch.stack([weights.sum(), finite.sum().double()])
        keep = finite
        if config.reject != "none":
            passed, found = accept(
                log_ratio, among, measure=config.reject, level=config.reject_level, low=config.reject_low, high=config.reject_high
            )
            keep, metrics = keep & passed, metrics | found
        if config.veto > 0.0:
            passed, found = veto(log_ratio, among, least=config.veto)
            keep, metrics = keep & passed, metrics | found
        if config.mask_staleness > 0:
            passed = fresh(staleness, config.mask_staleness)
            keep = keep & passed
            metrics["train/stale_masked_fraction"] = (sequences.mask & ~passed).double()
        if config.staleness_decay != 1.0:
            decay = decay_weights(staleness, config.staleness_decay).masked_fill(~finite, 0.0)
            weights = weights * decay
            metrics["train/staleness_weight"] = decay
        metrics["train/rejected_fraction"] = (finite & ~keep).double()
        weights = weights.masked_fill(~keep, 0.0)
        return Correction(weights.to(proximal.dtype), keep, {name: found.to(proximal.dtype) for name, found in metrics.items()}, sums)
