"""The ranks of a mesh over torch.distributed: what they sum, and which part of the parameters each holds.

With one shard every rank holds all parameters and sums its share of the gradient here; with more the gradient is summed where the layers
are gathered (`streamrl.trainers.torch.sharding`), over all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from streamrl.errors import TrainingError
from streamrl.models.writers import Writers
from streamrl.tensors.collectives import HINT, among_ranks
from streamrl.tensors.digest import MASK, combine
from streamrl.tensors.mesh import Mesh, gathers_once
from streamrl.trainers.activations import Cut
from streamrl.trainers.ranks.process_group import make_device_mesh
from streamrl.trainers.torch.context import Context

_SIGN = 1 << 63


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a parameter or gradient, its rows or all of it, without gradient; it shares their memory."""
    return tensor.detach() if not isinstance(tensor, DTensor) else cast(DTensor, tensor.detach()).to_local()


class Parallel:
    """Sums over ranks; with one rank every method is the identity.

    All ranks get the same bits: a sum is made once and handed to all, so parameters that were equal stay equal.

    Args:
        mesh: with more than one rank the default process group must have been initialised with that many.
        device: where the parameters lie.
        gather: see `TrainerConfig`.

    Raises:
        TrainingError: the process group is missing or has another size.
    """

    def __init__(self, mesh: Mesh, device: torch.device, gather: Literal["auto", "step", "micro_batch"] = "auto") -> None:
        self.mesh = mesh
        self._device = device
        self._gather = gather
        self.ranks = mesh.ranks
        self.rank = 0
        self.data_group: dist.ProcessGroup | None = None
        """Of those ranks; None: all."""
        self.devices: DeviceMesh | None = None
        """Of a model that is cut into parts: (copies x) parts."""
        self.writers: Writers | None = None
        """Of its checkpoints: the ranks that hold the first copy."""
        if mesh.ranks > 1:
            size = dist.get_world_size() if dist.is_initialized() else 1
            if size != mesh.ranks:
                raise TrainingError(
                    f"trainer.ranks is {mesh.ranks}, this process belongs to a group of {size}",
                    hint="was it started by the launcher?",
                    expected=mesh.ranks,
                    got=size,
                )
            self.rank = dist.get_rank()
        self.copy, self.part = mesh.place(self.rank)
        self.data_rank, self.data_ranks = self.rank, self.ranks
        """Which share of a batch's samples this rank has, and how many there are: by them sums over a batch's samples are made."""
        _, place = mesh.share(self.rank)
        self.tells = place == 0
        """Whether its numbers count, of those of the ranks that share rows, which have the same."""
        self.cut: Cut | None = None
        """How the layers are spread over ranks that run them together; None: each rank runs whole layers, gathered or its own."""
        self.context: Context | None = None
        """Of ranks that share rows."""
        if mesh.context > 1:
            group = make_device_mesh(device.type, (mesh.ranks // mesh.context, mesh.context), ("rows", "context")).get_group("context")
            self.context = Context(place, mesh.context, group.group_name)
        if mesh.shard > 1:
            shape, names = ((mesh.replicate, mesh.shard), ("replicate", "shard")) if mesh.replicate > 1 else ((mesh.shard,), ("shard",))
            self.devices = make_device_mesh(device.type, shape, names)
            writers = Writers(mesh.shard)
            self.writers = writers if self.copy == 0 else None

    @property
    def sharded(self) -> bool:
        """Whether a rank holds a part of the parameters only."""
        return self.mesh.shard > 1

    @property
    def row_share(self) -> tuple[int, int]:
        """Which share of a batch's rows this rank has, alone or with those that share them, and how many shares there are."""
        return self.data_rank // self.mesh.context, self.data_ranks // self.mesh.context

    @property
    def in_step(self) -> bool:
        """Whether a forward and backward pass takes several ranks."""
        return self.sharded or self.context is not None

    def gathers_once(self, nbytes: int) -> bool:
        """Whether layers stay gathered for a whole optimizer step, which holds `nbytes` meanwhile; the same on all ranks, who call it."""
        memory = torch.cuda.get_device_properties(self._device).total_memory if self._device.type == "cuda" else 0
        once = gathers_once(self._gather, nbytes, memory)
        return self.most(int(not once)) == 0

    def sum_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Replace each gradient by its sum over ranks, in float32, as one message; those of parts are that sum already."""
        if self.ranks == 1 or self.sharded:
            return
        flat = torch.cat([g.reshape(-1).float() for g in gradients])
        with among_ranks("the sum of the gradients"):
            dist.all_reduce(flat)
        first = 0
        for g in gradients:
            g.copy_(flat[first : first + g.numel()].view_as(g))
            first += g.numel()

    def norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """Norm of all elements of named tensors of which this rank holds `tensors`: over parts the squares are summed in float64.

        On a GPU those of a part in the tensors' own type: widened there, each number is written and read once more.
        """
        if not self.sharded:
            return torch.nn.utils.get_total_norm(tensors)
        held = [tensor for tensor in tensors if tensor.numel()]
        if held and held[0].is_cuda:
            total = torch.nn.utils.get_total_norm(held).double().square()
        else:
            squares = [torch.linalg.vector_norm(tensor, dtype=torch.float64).square() for tensor in held]
            total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
        return self._sum_parts(total.cpu()).sqrt().to(tensors[0])

    def dot(self, first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
        """Sum in float64 of the products of all elements of two lists of tensors, of which this rank holds parts; the same on all ranks."""
        parts = [(a * b).sum(dtype=torch.float64) for a, b in zip(first, second, strict=True)]
        # One by one in their order: the digits do not depend on how a device sums.
        total = torch.tensor(sum(torch.stack(parts).cpu().tolist()) if parts else 0.0, dtype=torch.float64)
        return float(self._sum_parts(total) if self.sharded else total)

    def digest(self, sums: Mapping[str, int]) -> str:
        """Digest of named tensors, 16 hex digits, from the partial sums of the elements that this rank holds."""
        if not self.sharded:
            return combine(sums)
        signed = [(value & MASK) - ((value & _SIGN) << 1) for value in sums.values()]
        totals = self._sum_parts(torch.tensor(signed, dtype=torch.int64)).tolist()  # wraps, as it must
        return combine({name: total & MASK for name, total in zip(sums, totals, strict=True)})

    def most(self, count: int) -> int:
        """The greatest of the ranks' counts, where ranks must keep step because layers are gathered; else this rank's."""
        if not self.sharded:
            return count
        found = torch.tensor([count])
        with among_ranks("an agreement"):
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return int(found)

    def sum_named(self, values: Mapping[str, float]) -> dict[str, float]:
        """Sums over ranks by name; a name that only some ranks have, for others had no work, counts there as 0.

        Of ranks that share rows, which have the same numbers, one counts.
        """
        if self.data_ranks == 1:
            return dict(values)
        values = values if self.tells else {}
        text = json.dumps(sorted(values)).encode()
        lengths = self.sum(torch.tensor([len(text) * (rank == self.data_rank) for rank in range(self.data_ranks)]))
        table = torch.zeros(self.data_ranks, int(lengths.max()), dtype=torch.uint8)
        table[self.data_rank, : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        rows = self.sum(table)
        names = sorted({name for row, n in zip(rows, lengths.tolist(), strict=True) for name in json.loads(bytes(row[:n].tolist()))})
        sums = self.sum(torch.tensor([values.get(name, 0.0) for name in names], dtype=torch.float64))
        return dict(zip(names, sums.tolist(), strict=True))

    def gather(self, value: int) -> list[int]:
        """A number of each rank, by rank."""
        return self.sum(torch.tensor([value * (rank == self.data_rank) for rank in range(self.data_ranks)])).tolist()

    def least(self, value: int) -> int:
        """The least of all ranks' numbers."""
        return min(self.gather(value))

    def free_bytes(self) -> int:
        """Memory that could still be allocated on the rank whose GPU has the least; what the allocator keeps unused counts as free."""
        free, _ = torch.cuda.mem_get_info(self._device)
        free += torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return self.least(free)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over the ranks that share a batch's samples."""
        if self.data_ranks > 1:
            with among_ranks("a sum over ranks"):
                dist.all_reduce(values, group=self.data_group)
        return values

    def sum_rows(self, values: Tensor) -> Tensor:
        """The sum over ranks of what each has of its rows; of ranks that share rows, which have the same numbers, one counts."""
        return self.sum(values if self.tells else torch.zeros_like(values))

    @contextmanager
    def gathering(self) -> Generator[None]:
        """Raise TrainingError where a collective fails that torch makes beneath a forward or backward pass."""
        try:
            yield
        except RuntimeError as error:
            said = str(error)
            if not self.in_step or not (isinstance(error, dist.DistError) or "gloo" in said or "NCCL" in said):
                raise
            first = (said.strip().splitlines() or [repr(error)])[0]
            raise TrainingError(f"a step needs all ranks of the trainer: {first}", hint=HINT, what="a step") from error

    def _sum_parts(self, values: Tensor) -> Tensor:
        """The sum over the ranks that hold one copy of the model together."""
        assert self.devices is not None
        with among_ranks("a sum over parts"):
            dist.all_reduce(values, group=self.devices.get_group("shard"))
        return values
