"""Tokens whose log-probs are NaN or infinite: found, counted, and replaced before anything is computed from them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


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
