"""The off-policy correction of a batch or a micro-batch: one weight and one decision for each token, from `loss.correction`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from streamrl.algorithms.importance import Level, importance_weights
from streamrl.algorithms.rejection import accept, veto
from streamrl.algorithms.sequences import Selected, Sequences, mean
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
    """[2] float64: sum and number of the importance weights of the trained, finite tokens (at level `sequence` and `geometric` of the
    samples that have some), rejected ones included and before any decay by age. Added up over the batch's parts they give
    `importance.normalization`."""

    def scaled(self, factor: float) -> Correction:
        """The same with every weight times `factor`."""
        return self._replace(weights=self.weights * factor)


def correct(proximal: Tensor, sampler: Tensor, staleness: Tensor, sequences: Sequences, config: CorrectionConfig) -> Correction:
    """Weights w of the tokens, and which of them are kept.

    With l = log pi - log mu: importance weights of l (`importance.importance_weights`), times decay ^ age; kept are finite tokens that
    meet every criterion of the rejection (`rejection.accept`), are in no vetoed sample and are young enough. All of it in float64.

    Batch normalisation takes two steps, because the mean is the whole batch's: `sums` of all parts are added up, and the correction is
    `scaled` by `normalization(sums)`. It makes the mean of the importance weights 1, over tokens at level `token` and else over samples,
    whatever their lengths: before rejection, which thus cannot change the others' weights, and before the decay by age, which would else
    have no effect on a batch whose tokens are all equally old.

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
        sums = _sums(weights, among, config.level)
        keep = finite
        for one in config.reject:
            passed, found = accept(log_ratio, among, measure=one.measure, level=one.level, low=one.low, high=one.high)
            # Of several criteria a metric says which tokens any of them rejects.
            found = {name: values.maximum(metrics.get(name, values)) for name, values in found.items()}
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
        left_out = finite & ~keep
        if config.kind == "mask":
            left_out = left_out | (metrics["train/mis_tis_mask_fraction_low"] + metrics["train/mis_tis_mask_fraction_high"] > 0)
        metrics["train/rejected_fraction"] = left_out.double()
        weights = weights.masked_fill(~keep, 0.0)
        return Correction(weights.to(proximal.dtype), keep, {name: found.to(proximal.dtype) for name, found in metrics.items()}, sums)


def _sums(weights: Tensor, sequences: Sequences, level: Level) -> Tensor:
    """[2] float64, see `Correction.sums`: weights 0.5, 0.5, 2 of samples 0, 0, 1 give [3, 3] by token and [2.5, 2] by sample."""
    if level == "token":
        return torch.stack([weights.sum(), sequences.mask.sum().double()])
    trained_S = sequences.sum(sequences.mask.double()) > 0
    return torch.stack([mean(sequences, weights)[trained_S].sum(), trained_S.sum().double()])


def fresh(staleness: Tensor, limit: int) -> Tensor:
    """Bool: tokens that are at most `limit` versions old.

    Args:
        staleness: ages in versions, int, any shape.
        limit: the greatest age that is kept.
    """
    return staleness <= limit


def decay_weights(staleness: Tensor, decay: float) -> Tensor:
    """Weights decay ^ age, float64: 1 at age 0 whatever the decay.

    Args:
        staleness: ages in versions, int, any shape.
        decay: in [0, 1]; 1 leaves every weight as it is.
    """
    return decay ** staleness.double()


def log_linear_proximal(logprobs: Tensor, sampler_logprobs: Tensor, staleness: Tensor, *, progress: float) -> Tensor:
    """Interpolation: log pi_prox = log mu + alpha (log pi - log mu), alpha = (v_prox - v_behave) / (v - v_behave), without gradient.

    The log-prob of a token is taken to move at a constant pace from the version that sampled it (v_behave) to the policy under training
    (v); the proximal policy lies between them at v_prox. Here v_prox is the version the batch is trained from, so v_prox - v_behave is the
    token's age, and after k of the batch's K optimizer steps the policy is at v = v_prox + k / K:

        alpha = age / (age + k / K).

    At the batch's first step the policy *is* pi_prox and alpha = 1 gives it exactly, for tokens of age 0 too, where the quotient is 0 / 0.
    Later, a token of age 0 was sampled by pi_prox itself: alpha = 0 and pi_prox = mu. Counting a batch as one version from its first step
    on (v_prox = v - 1, progress = 1) is the published form, alpha = age / (age + 1).

    Args:
        logprobs: log pi of the policy under training, any shape.
        sampler_logprobs: log mu, of that shape. Where either is not finite, neither is the result: drop these tokens.
        staleness: ages in versions, int >= 0, of that shape.
        progress: k / K, in [0, 1].
    """
    with torch.no_grad():
        age = staleness.to(logprobs.dtype)
        span = age + progress
        alpha = torch.where(span > 0.0, age / span, 1.0)
        return torch.lerp(sampler_logprobs, logprobs, alpha)


class Finite(NamedTuple):
    """Log-probs that are safe to compute with."""

    keep: Tensor
    """Bool, shaped as the tokens: trained, and every log-prob finite."""
    values: tuple[Tensor, ...]
    """The log-probs with 0 where `keep` is false; the gradient there is exactly 0."""
    metrics: dict[str, Tensor]
    """`train/nonfinite_tokens`: 1 at each trained token that was dropped, else 0. It is summed as it is, without weights."""


def finite_tokens(mask: Tensor, *logprobs: Tensor) -> Tensor:
    """Bool, shaped as the tokens: those in `mask` at which all `logprobs` are finite."""
    keep = mask
    for values in logprobs:
        keep = keep & values.isfinite()
    return keep


def drop_nonfinite(mask: Tensor, *logprobs: Tensor) -> Finite:
    """Leave out trained tokens at which any of the log-probs is not finite, and count them.

    A NaN times a weight of 0 is NaN, and so is its gradient: such tokens have to be replaced before anything is computed from them.
    Whoever computes a loss from `values` multiplies it by `keep`; the token keeps its place in the loss's denominator.

    Args:
        mask: bool, which places hold a trained token.
        logprobs: of trainer, sampler, reference ... shaped as `mask`; what stands outside it is never read.
    """
    keep = finite_tokens(mask, *logprobs)
    values = tuple(one.masked_fill(~keep, 0.0) for one in logprobs)
    return Finite(keep, values, {"train/nonfinite_tokens": (mask & ~keep).to(logprobs[0].dtype)})
