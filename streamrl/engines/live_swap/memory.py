"""What torch offers for tensors' memory only under private names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def memory_key(tensor: Tensor) -> int:
    """Names the memory that a tensor is a view of; views of one allocation share it, and a tensor without data has one too."""
    storage: Any = tensor.untyped_storage()
    return storage._cdata


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source to its target in one call, which gives the interpreter's lock away for all of them."""
    library: Any = torch
    library._foreach_copy_(targets, sources, non_blocking=True)
