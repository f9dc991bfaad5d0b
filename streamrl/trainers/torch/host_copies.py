"""Copies of a trainer's state on the host, made while it goes on: only what writes the state waits for them.

```text
training thread   save ──┬── forward, backward ──┬─ settle ─ optimizer writes
writer's thread          └─ copies to the host ──┘─ files, read back, renamed
```
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from torch import Tensor

from streamrl.models.checkpoint import TorchState, host_bytes
from streamrl.trainers.torch.snapshot import HostReader


class HostMemory:
    """Tensors on the host that the next checkpoint is copied to as well: memory that is new takes several times as long to fill."""

    def __init__(self, reader: HostReader) -> None:
        self._reader = reader
        self._tensors: list[Tensor] = []

    def copy(self, place: int, tensor: Tensor) -> Tensor:
        """A copy of `tensor` in the memory that the one at this place was copied to before, if it was like it."""
        self._tensors += [torch.empty(0)] * (place + 1 - len(self._tensors))
        if (out := self._tensors[place]).shape != tensor.shape or out.dtype != tensor.dtype:
            self._tensors[place] = out = torch.empty(tensor.shape, dtype=tensor.dtype)
        with self._reader.stream():
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        self._reader.read(flat, host_bytes(out))
        return out


class HostCopies:
    """Of one state, as it is at this point of the current stream, if nothing writes it before `settle` has returned.

    Args:
        memory: takes them, and nobody uses what it has taken before.
        device: where the state lies.
    """

    def __init__(self, memory: HostMemory, device: torch.device) -> None:
        self._memory = memory
        self._made = threading.Event()
        self._ready: Any = None
        if device.type == "cuda":
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(device))

    def make(self, state: TorchState) -> TorchState:
        """The state on the host; call it once, from any thread."""
        known: dict[tuple[int, int], Tensor] = {}

        def copy(tensor: Tensor) -> Tensor:
            place = (tensor.data_ptr(), tensor.nbytes)  # a part's rows are parameter and master in one
            if not tensor.numel():
                return torch.empty(tensor.shape, dtype=tensor.dtype)
            if place not in known:
                known[place] = self._memory.copy(len(known), tensor)
            return known[place]

        try:
            if self._ready is not None:
                self._ready.synchronize()
            return state.on_host(copy)
        finally:
            self.end()

    def end(self) -> None:
        """Nobody needs to wait any longer: the state has been copied, or never will be."""
        self._made.set()

    def settle(self) -> float:
        """Wait until the state has been copied; returns for how many seconds."""
        start_s = time.perf_counter()
        self._made.wait()
        return time.perf_counter() - start_s
