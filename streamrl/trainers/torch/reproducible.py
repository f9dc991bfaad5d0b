"""The switch for kernels that give the same bits every time."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def reproducible(enabled: bool) -> Generator[None]:
    """Reproducible kernels only, for as long as it lasts: the switch belongs to the process, and others run in it too."""
    memory: Any = torch.utils.deterministic
    before, filled = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(enabled)
    memory.fill_uninitialized_memory = False  # costs a pass over every new tensor and changes no result here
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        memory.fill_uninitialized_memory = filled
