"""The critic's loss."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Squared error, which stops pulling once a value has moved far: L = max((V - R)^2, (V_old + clamp(V - V_old, +-clip) - R)^2).

    arXiv 1707.06347's clipping for values. A value more than `clip` from V_old on R's side has no gradient, for the second term is the
    larger; on the other side it has. There is no factor 1/2.

    Args:
        values: V of the critic under training, [M] packed or [N, L] padded, float32 or float64; carries the gradient.
        old_values: V before the batch's first step, of the same shape.
        returns: R, of the same shape.
        clip: in units of the reward; 0: off, L = (V - R)^2.

    Returns:
        Loss of each token, and the metric `train/value_clipfrac` (1 where the clipped term is the larger).
    """
    free = (values - returns).square()
    if not clip:
        return free, {"train/value_clipfrac": torch.zeros_like(free)}
    old = old_values.detach()
    bounded = (old + (values - old).clamp(-clip, clip) - returns).square()
    return torch.where(bounded > free, bounded, free), {"train/value_clipfrac": (bounded > free).to(free.dtype)}
