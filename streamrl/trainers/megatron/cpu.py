"""What megatron-core takes for granted and a machine without CUDA lacks. Nothing here acts where there is a GPU."""

from __future__ import annotations

import torch


def stand_in() -> None:
    """Patch this process, once, unless it has CUDA.

    - `torch.cuda.current_device`: gathered sequences and gradients are allocated on it, forward and backward.
    - `torch.cuda.synchronize`: process groups are made behind one.
    """
    if torch.cuda.is_available():
        return
    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]
    torch.cuda.synchronize = lambda device=None: None
