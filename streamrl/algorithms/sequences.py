"""Which tokens belong to which sequence, in the two layouts that losses meet: packed and padded.

Losses and corrections that look at whole sequences (GSPO, sequence-level importance sampling, rejection) are written once against
`Sequences` and give the same numbers in both layouts. Letters: `M` packed tokens, `S` sequences, `N` rows, `L` row length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn.functional import all_reduce

from streamrl.core.batches import TrainBatch, samples_at


class Sequences(Protocol):
    """Sums over sequences and back. Values are shaped as the layout's tokens are."""

    @property
    def mask(self) -> Tensor:
        """Which places hold a trained token, bool, shaped as the tokens."""
        ...

    def sum(self, values: Tensor) -> Tensor:
        """[S] sums over each sequence's trained tokens; differentiable."""
        ...

    def max(self, values: Tensor) -> Tensor:
        """[S] maxima over each sequence's trained tokens, -inf where it has none; without gradient."""
        ...

    def spread(self, values_S: Tensor) -> Tensor:
        """Each sequence's value at each of its tokens, shaped as the tokens."""
        ...


class Packed:
    """Trained tokens one after the other, [M].

    Args:
        sequence_M: [M] int64 number of each token's sequence, in any order.
        count: S.
        group: process group over which each sequence's tokens are split (context parallelism); None: they are all here.
    """

    def __init__(self, sequence_M: Tensor, count: int, *, group: dist.ProcessGroup | None = None) -> None:
        self._sequence = sequence_M
        self._count = count
        self._group = group
        self.mask = torch.ones_like(sequence_M, dtype=torch.bool)

    def sum(self, values: Tensor) -> Tensor:
        """See `Sequences.sum`; deterministic on a CPU, and on a GPU with deterministic algorithms."""
        sums = values.new_zeros(self._count).index_add(0, self._sequence, values)
        return sums if self._group is None else all_reduce(sums, group=self._group)

    def max(self, values: Tensor) -> Tensor:
        """See `Sequences.max`."""
        with torch.no_grad():
            found = values.new_full((self._count,), -torch.inf).scatter_reduce(0, self._sequence, values, "amax")
            if self._group is not None:
                dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        return found

    def spread(self, values_S: Tensor) -> Tensor:
        """See `Sequences.spread`."""
        return values_S[self._sequence]


def packed_sequences(
    batch: TrainBatch, target: npt.NDArray[np.int64], *, place: Callable[[npt.NDArray[np.int64]], Tensor] = torch.from_numpy
) -> Packed:
    """Which of a batch's tokens `target` [M] belong to one sample; samples without any are left out. `place` makes the numbers a tensor."""
    samples, number = np.unique(samples_at(batch, target), return_inverse=True)
    return Packed(place(number), len(samples))


class Padded:
    """One sequence a row, [N, L]; what stands outside the mask is never read, NaN included.

    Args:
        mask_NL: [N, L] bool.
    """

    def __init__(self, mask_NL: Tensor) -> None:
        self.mask = mask_NL

    def sum(self, values: Tensor) -> Tensor:
        """See `Sequences.sum`."""
        return values.masked_fill(~self.mask, 0.0).sum(-1)

    def max(self, values: Tensor) -> Tensor:
        """See `Sequences.max`."""
        return values.detach().masked_fill(~self.mask, -torch.inf).amax(-1)

    def spread(self, values_S: Tensor) -> Tensor:
        """See `Sequences.spread`."""
        return values_S[:, None].expand(self.mask.shape)


class Selected:
    """The sequences of another layout with some of their tokens left out: they count neither in sums nor in means.

    Args:
        sequences: the layout.
        keep: bool, shaped as its tokens. What stands where it is False is never read, NaN included.
    """

    def __init__(self, sequences: Sequences, keep: Tensor) -> None:
        self._sequences = sequences
        self.mask = sequences.mask & keep

    def sum(self, values: Tensor) -> Tensor:
        """See `Sequences.sum`."""
        return self._sequences.sum(values.masked_fill(~self.mask, 0.0))

    def max(self, values: Tensor) -> Tensor:
        """See `Sequences.max`."""
        return self._sequences.max(values.masked_fill(~self.mask, -torch.inf))

    def spread(self, values_S: Tensor) -> Tensor:
        """See `Sequences.spread`."""
        return self._sequences.spread(values_S)


def mean(sequences: Sequences, values: Tensor) -> Tensor:
    """[S] means over each sequence's trained tokens, 0 where it has none; differentiable."""
    count = sequences.sum(sequences.mask.to(values.dtype))
    return sequences.sum(values) / count.clamp(min=1.0)
