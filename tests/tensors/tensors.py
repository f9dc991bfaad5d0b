"""Tensors for the tests of digests."""

import math
from typing import Any

import numpy as np
import torch

DTYPES = [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64, torch.int64]


def made(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    nbytes = math.prod(shape) * dtype.itemsize
    data = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    return torch.from_numpy(data).view(dtype).view(shape)


def host(tensor: torch.Tensor) -> Any:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def cut(whole: torch.Tensor, offset: tuple[int, ...], shape: tuple[int, ...], order: list[int]) -> torch.Tensor:
    """The slice, its dimensions in memory in `order`."""
    part = whole[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
    if order:
        part = part.permute(order).contiguous().permute([order.index(d) for d in range(len(order))])
    return part
