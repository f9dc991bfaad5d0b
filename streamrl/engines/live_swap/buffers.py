"""The two sets of weights of one rank: one is served, the other takes the next version."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Buffers:
    """Set 0 is the model's own parameters as SGLang loaded them, set 1 a second buffer for them.

    Args:
        model: the model that is served.
        pinned: put the second set into pinned host memory instead of beside the first.
    """

    def __init__(self, model: nn.Module, *, pinned: bool) -> None:
        self.model = model
        self.pinned = pinned
        self.names, self.parameters = _named(model)
        first = [parameter.data for parameter in self.parameters]
        self.sets: tuple[Sequence[Tensor], Sequence[Tensor]] = (first, [_like(tensor, pinned) for tensor in first])
        self.active = 0
        """The set that the model's parameters point to."""

    @property
    def nbytes(self) -> int:
        """Bytes of one set."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.sets[0])

    def fill(self) -> None:
        """Give the second set what the first holds (padding included); both are whole from here on."""
        for target, source in zip(self.sets[1], self.sets[0], strict=True):
            target.copy_(source)

    def point(self, index: int) -> None:
        """Let the model's parameters be set `index` from here on. Host work only: no copy, no synchronisation."""
        for parameter, tensor in zip(self.parameters, self.sets[index], strict=True):
            parameter.data = tensor
        self.active = index


def _named(model: nn.Module) -> tuple[list[str], list[nn.Parameter]]:
    named = list(model.named_parameters())
    return [name for name, _ in named], [parameter for _, parameter in named]


def _like(tensor: Tensor, pinned: bool) -> Tensor:
    device = torch.device("cpu") if pinned else tensor.device
    pin = pinned and tensor.is_cuda
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device, pin_memory=pin)
