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

from streamrl.trainers.torch.checkpoint import TorchState, host_bytes
from streamrl.trainers.torch.snapshot import HostReader


class HostCopies:
    """Of one state, as it is at this point of the current stream, if nothing writes it before `settle` has returned.

    Args:
        reader: brings a device's memory to the host.
        device: where the state lies.
    """

    def __init__(self, reader: HostReader, device: torch.device) -> None:
        self._reader = reader
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
            if place not in known or not tensor.numel():
                known[place] = self._copy(tensor)
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

    def _copy(self, tensor: Tensor) -> Tensor:
        out = torch.empty(tensor.shape, dtype=tensor.dtype)
        if tensor.numel():
            with self._reader.stream():
                flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            self._reader.read(flat, host_bytes(out))
        return out
