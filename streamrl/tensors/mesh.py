"""The ranks of a trainer share one model: each of `replicate` copies of the parameters is cut into `shard` parts. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from streamrl.config.tree import TrainerConfig
from streamrl.schemas.ledger import TrainedOn


class Mesh(msgspec.Struct, frozen=True):
    """Ranks of replicate x shard; those that hold one copy together are neighbours, so that they are of one host.

    Example, of four ranks and two shards: ranks 0 and 1 hold a copy, and ranks 2 and 3.

        >>> [Mesh(replicate=2, shard=2).place(rank) for rank in range(4)]
        [(0, 0), (0, 1), (1, 0), (1, 1)]
    """

    replicate: int = 1
    """Copies of the parameters."""
    shard: int = 1
    """Parts that each copy is cut into."""
    context: int = 1
    """Neighbours that share each packed row. It divides the ranks; what they hold of the parameters does not depend on it."""
    tensors: int = 1
    """Parts that, between layers, a row's positions are cut into too."""
    stages: int = 1
    """Groups of layers, one behind another, that the parts of a copy are of: the first `shard / stages` parts of the first, and so on."""

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.replicate * self.shard

    def place(self, rank: int) -> tuple[int, int]:
        """Which copy and which part of it a rank holds."""
        return divmod(rank, self.shard)

    def share(self, rank: int) -> tuple[int, int]:
        """Which share of the rows a rank has, of `ranks / context`, and its place among those that have it.

        >>> [Mesh(replicate=2, shard=2, context=2).share(rank) for rank in range(4)]
        [(0, 0), (0, 1), (1, 0), (1, 1)]
        """
        return divmod(rank, self.context)

    def whole(self, length: int) -> int:
        """Length of a row that ranks can share, two chunks each: the next multiple of twice their number, and of what cuts each part."""
        unit = 2 * self.context * self.tensors if self.context > 1 else 1
        return -(-length // unit) * unit

    def rows(self, count: int, part: int) -> range:
        """Which of a tensor's `count` rows (dimension 0) part `part` holds: the first parts equally many, the last ones fewer or none.

        It is torch's rule (`torch.chunk`), by which torch.distributed.fsdp cuts.

            >>> [list(Mesh(shard=4).rows(5, part)) for part in range(4)]
            [[0, 1], [2, 3], [4], []]
        """
        most = -(-count // self.shard)
        return range(min(count, part * most), min(count, (part + 1) * most))

    def slice(self, shape: Sequence[int], part: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offset and shape of the slice of a tensor of `shape` that part `part` holds; a tensor without dimensions is cut like one row."""
        whole = tuple(shape) or (1,)
        rows = self.rows(whole[0], part)
        return (rows.start, *(0 for _ in whole[1:])), (len(rows), *whole[1:])


def mesh_of(trainer: TrainerConfig) -> Mesh:
    """The mesh that a configuration asks for; it has been checked that the parts, and `trainer.context`, divide the ranks."""
    parts = trainer.tensor * trainer.experts * trainer.pipeline if trainer.backend == "megatron" else trainer.shards
    return Mesh(replicate=trainer.ranks // parts, shard=parts, context=trainer.context, tensors=trainer.tensor, stages=trainer.pipeline)


def trained_on(trainer: TrainerConfig) -> TrainedOn:
    """Tell it in a ledger entry's words."""
    told = TrainedOn(
        ranks=trainer.ranks,
        shards=trainer.shards,
        gather=trainer.gather if trainer.shards > 1 else "auto",
        context=trainer.context if trainer.context > 1 else UNSET,
    )
    if trainer.backend != "megatron":
        return told
    experts, pipeline = (parts if parts > 1 else UNSET for parts in (trainer.experts, trainer.pipeline))
    return replace(told, backend="megatron", tensor=trainer.tensor, experts=experts, pipeline=pipeline)


def gathers_once(gather: str, nbytes: int, memory: int) -> bool:
    """Say if the layers of a model that is cut stay gathered for a whole optimizer step.

    Args:
        gather: see `TrainerConfig`.
        nbytes: what is held meanwhile.
        memory: bytes of the device; 0: a CPU, which is not asked for.
    """
    return gather == "step" or (gather == "auto" and 4 * nbytes <= (memory or 4 * nbytes))
