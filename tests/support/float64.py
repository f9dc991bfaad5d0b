"""Tensors of numbers that a test writes out."""

import torch
from torch import Tensor


def t(*values: float) -> Tensor:
    """A vector in float64."""
    return torch.tensor(values, dtype=torch.float64)


def gradient(loss: Tensor, leaf: Tensor) -> Tensor:
    """The slope of the sum of `loss` at a leaf."""
    return torch.autograd.grad(loss.sum(), leaf)[0]
