"""Data parallelism over torch.distributed: every rank holds all parameters and sums its share of the gradient."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from streamrl.errors import TrainingError
from streamrl.trainers.ranks.collectives import among_ranks


class DataParallel:
    """Sums over ranks; with one rank every method is the identity.

    All ranks get the same bits: a sum is made once and handed to all, so parameters that were equal stay equal.

    Args:
        ranks: size of the group. Above 1 the default process group must have been initialised with that size.

    Raises:
        TrainingError: the process group is missing or has another size.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.rank = 0
        if ranks > 1:
            size = dist.get_world_size() if dist.is_initialized() else 1
            if size != ranks:
                raise TrainingError(
                    f"trainer.ranks is {ranks}, this process belongs to a group of {size}",
                    hint="was it started by the launcher?",
                    expected=ranks,
                    got=size,
                )
            self.rank = dist.get_rank()

    def sum_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Replace each gradient by its sum over ranks, in float32, as one message."""
        if self.ranks == 1:
            return
        flat = torch.cat([g.reshape(-1).float() for g in gradients])
        with among_ranks("the sum of the gradients"):
            dist.all_reduce(flat)
        first = 0
        for g in gradients:
            g.copy_(flat[first : first + g.numel()].view_as(g))
            first += g.numel()

    def sum_named(self, values: Mapping[str, float]) -> dict[str, float]:
        """Sums over ranks by name; a name that only some ranks have, for others had no work, counts there as 0."""
        if self.ranks == 1:
            return dict(values)
        text = json.dumps(sorted(values)).encode()
        lengths = self.sum(torch.tensor([len(text) * (rank == self.rank) for rank in range(self.ranks)]))
        table = torch.zeros(self.ranks, int(lengths.max()), dtype=torch.uint8)
        table[self.rank, : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        rows = self.sum(table)
        names = sorted({name for row, n in zip(rows, lengths.tolist(), strict=True) for name in json.loads(bytes(row[:n].tolist()))})
        sums = self.sum(torch.tensor([values.get(name, 0.0) for name in names], dtype=torch.float64))
        return dict(zip(names, sums.tolist(), strict=True))

    def gather(self, value: int) -> list[int]:
        """A number of each rank, by rank."""
        return self.sum(torch.tensor([value * (rank == self.rank) for rank in range(self.ranks)])).tolist()

    def sum(self, values: Tensor) -> Tensor:
        """The sum over ranks."""
        if self.ranks > 1:
            with among_ranks("a sum over ranks"):
                dist.all_reduce(values)
        return values
