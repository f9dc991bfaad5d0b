"""Recorded candidates of predicted tokens as tensors. Letters: `M` predicted tokens, `S` candidates of all of them, `V` vocabulary."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class Recorded(NamedTuple):
    """Candidates of token m are `ids[bounds[m] : bounds[m + 1]]`; a token without any says nothing."""

    ids: Tensor
    """[S] int64, below V."""
    token: Tensor
    """[S] int64, the token whose candidate it is."""
    said: Tensor
    """[M] bool, whether a token has candidates."""
    bounds: npt.NDArray[np.int64]
    """[M + 1], on the host: chunks are cut by it."""

    @property
    def complete(self) -> bool:
        """Whether all tokens have candidates; waits for no device."""
        return bool((np.diff(self.bounds) > 0).all())

    def rows(self, chosen: slice) -> Recorded:
        """Of neighbouring tokens."""
        start, stop, _ = chosen.indices(len(self.said))
        bounds = self.bounds[start : stop + 1]
        inside = slice(int(bounds[0]), int(bounds[-1]))
        return Recorded(self.ids[inside], self.token[inside] - start, self.said[chosen], bounds - bounds[0])

    def of(self, values_MV: Tensor) -> Tensor:
        """[S] what stands at the candidates."""
        return values_MV[self.token, self.ids]

    def support(self, vocab: int) -> Tensor:
        """[M, V] bool: the candidates."""
        kept = torch.zeros((len(self.said), vocab), dtype=torch.bool, device=self.ids.device)
        kept[self.token, self.ids] = True
        return kept
