"""From the host to a device without waiting for the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def on_device(array: npt.NDArray[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The array's numbers there, of `dtype` or else of their own type. On a GPU the copy goes by pinned memory and nobody waits for it.

    A copy from other memory would let the host wait until the GPU has done all that it was given before.
    """
    host = torch.from_numpy(np.ascontiguousarray(array))
    if dtype is not None:
        host = host.to(dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
