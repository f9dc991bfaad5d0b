"""The ranks of a Megatron mesh, as `Parallel` has them: tensor ranks and stages see the same samples, replicas and expert ranks share them.

```text
ranks of 2 replicas, 2 stages, 2 tensor ranks     replica 0   stage 0: 0 1   stage 1: 2 3
                                                  replica 1   stage 0: 4 5   stage 1: 6 7
```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from datetime import timedelta
from typing import NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import Tensor

from streamrl.errors import ConfigError
from streamrl.models.checkpoint import ModelState, host_copy
from streamrl.models.tensor_files import Box
from streamrl.tensors.collectives import among_ranks
from streamrl.tensors.digest_torch import NamedDigester, NamedDigests
from streamrl.tensors.mesh import Mesh
from streamrl.trainers.activations import Cut
from streamrl.trainers.megatron.leaves import Leaf
from streamrl.trainers.torch.context import Context
from streamrl.trainers.torch.parallel import Parallel, local
from streamrl.trainers.torch.sharding import Held, Slice


class Line(NamedTuple):
    """Ranks of all stages that a micro-batch goes through, one after the other."""

    ranks: Sequence[int]
    """Of the default group, in the order of the stages."""
    stage: int
    """This rank's."""
    down: dist.ProcessGroup
    """Of these ranks, for states."""
    up: dist.ProcessGroup
    """Another one, for gradients: what goes up must not wait for what goes down, as it would in one queue of NCCL."""


class MegatronParallel(Parallel):
    """See `Parallel`; a part is a tensor rank of a stage, or an expert rank. `leaves` is set by the model, before anything is summed.

    Of a whole norm each tensor rank has the gradient from its own positions, or heads (sequence parallelism). Of all but the experts each
    expert rank has it from its own samples. Of a tied embedding the first stage has it from its inputs, the last one from its outputs.
    These are summed. Rows are shared by `context` neighbouring replicas.

    Args:
        mesh: its parts are stages of `tensors` ranks each, or, where both are 1, parts of the experts.
        device: where the parameters lie.
        tensors: tensor parallel ranks.
        timeout_s: longest that a rank waits for another.
    """

    def __init__(self, mesh: Mesh, device: torch.device, tensors: int, timeout_s: float) -> None:
        super().__init__(replace(mesh, context=1), device)
        self.mesh = mesh
        self.stages, self.width = mesh.stages, mesh.shard // mesh.stages
        self.cut = Cut(tensors, mesh.stages)
        self.stage, self.lane = divmod(self.part, self.width)
        self.tensors, self.expert_parts = tensors, self.width // tensors
        self.parts_group = self.devices.get_group("shard") if self.devices is not None else None
        """Of the ranks that hold the same layers together; None: this one holds them alone."""
        self.copies_group = self.devices.get_group("replicate") if self.devices is not None and mesh.replicate > 1 else None
        """Of the ranks that hold the same; None: all."""
        if tensors > 1:
            self.data_rank, self.data_ranks, self.data_group = self.copy, mesh.replicate, self.copies_group
        self.line: Line | None = None
        """Of this rank and those of the other stages that it works with; None: there is one stage."""
        self._ends: dist.ProcessGroup | None = None
        """Of the first and the last of the line's ranks, on these."""
        if self.stages > 1:
            self._make_groups(timeout_s)
        if mesh.context > 1:
            self._share_rows(timeout_s)
        self.leaves: list[Leaf] = []

    def beside(self) -> MegatronParallel:
        """The same ranks, for another model that is trained, with leaves of its own."""
        found = copy(self)
        found.leaves = []
        return found

    def _make_groups(self, timeout_s: float) -> None:
        copies, stages, lanes = range(self.mesh.replicate), range(self.stages), range(self.width)
        ranks = np.arange(self.ranks).reshape(len(copies), self.stages, self.width)
        lines = [ranks[copy, :, lane].tolist() for copy in copies for lane in lanes]
        ends = [[line[0], line[-1]] for line in lines]
        down, up, self._ends = (_make_group(lists, self.rank, timeout_s) for lists in (lines, lines, ends))
        assert down is not None and up is not None  # every rank is in a line
        self.line = Line(lines[self.copy * self.width + self.lane], self.stage, down, up)
        self.parts_group = _make_group([ranks[copy, stage].tolist() for copy in copies for stage in stages], self.rank, timeout_s)
        # All stages come to the same numbers, of which the last one has the log-probs.
        self.data_rank, self.data_ranks = self.copy * self.stages + self.stage, self.mesh.replicate * self.stages
        self.data_group = _make_group([ranks[:, :, lane].flatten().tolist() for lane in lanes], self.rank, timeout_s)
        self.tells = self.stage == self.stages - 1

    def _share_rows(self, timeout_s: float) -> None:
        ranks = np.arange(self.ranks).reshape(-1, self.mesh.context, self.mesh.shard)
        lists = [shared[:, part].tolist() for shared in ranks for part in range(self.mesh.shard)]
        group = _make_group(lists, self.rank, timeout_s)
        assert group is not None  # every rank shares its rows
        place = self.copy % self.mesh.context
        self.context = Context(place, self.mesh.context, group.group_name)
        self.tells = self.tells and place == 0

    @property
    def row_share(self) -> tuple[int, int]:
        """See `Parallel.row_share`; all stages and tensor ranks have the same rows."""
        if self.expert_parts > 1:
            return super().row_share
        return self.copy // self.mesh.context, self.mesh.replicate // self.mesh.context

    def most(self, count: int) -> int:
        """See `Parallel.most`; tensor ranks have the same samples, and replicas meet behind the last micro-batch."""
        return count if self.expert_parts == 1 else super().most(count)

    def least(self, value: int) -> int:
        """See `Parallel.least`; tensor ranks, too, which run a layer together."""
        found = torch.tensor([value])
        if self.ranks > 1:
            with among_ranks("an agreement"):
                dist.all_reduce(found, op=dist.ReduceOp.MIN)
        return int(found)

    def sum_gradients(self, gradients: Sequence[Tensor]) -> None:
        """See `Parallel.sum_gradients`; the gradients are of all leaves, in their order."""
        if self.width > 1:
            whole = [g for g, leaf in zip(gradients, self.leaves, strict=True) if leaf.shared]
            _sum_flat(whole, self.parts_group, "the sum of the shared gradients")
        if twice := [g for g, leaf in zip(gradients, self.leaves, strict=True) if leaf.doubled]:
            _sum_flat(twice, self._ends, "the sum of the embedding's gradients")
        if self.mesh.replicate > 1:
            _sum_flat(gradients, self.copies_group, "the sum of the gradients")

    def norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """See `Parallel.norm`; what several parts hold counts once."""
        if not self.sharded:
            return torch.nn.utils.get_total_norm(tensors)
        return super().norm([t for t, leaf in zip(tensors, self.leaves, strict=True) if self.speaks(leaf)])

    def dot(self, first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
        """See `Parallel.dot`; what several parts hold counts once."""
        if not self.sharded:
            return super().dot(first, second)
        spoken = [number for number, leaf in enumerate(self.leaves) if self.speaks(leaf)]
        return super().dot([first[number] for number in spoken], [second[number] for number in spoken])

    def speaks(self, leaf: Leaf) -> bool:
        """Whether it is this rank, of those of its copy that hold the same, by which the leaf counts."""
        return not (leaf.shared and self.lane) and not (leaf.doubled and self.stage)


def _make_group(lists: Sequence[Sequence[int]], rank: int, timeout_s: float) -> dist.ProcessGroup | None:
    """Of several lists of ranks the group of that which `rank` is in; all ranks of the default group call it, with the same lists."""
    found: dist.ProcessGroup | None = None
    with among_ranks("a group of the ranks"):
        for ranks in lists:
            group = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s))
            found = cast("dist.ProcessGroup", group) if rank in ranks else found
    return found


def _sum_flat(gradients: Sequence[Tensor], group: dist.ProcessGroup | None, what: str) -> None:
    flat = torch.cat([g.reshape(-1) for g in gradients])
    with among_ranks(what):
        dist.all_reduce(flat, group=group)
    for g, found in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        g.copy_(found.view_as(g))


class HeldBoxes(Held):
    """See `Held`, of leaves: boxes of tensors, cut in rows or in columns, or empty. Of what several ranks hold the first one speaks.

    Versions are published by rows. So of a matrix of which each tensor rank has columns, each has some rows too, in the type that is
    published, which `refresh` writes: a third of a dense model / tensor ranks. Of a model that is not `published` they are not there.
    """

    def __init__(
        self, leaves: Sequence[Leaf], types: Mapping[str, torch.dtype], parallel: MegatronParallel, model_type: str, *, published: bool
    ) -> None:
        super().__init__([(leaf.part.name, leaf.value) for leaf in leaves], types, parallel, model_type)
        self._shapes = {leaf.part.name: leaf.part.shape for leaf in leaves}
        self.boxes: Mapping[str, Box] = {leaf.part.name: Box(leaf.part.offset, leaf.part.held) for leaf in leaves}
        self._group, self._across = parallel.parts_group, Mesh(shard=parallel.width)
        # Of [4, 6] on two ranks rank 1 has columns 3 .. 5, and publishes rows 2 and 3.
        self._offers: dict[str, tuple[int, Tensor]] = {}
        for leaf in leaves:
            shape = leaf.part.shape
            if published and len(shape) == 2 and leaf.part.held[1] < shape[1]:
                rows = self._across.rows(shape[0], parallel.lane)
                memory = leaf.value.new_empty((len(rows), shape[1]), dtype=types[leaf.part.name])
                self._offers[leaf.part.name] = (rows.start, memory)
        rounded = {leaf.part.name: leaf.rounded for leaf in leaves if leaf.rounded is not None}
        self._in_place = {name: one for name, one in rounded.items() if one.dtype == types[name]}
        self._fixed: NamedDigester | None = None
        """Of what lies somewhere for good: a mixture has thousands of tensors."""
        self._silent = {leaf.part.name for leaf in leaves if not parallel.speaks(leaf) or not leaf.part.held[0]}

    @torch.no_grad()
    def refresh(self) -> None:
        """The leaves have been written: give each tensor rank its rows of what is cut in columns. All ranks call it."""
        for name, value in self.parameters:
            if name not in self._offers:
                continue
            _, memory = self._offers[name]
            ranks, rows = self._across.shard, len(memory)
            # [height, width / ranks] columns, the rows of each rank one after the other, to [ranks, rows, width / ranks].
            sent = [len(self._across.rows(self._shapes[name][0], part)) for part in range(ranks)]
            found = memory.new_empty(ranks * rows, value.shape[1])
            with among_ranks("an exchange of columns"):
                dist.all_to_all_single(found, value.to(memory.dtype), [rows] * ranks, sent, group=self._group)
            width = value.shape[1]  # told, since a rank may have no row
            memory.view(rows, ranks, width).copy_(found.view(ranks, rows, width).transpose(0, 1))

    def state(self, optimizer: Mapping[str, Tensor], digest: str) -> ModelState:
        """See `Held.state`: leaves of parameters that are rounded are their masters."""
        masters = {f"{name}.master": local(p) for name, p in self.parameters if self._types[name].itemsize < p.dtype.itemsize}
        spoken = {name: local(p) for name, p in self.parameters if name not in self._silent}
        # How many steps were made is written by the first part, also of what it has nothing of.
        kept = {key for key in [*optimizer, *masters] if key.rpartition(".")[0] in spoken or key.endswith(".step")}
        return ModelState(
            parameters=spoken,
            optimizer={key: value for key, value in {**optimizer, **masters}.items() if key in kept},
            digest=digest,
            shapes=self._shapes,
            types=self._types,
            boxes=self.boxes,
        )

    def digests(self) -> NamedDigests:
        """See `Held.digests`."""
        fixed = self._in_place.keys() | self._offers.keys()
        self._fixed = self._fixed or NamedDigester(self._regions(one for one in self.parameters if one[0] in fixed))
        others = NamedDigester(self._regions(one for one in self.parameters if one[0] not in fixed))
        found, more = self._fixed.digests(), others.digests()
        # Ranks add up theirs by place, and another stage has others in its memory.
        return NamedDigests(dict(sorted({**found.elements, **more.elements}.items())), {**found.words, **more.words})

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

    def _rounded(self, name: str, parameter: torch.nn.Parameter) -> Tensor:
        found = self._in_place.get(name)
        return super()._rounded(name, parameter) if found is None else found

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


def check_samples(tensors: int, restricted: bool) -> None:
    """Raise ConfigError where log-probs over a split vocabulary are asked for that need the whole distribution."""
    if tensors > 1 and restricted:
        raise ConfigError(
            f"trainer.tensor = {tensors} knows no sampling.top_p, top_k or min_p: log-probs are over a vocabulary in {tensors} parts",
            hint="set sampling.top_p = 1, top_k = -1 and min_p = 0, or trainer.tensor = 1",
            key="trainer.tensor",
        )
