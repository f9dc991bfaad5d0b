"""What a rank has of each of a checkpoint's tensors in float32, beside the parameters that the model computes with.

```text
leaf (Hugging Face name, a box of the tensor)  --write, rounded-->  parameter of megatron-core (fused, cut)
leaf.grad, summed in float32                   <--after backward--  gradient
```
The optimizer, checkpoints, digests and what is published know leaves alone. `streamrl.models.megatron.names` says which rows are which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from streamrl.errors import ConfigError
from streamrl.models.megatron.names import Parameter, Part
from streamrl.models.tensor_files import Box, Stored, TensorFiles
from streamrl.tensors.names import Named, named


class Leaf(NamedTuple):
    """A box of a tensor on this rank."""

    part: Part
    value: torch.nn.Parameter
    """[*part.held] float32, or float64 of a model in that type; of one that is frozen in its own type."""
    shared: bool
    """Whether every rank that holds a part of the same layers holds it whole."""
    doubled: bool = False
    """Whether it is a tied embedding of which the first and the last of several stages have a copy each."""
    rounded: Tensor | None = None
    """[*part.held] what is computed with, where the box lies in the model's memory in one piece."""


class Leaves:
    """All of a rank's.

    Args:
        module: of megatron-core, on its device.
        parameters: what `names.parameters` says of this rank.
        shapes: of the whole model, in the order that leaves have on every rank. Of what is not on this one it has a leaf without rows.
        shared: whether a box is held by every rank that holds a part of the same layers.
        model_type: of the configuration.
        doubled: the tensor that two stages have a copy of each; empty: none.
        trained: gradients are asked of the module.

    Raises:
        ConfigError: the module has other parameters.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        parameters: Sequence[Parameter],
        shapes: Mapping[str, tuple[int, ...]],
        shared: Callable[[Part], bool],
        model_type: str,
        *,
        doubled: str,
        trained: bool,
    ) -> None:
        module.requires_grad_(trained)
        self._model_type = model_type
        self._held: dict[str, torch.nn.Parameter] = dict(module.named_parameters())
        expected, found = {one.name: one.shape for one in parameters}, {name: tuple(p.shape) for name, p in self._held.items()}
        if expected != found:
            odd = sorted(set(expected.items()) ^ set(found.items()))[0]
            raise ConfigError(
                f"megatron-core made other parameters than this trainer knows: {odd[0]} {odd[1]} is only in one of them",
                hint="use another version of it",
                parameter=odd[0],
            )
        made: dict[str, Leaf] = {}
        self._places: list[tuple[torch.nn.Parameter, Leaf]] = []
        for one in parameters:
            target = self._held[one.name]
            dtype = target.dtype if not trained or target.dtype == torch.float64 else torch.float32
            with torch.no_grad():
                target.zero_()  # rows of padding stay so
            own: list[Leaf] = []
            for part in one.parts:
                value = torch.nn.Parameter(torch.zeros(part.held, dtype=dtype, device=target.device), requires_grad=trained)
                view = _view(target, part)
                rounded = view[0].view(part.held) if len(view) == 1 else None
                own.append(Leaf(part, value, shared(part), part.name == doubled, rounded))
            made |= {leaf.part.name: leaf for leaf in own}
            self._places += [(target, leaf) for leaf in own]
            if trained:
                target.register_post_accumulate_grad_hook(partial(_move_gradient, own))
        like = next(iter(made.values())).value
        self.leaves: list[Leaf] = [made.get(name) or added(name, shape, like, here=False) for name, shape in shapes.items()]

    def let_go(self) -> None:
        """Of the memory, which nobody will read or write."""
        for leaf in self.leaves:
            leaf.value.data = leaf.value.data.new_empty((0, *leaf.part.shape[1:]))

    @torch.no_grad()
    def write(self) -> None:
        """Round the leaves into the model's parameters."""
        for target, leaf in self._places:
            view = _view(target, leaf.part)
            view.copy_(leaf.value.view(view.shape))

    @torch.no_grad()
    def read(self, model_dir: Path, dtype: torch.dtype) -> None:
        """Take the values of a Hugging Face directory, rounded to the type that they are published in.

        Raises:
            ConfigError: there are no safetensors, or a tensor is missing or has another shape.
        """
        try:
            with TensorFiles(sorted(model_dir.glob("*.safetensors"))) as files:
                for leaf in self.leaves:
                    for one, value in self._stored(leaf):
                        _check(one, files.tensors, model_dir)
                        value.copy_(files.read(one.name, Box(one.offset, one.held)).to(dtype))
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"the weights in {model_dir} cannot be read: {error}", hint="is it complete?", path=str(model_dir)) from error
        self.write()

    def _stored(self, leaf: Leaf) -> Iterator[tuple[Named, Tensor]]:
        """Boxes of a checkpoint's tensors that a leaf is, and where in it."""
        part = leaf.part
        if len(part.shape) < 3:
            if part.held[0]:
                yield Named(part.name, part.shape, part.offset, part.held, 0), leaf.value
            return
        for one in named(self._model_type, part.name, part.shape, range(part.offset[0], part.offset[0] + part.held[0])):
            if one.numel:
                yield one, leaf.value.view(-1)[one.first : one.first + one.numel].view(one.held)

    def named(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Hugging Face name and leaf."""
        return ((leaf.part.name, leaf.value) for leaf in self.leaves)

    def parts(self) -> Mapping[str, Part]:
        """By name."""
        return {leaf.part.name: leaf.part for leaf in self.leaves}


def added(name: str, shape: tuple[int, ...], like: Tensor, *, here: bool) -> Leaf:
    """A leaf of zeros that no parameter of megatron-core is rounded from; without rows unless it is `here`, on all ranks of a stage."""
    held = shape if here else (0, *shape[1:])
    part = Part(name, shape, tuple(0 for _ in shape), held, 0, held[0], max(1, held[0]), owner=here)
    return Leaf(part, torch.nn.Parameter(like.new_zeros(held)), shared=here)


def _view(parameter: Tensor, part: Part) -> Tensor:
    """[periods, run, ...] the rows of a parameter that a part is, in its order."""
    return parameter.detach().unflatten(0, (-1, part.period))[:, part.first : part.first + part.run]


def _check(one: Named, stored: Mapping[str, Stored], model_dir: Path) -> None:
    """Raise ConfigError unless there is such a tensor."""
    if one.name not in stored:
        raise ConfigError(
            f"expected {one.name} in a safetensors file of {model_dir}, got {len(stored)} other tensors",
            hint="save the model with save_pretrained of transformers",
            path=str(model_dir),
            missing=one.name,
        )
    if (got := stored[one.name].shape) != one.shape:
        raise ConfigError(
            f"expected {one.name} of shape {one.shape} in {model_dir}, got {got}",
            hint="does config.json belong to these weights?",
            path=str(model_dir),
            parameter=one.name,
        )


def _move_gradient(leaves: Sequence[Leaf], parameter: Tensor) -> None:
    assert parameter.grad is not None  # a hook behind its accumulation
    for leaf in leaves:
        found = _view(parameter.grad, leaf.part)
        if leaf.value.grad is None:
            leaf.value.grad = torch.empty_like(leaf.value).copy_(found.reshape(leaf.value.shape))
        else:
            leaf.value.grad.view(found.shape).add_(found)  # in float32: a wider copy of its own would take as long as the sum
    parameter.grad = None
