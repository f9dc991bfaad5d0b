"""Compare tensors by name."""

from collections.abc import Mapping

import torch


def same_tensors(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> bool:
    """Say whether names, types, shapes and bits are equal."""
    return shapes(found) == shapes(wanted) and all(torch.equal(value, wanted[name]) for name, value in found.items())


def shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (value.shape, value.dtype) for name, value in tensors.items()}
