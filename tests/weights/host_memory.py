"""What stands for a device where there is none: a snapshot's buffer in memory that other processes of this host can map."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np

from streamrl.errors import WeightSyncError
from streamrl.weights.protocol import HostBytes

if TYPE_CHECKING:
    import torch


def share(buffer: torch.Tensor) -> bytes:
    """As `streamrl.tensors.cuda_ipc.share`, of a tensor on the host: its storage moves to shared memory."""
    storage: Any = buffer.untyped_storage()
    descriptor, _ = storage._share_fd_cpu_()
    return f"/proc/{os.getpid()}/fd/{descriptor}".encode()


class MappedOpener:
    """As `streamrl.weights.ipc_memory.CudaOpener`."""

    def __init__(self, *, usable: bool = True) -> None:
        self._usable = usable

    def usable(self) -> bool:
        return self._usable

    def open(self, handle: bytes, owner: str, owners: Collection[str]) -> Mapped:
        try:
            return Mapped(np.memmap(handle.decode(), dtype=np.uint8, mode="r"))
        except OSError as error:
            raise WeightSyncError(f"cannot open {handle!r}: {error}") from error


class Mapped:
    def __init__(self, memory: Any) -> None:
        self._memory = memory

    def read(self, start: int, out: HostBytes) -> None:
        found = self._memory[start : start + len(out)]
        if len(found) != len(out):
            raise WeightSyncError(f"expected {len(out)} bytes at {start} of device memory, got {len(found)}", offset=start)
        out[:] = found
