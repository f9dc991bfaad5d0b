"""The ranks of a Megatron mesh, as `Parallel` has them: tensor ranks see the same samples, replicas and expert ranks share a batch."""

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
    """See `Parallel`; a part is a tensor rank, or an expert rank. `leaves` is set by the model, before anything is summed.

    Of a whole norm each tensor rank has the gradient from its own positions, or heads (sequence parallelism). Of all but the experts each
    expert rank has it from its own samples. These are summed.

    Args:
        mesh: its parts are `tensors`, or, where that is 1, parts of the experts.
        device: where the parameters lie.
        tensors: tensor parallel ranks.
    """

    def __init__(self, mesh: Mesh, device: torch.device, tensors: int) -> None:
        super().__init__(mesh, device)
        self.tensors, self.expert_parts = tensors, mesh.shard // tensors
        self.copies_group = self.devices.get_group("replicate") if self.devices is not None and mesh.replicate > 1 else None
        """Of the ranks that hold the same; None: all."""
        if tensors > 1:
            self.data_rank, self.data_ranks, self.data_group = self.copy, mesh.replicate, self.copies_group
        self.leaves: list[Leaf] = []

    @property
    def parts_group(self) -> dist.ProcessGroup | None:
        """Of the ranks that hold one copy together; None: this one holds it alone."""
        return self.devices.get_group("shard") if self.devices is not None else None

    def most(self, count: int) -> int:
        """See `Parallel.most`; tensor ranks have the same samples, and replicas meet behind the last micro-batch."""
        return count if self.expert_parts == 1 else super().most(count)

    def sum_gradients(self, gradients: Sequence[Tensor]) -> None:
        """See `Parallel.sum_gradients`; the gradients are of all leaves, in their order."""
        if self.sharded:
            whole = [g for g, leaf in zip(gradients, self.leaves, strict=True) if leaf.shared]
            _sum_flat(whole, self.parts_group, "the sum of the shared gradients")
        if self.mesh.replicate > 1:
            _sum_flat(gradients, self.copies_group, "the sum of the gradients")

    def norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """See `Parallel.norm`; what several parts hold counts once."""
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
    """See `Held`, of leaves: boxes of tensors, cut in rows or in columns, or empty. Of what several ranks hold the first one speaks.

    Versions are published by rows. So of a matrix of which each tensor rank has columns, each has some rows too, in the type that is
    published, which `refresh` writes: a third of a dense model / tensor ranks.
    """

    def __init__(self, leaves: Sequence[Leaf], dtype: torch.dtype, parallel: Parallel, model_type: str) -> None:
        named = [(leaf.part.name, leaf.value) for leaf in leaves]
        super().__init__(named, {name: dtype for name, _ in named}, parallel, model_type)
        self._shapes = {leaf.part.name: leaf.part.shape for leaf in leaves}
        self.boxes: Mapping[str, Box] = {leaf.part.name: Box(leaf.part.offset, leaf.part.held) for leaf in leaves}
        # Of [4, 6] on two ranks rank 1 has columns 3 .. 5, and publishes rows 2 and 3.
        self._offers: dict[str, tuple[int, Tensor]] = {}
        for leaf in leaves:
            shape = leaf.part.shape
            if len(shape) == 2 and leaf.part.held[1] < shape[1]:
                rows = parallel.mesh.rows(shape[0], parallel.part)
                self._offers[leaf.part.name] = (rows.start, leaf.value.new_empty((len(rows), shape[1]), dtype=dtype))
        self._silent = {leaf.part.name for leaf in leaves if (leaf.shared and parallel.part) or not leaf.part.held[0]}

    @torch.no_grad()
    def refresh(self) -> None:
        """The leaves have been written: give each tensor rank its rows of what is cut in columns. All ranks call it."""
        for name, value in self.parameters:
            if name not in self._offers:
                continue
            _, memory = self._offers[name]
            mesh, rows = self.parallel.mesh, len(memory)
            # [height, width / ranks] columns, the rows of each rank one after the other, to [ranks, rows, width / ranks].
            sent = [len(mesh.rows(self._shapes[name][0], part)) for part in range(mesh.shard)]
            found = memory.new_empty(mesh.shard * rows, value.shape[1])
            assert self.parallel.devices is not None
            with among_ranks("an exchange of columns"):
                group = self.parallel.devices.get_group("shard")
                dist.all_to_all_single(found, value.to(memory.dtype), [rows] * mesh.shard, sent, group=group)
            width = value.shape[1]  # told, since a rank may have no row
            memory.view(rows, mesh.shard, width).copy_(found.view(mesh.shard, rows, width).transpose(0, 1))

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

    def _offered(self, name: str, rows: Tensor) -> Slice:
        if name not in self._offers:
            return self._slice(name, rows)
        first, memory = self._offers[name]
        return Slice(name, memory, self._shapes[name], (first, 0))

    def _slice(self, name: str, rows: Tensor) -> Slice:
        box = self.boxes[name]
        if name in self._silent:
            return Slice(name, rows[:0], self._shapes[name], (0,) * len(box.offset))
        return Slice(name, rows, self._shapes[name], box.offset)


def check_samples(tensors: int, truncated: bool) -> None:
    """Raise ConfigError where log-probs over a split vocabulary are asked for that need the whole distribution."""
    if tensors > 1 and truncated:
        raise ConfigError(
            f"trainer.tensor = {tensors} knows no sampling.top_p or top_k: log-probs are over a vocabulary in {tensors} parts",
            hint="set sampling.top_p = 1 and sampling.top_k = 0, or trainer.tensor = 1",
            key="trainer.tensor",
        )
