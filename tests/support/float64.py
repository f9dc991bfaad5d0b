"""Tensors of numbers that a test writes out."""

import torch
from torch import Tensor


def t(*values: float) -> Tensor:
    """A vector in float64."""
    return torch.tensor(values, dtype=torch.float64)
