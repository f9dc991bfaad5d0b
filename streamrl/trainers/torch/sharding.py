"""A model cut into parts: FSDP2 of torch (`fully_shard`), one unit a layer and one for the rest, embedding and head.

```text
rank holds          rows of each parameter (float32 where it is trained: its masters)
forward             gather a layer in the type it computes in -> run it -> forget what was gathered
backward            gather it again -> run it -> sum the gradient over all ranks in float32, keep the rows
optimizer           on the rows alone
```
Where memory allows it (`trainer.gather`) nothing is forgotten and no gradient sent before the last micro-batch of an optimizer step.
What is published and digested is the rows in the type that is computed in. A rank without work runs along on an empty micro-batch, since
gathering takes all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from streamrl.errors import TrainingError
from streamrl.models.checkpoint import ModelState, host_copy
from streamrl.models.directories import damaged
from streamrl.models.tensor_files import Box, host_bytes
from streamrl.tensors.digest import slice_digest
from streamrl.tensors.digest_torch import NamedDigester, NamedDigests, Region, region_digests
from streamrl.tensors.names import named, unlisted
from streamrl.trainers.torch.parallel import Parallel, local
from streamrl.trainers.torch.snapshot import Published

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Gathered(torch.nn.Module):
    """The unit of all that is in no layer: what it is called with is run while embedding, norm and head are there.

    They stay until a backward pass has come by; `forget` lets go of them before.
    """

    def __init__(self, module: torch.nn.Module, *, once: bool) -> None:
        super().__init__()
        self.module = module
        self.entered = False
        """Whether something is being run by it."""
        self.once = once
        """Whether nothing is forgotten before the last micro-batch of an optimizer step."""

    def forward(self, compute: Callable[[], Result]) -> Result:
        """What `compute` gives."""
        self.entered = True
        try:
            return compute()
        finally:
            self.entered = False

    def forget(self) -> None:
        """Let go of everything that is gathered: call it when parameters have been written."""
        for unit in self.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()

    def accumulate(self, *, last: bool) -> None:
        """Before each micro-batch of an optimizer step: what waits for the `last` one waits."""
        unit: Any = self
        if self.once:
            unit.set_requires_gradient_sync(last)
            unit.set_reshard_after_backward(last)
        else:
            unit.set_requires_all_reduce(last)


def cut(module: torch.nn.Module, layers: Iterable[torch.nn.Module], parallel: Parallel, dtype: torch.dtype, *, trained: bool) -> Gathered:
    """Cut a whole model, the same on every rank, to this rank's rows; run it by the unit that is returned.

    Args:
        module: the model; its parameters become this rank's part.
        layers: those of its modules that are gathered one at a time.
        parallel: with a mesh of several parts.
        dtype: what is gathered and computed in.
        trained: keep the rows in float32 at least, and sum gradients in float32. Else there is no backward pass, and nothing stays.
    """
    wide = trained and dtype.itemsize < 4
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if wide else MixedPrecisionPolicy()
    numel = sum(parameter.numel() for parameter in module.parameters())
    once = trained and parallel.gathers_once(numel * (dtype.itemsize + 4))
    logger.info("event=model_cut parameters=%d shards=%d gathered=%s", numel, parallel.mesh.shard, "step" if once else "micro_batch")
    root = Gathered(module, once=once)
    for unit in [*layers, root]:
        if wide:
            unit.float()
        # The rest comes first in a forward pass and last in a backward pass: between the two it would be gathered again at once.
        forget = not trained or not (once or unit is root)
        made: Any = fully_shard(unit, mesh=parallel.devices, mp_policy=policy, reshard_after_forward=forget)  # pyright: ignore[reportUnknownVariableType]
        # A sum: weights of the loss are over the whole batch. By force, since gloo knows no division on the way.
        made.set_gradient_divide_factor(1.0)
        made.set_force_sum_reduction_for_comms(True)
    return root


class Slice(NamedTuple):
    """What this rank holds of a parameter."""

    name: str
    rows: Tensor
    """In the type that is published."""
    shape: tuple[int, ...]
    """Of the whole parameter."""
    offset: tuple[int, ...]
    """Index of the first element in each dimension; empty: 0 everywhere."""


class Held:
    """A model's named parameters, as a rank of the mesh holds them.

    Args:
        parameters: name and parameter, after the model was cut.
        types: of the parameters before, which they are published and saved in.
        parallel: the ranks.
        model_type: of the configuration.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        types: Mapping[str, torch.dtype],
        parallel: Parallel,
        model_type: str,
    ) -> None:
        self.parameters = list(parameters)
        self.parallel = parallel
        self.model_type = model_type
        self.boxes: Mapping[str, Box] = {}
        """What this rank holds of each, where that is not the rows that the mesh says."""
        self._types = types
        self._shapes = {name: tuple(parameter.shape) for name, parameter in self.parameters}
        if fused := unlisted(model_type, self._shapes):
            logger.warning("event=experts_not_split model_type=%s parameter=%s action=published_as_it_is", model_type, fused)

    def slices(self) -> list[Slice]:
        """Of all parameters: this rank's memory where it has the type to publish, else rounded copies."""
        return [self._slice(name, self._rounded(name, parameter)) for name, parameter in self.parameters]

    def published(self) -> list[Published]:
        """What this rank has to publish: its memory, under the names of checkpoints, and the type that it is rounded to."""
        found: list[Published] = []
        for name, parameter in self.parameters:
            held = as_named(self._offered(name, local(parameter)), self.model_type)
            found += [Published(one.name, one.rows, self._types[name], one.shape, one.offset) for one in held]
        return found

    def digest(self) -> str:
        """Digest of the whole parameters, 16 hex digits: the same in every mesh. All ranks call it."""
        return digest_of_slices(self.slices(), self.parallel, self.model_type)

    def digests(self) -> NamedDigests:
        """Of what this rank holds of them, partial ones, as a snapshot of `published` has them. No rank waits for another."""
        return NamedDigester(self._regions(self.parameters)).digests()

    def _regions(self, parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> dict[str, Region]:
        offered = [self._offered(name, self._rounded(name, parameter)) for name, parameter in parameters]
        held = [one for whole in offered for one in as_named(whole, self.model_type)]
        return {one.name: Region(one.rows, one.shape, one.offset) for one in held}

    def _rounded(self, name: str, parameter: torch.nn.Parameter) -> Tensor:
        """What this rank holds of a parameter, in the type to publish: its memory where it has that type, else a copy."""
        return local(parameter).to(self._types[name])

    def copies(self) -> dict[str, Tensor]:
        """Of a model that is cut the whole parameters, on the host: all ranks call it, and rank 0 gets them, another one nothing."""
        found: dict[str, Tensor] = {}
        for one in self.slices():
            full = _gathered(one.rows, one.shape, self.parallel)
            if self.parallel.rank == 0:
                found[one.name] = host_copy(full)
        return found

    def state(self, optimizer: Mapping[str, Tensor], digest: str) -> ModelState:
        """What this rank holds, for a checkpoint; it refers to the memory that the next step writes.

        Args:
            optimizer: `ClippedAdamW.state`, of which masters of parameters that are not rounded are left out.
            digest: of the parameters.
        """
        exact = {f"{name}.master" for name, dtype in self._types.items() if dtype.itemsize >= 4}
        return ModelState(
            parameters={name: local(parameter) for name, parameter in self.parameters},
            optimizer={key: value for key, value in optimizer.items() if key not in exact},
            digest=digest,
            shapes=self._shapes,
            types=self._types,
        )

    def check(self, state: ModelState, where: Path, what: str) -> None:
        """Raise TrainingError unless a checkpoint's state has these parameters, CheckpointDamaged unless the digest that it says.

        All ranks call it.
        """
        if self._shapes != state.shapes:
            odd = sorted(set(self._shapes.items()) ^ set(state.shapes.items()))[0]
            raise TrainingError(
                f"the checkpoint {where} has {what} of another model: {odd[0]} {odd[1]} is only in one of them",
                hint="was the path of its model changed?",
                path=str(where),
                what=what,
                parameter=odd[0],
            )
        held = [self._slice(name, state.parameters[name]) for name in self._shapes]
        digest = digest_of_slices(held, self.parallel, self.model_type)
        if digest != state.digest:
            problem = f"expected {what} with digest {state.digest}, got {digest}"
            raise damaged(where, problem, what=what, expected=state.digest, got=digest)

    @torch.no_grad()
    def take(self, held: Mapping[str, Tensor]) -> None:
        """Write what this rank holds of the parameters."""
        for name, parameter in self.parameters:
            local(parameter).copy_(held[name])

    def _offered(self, name: str, rows: Tensor) -> Slice:
        """What this rank publishes of a parameter that it holds `rows` of."""
        return self._slice(name, rows)

    def _slice(self, name: str, rows: Tensor) -> Slice:
        shape = self._shapes[name]
        return Slice(name, rows, shape, self.parallel.mesh.slice(shape, self.parallel.part)[0] if self.parallel.sharded else ())


def as_named(held: Slice, model_type: str) -> list[Slice]:
    """The same rows under the names of the architecture's checkpoints (`streamrl.tensors.names`); they share its memory."""
    first = held.offset[0] if held.offset else 0
    found = list(named(model_type, held.name, held.shape, range(first, first + len(held.rows)) if held.offset else None))
    if len(found) == 1:
        return [held._replace(name=found[0].name)]
    flat = held.rows.view(-1)
    return [Slice(one.name, flat[one.first : one.first + one.numel].view(one.held), one.shape, one.offset) for one in found]


def digest_of_slices(slices: Iterable[Slice], parallel: Parallel, model_type: str) -> str:
    """Digest of the whole tensors of which each rank holds slices, 16 hex digits: by the names of checkpoints."""
    held = [one for whole in slices for one in as_named(whole, model_type)]
    if held and held[0].rows.device.type == "cuda":
        sums = region_digests([Region(one.rows, one.shape, one.offset) for one in held])
    else:
        sums = [slice_digest(host_bytes(one.rows), one.rows.element_size(), one.shape, one.offset, one.rows.shape) for one in held]
    return parallel.digest({one.name: value for one, value in zip(held, sums, strict=True)})


def _gathered(rows: Tensor, shape: Sequence[int], parallel: Parallel) -> Tensor:
    assert parallel.devices is not None
    placements = [*[Replicate()] * (parallel.devices.ndim - 1), Shard(0)]
    whole = torch.empty(tuple(shape), device="meta")
    on_device = rows.to(parallel.devices.device_type)
    found = DTensor.from_local(on_device, parallel.devices, placements, shape=whole.shape, stride=whole.stride())
    with parallel.gathering():
        return found.full_tensor()
