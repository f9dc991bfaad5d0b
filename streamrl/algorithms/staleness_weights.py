"""Masking and weighting by a token's age: the versions trained between the one that sampled it and the one trained from."""

from __future__ import annotations

from torch import Tensor


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
