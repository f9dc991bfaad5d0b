"""The ranks of a Megatron mesh, as `Parallel` has them: tensor ranks see the same samples, replicas share a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from streamrl.errors import ConfigError
from streamrl.trainers.megatron.leaves import Leaf
from streamrl.trainers.mesh import Mesh
from streamrl.trainers.ranks.collectives import among_ranks
from streamrl.trainers.torch.checkpoint import Box, ModelState, host_copy
from streamrl.trainers.torch.parallel import Parallel, local
from streamrl.trainers.torch.sharding import Held, Slice


class MegatronParallel(Parallel):
    """See `Parallel`; a part is a tensor rank. `leaves` is set by the model, before anything is summed.

    With sequence parallelism each tensor rank has the gradient that a whole norm gets from its own positions, or heads: they are summed.
    """

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        super().__init__(mesh, device)
        self.data_rank, self.data_ranks = self.copy, mesh.replicate
        if self.devices is not None and mesh.replicate > 1:
            self.data_group = self.devices.get_group("replicate")
        self.leaves: list[Leaf] = []

    def most(self, count: int) -> int:
        """This rank's: tensor ranks have the same samples, and replicas meet behind the last micro-batch."""
        return count

    def sum_gradients(self, gradients: Sequence[Tensor]) -> None:
        """See `Parallel.sum_gradients`; the gradients are of all leaves, in their order."""
        if self.sharded:
            assert self.devices is not None
            whole = [g for g, leaf in zip(gradients, self.leaves, strict=True) if leaf.shared]
            _sum_flat(whole, self.devices.get_group("shard"), "the sum of the norms' gradients")
        if self.data_ranks > 1:
            _sum_flat(gradients, self.data_group, "the sum of the gradients")

    def norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """See `Parallel.norm`; what several tensor ranks hold counts once."""
        if not self.sharded:
            return torch.nn.utils.get_total_norm(tensors)
        return super().norm([t for t, leaf in zip(tensors, self.leaves, strict=True) if not leaf.shared or self.part == 0])


def _sum_flat(gradients: Sequence[Tensor], group: dist.ProcessGroup | None, what: str) -> None:
    flat = torch.cat([g.reshape(-1) for g in gradients])
    with among_ranks(what):
        dist.all_reduce(flat, group=group)
    for g, found in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        g.copy_(found.view_as(g))


class HeldBoxes(Held):
    """See `Held`, of leaves: boxes of tensors, cut in rows or in columns. Of what several tensor ranks hold the first one speaks."""

    def __init__(self, leaves: Sequence[Leaf], dtype: torch.dtype, parallel: Parallel, model_type: str) -> None:
        named = [(leaf.part.name, leaf.value) for leaf in leaves]
        super().__init__(named, {name: dtype for name, _ in named}, parallel, model_type)
        self._shapes = {leaf.part.name: leaf.part.shape for leaf in leaves}
        self.boxes: Mapping[str, Box] = {leaf.part.name: Box(leaf.part.offset, leaf.part.held) for leaf in leaves}
        self._silent = {leaf.part.name for leaf in leaves if leaf.shared and parallel.part}

    def state(self, optimizer: Mapping[str, Tensor], digest: str) -> ModelState:
        """See `Held.state`: leaves of parameters that are rounded are their masters."""
        masters = {f"{name}.master": local(p) for name, p in self.parameters if self._types[name].itemsize < 4}
        spoken = {name: local(p) for name, p in self.parameters if name not in self._silent}
        return ModelState(
            parameters=spoken,
            optimizer={key: value for key, value in {**optimizer, **masters}.items() if key.rpartition(".")[0] in spoken},
            digest=digest,
            shapes=self._shapes,
            types=self._types,
            boxes=self.boxes,
        )

    def copies(self) -> dict[str, Tensor]:
        """See `Held.copies`: the bits of all boxes are added up, each in its place among zeros."""
        found: dict[str, Tensor] = {}
        for one in self.slices():
            whole = torch.zeros(one.shape, dtype=one.rows.dtype, device=one.rows.device)
            place = tuple(slice(first, first + count) for first, count in zip(one.offset, one.rows.shape, strict=True))
            whole[place] = one.rows
            if self.parallel.devices is not None:
                with among_ranks("a copy of the parameters"):
                    dist.all_reduce(whole.view(torch.uint8), group=self.parallel.devices.get_group("shard"))
            if self.parallel.rank == 0:
                found[one.name] = host_copy(whole)
        return found

    def _slice(self, name: str, rows: Tensor) -> Slice:
        box = self.boxes[name]
        if name in self._silent:
            return Slice(name, rows[:0], self._shapes[name], (0,) * len(box.offset))
        return Slice(name, rows, self._shapes[name], box.offset)


def check_samples(mesh: Mesh, truncated: bool) -> None:
    """Raise ConfigError where log-probs over a split vocabulary are asked for that need the whole distribution."""
    if mesh.shard > 1 and truncated:
        raise ConfigError(
            f"trainer.tensor = {mesh.shard} knows no sampling.top_p or top_k: log-probs are over a vocabulary in {mesh.shard} parts",
            hint="set sampling.top_p = 1 and sampling.top_k = 0, or trainer.tensor = 1",
            key="trainer.tensor",
        )
