"""The reading end of transport `ipc` in a process that wants the bytes on the host; torch is imported when it is made."""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from streamrl.errors import WeightSyncError
from streamrl.tensors import cuda_ipc
from streamrl.weights.protocol import HostBytes

STAGING_BYTES = 32 << 20


class CudaOpener:
    """Implements `streamrl.weights.ipc.Opener`: keeps the ring's buffers open between versions, for opening one takes milliseconds."""

    def __init__(self) -> None:
        self._opened: dict[tuple[str, bytes], CudaMemory] = {}
        self._lock = threading.Lock()

    def usable(self) -> bool:
        return torch.cuda.is_available()

    def open(self, handle: bytes, owner: str, owners: Collection[str]) -> CudaMemory:
        with self._lock:
            self._opened = {key: memory for key, memory in self._opened.items() if key[0] in owners}
            if (owner, handle) not in self._opened:
                self._opened[owner, handle] = CudaMemory(cuda_ipc.open_shared(handle, torch.device("cuda")))
            return self._opened[owner, handle]


class CudaMemory:
    """Device memory, read through pinned host memory on a stream of its own."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._stream: Any = torch.cuda.Stream(memory.device)
        self._staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True)
        self._lock = threading.Lock()

    def read(self, start: int, out: HostBytes) -> None:
        """Write bytes `start .. start + len(out)` to the host; raises WeightSyncError where the memory ends before them."""
        if start + len(out) > self._memory.numel():
            raise WeightSyncError(f"expected {len(out)} bytes at {start} of a buffer of {self._memory.numel()}", offset=start)
        target = torch.from_numpy(out)
        with self._lock, torch.cuda.stream(self._stream):
            for first in range(0, len(target), STAGING_BYTES):
                piece = target[first : first + STAGING_BYTES]
                half = self._staging[: len(piece)]
                half.copy_(self._memory[start + first : start + first + len(piece)], non_blocking=True)
                self._stream.synchronize()
                piece.copy_(half)
