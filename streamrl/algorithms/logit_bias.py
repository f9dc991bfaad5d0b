"""What is added to the logits of some tokens before they are divided by the temperature. `M` predicted tokens, `D` columns of a block."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class LogitBias(NamedTuple):
    """Few different biases, of few tokens each, over many predicted tokens."""

    of_M: Tensor
    """[M] int64: which of the biases is each token's; -1: none."""
    ids: tuple[Tensor, ...]
    """Of each bias [k] int64, the columns that it changes, none of them twice; those outside the logits are another rank's."""
    values: tuple[Tensor, ...]
    """Of each bias [k], what is added there."""

    def rows(self, chosen: slice | Tensor) -> LogitBias:
        """Of some of the predicted tokens."""
        return self._replace(of_M=self.of_M[chosen])

    def columns(self, start: int, stop: int) -> LogitBias:
        """Of the columns `start` .. `stop - 1` alone, counted from the first of them."""
        inside = [(ids >= start) & (ids < stop) for ids in self.ids]
        ids = tuple(own[mask] - start for own, mask in zip(self.ids, inside, strict=True))
        return self._replace(ids=ids, values=tuple(own[mask] for own, mask in zip(self.values, inside, strict=True)))

    def add_(self, logits_MD: Tensor, scale: float = 1.0) -> Tensor:
        """Add `scale` times the bias to logits, in place; gives them back."""
        for index, (ids, values) in enumerate(zip(self.ids, self.values, strict=True)):
            rows = (self.of_M == index).nonzero()
            if len(rows) and len(ids):
                logits_MD[rows, ids] = logits_MD[rows, ids] + scale * values.to(logits_MD.dtype)
        return logits_MD

    def added(self, logits_MD: Tensor) -> Tensor:
        """Logits with the bias, where they are part of a graph."""
        with torch.no_grad():
            change = self.add_(torch.zeros_like(logits_MD))
        return logits_MD + change
