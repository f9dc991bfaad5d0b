"""Device memory that other processes of this host can open: a CUDA memory handle as bytes, nothing pickled.

The bytes are the MessagePack of what torch says about a shared storage: the memory handle, size, offset in the allocation, and
torch's own counter of users. They name memory, they do not protect it: who may read it, and until when, is decided elsewhere
(`streamrl.weights.ipc_lease`). The opening process need not see the device that holds the memory; it reads it through its own.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import Tensor

from streamrl.errors import WeightSyncError


class Handle(msgspec.Struct, frozen=True, array_like=True):
    """torch's description of a shared storage, without the event: the sharer waits until the bytes are complete instead."""

    memory: bytes
    nbytes: int
    offset: int
    counter: bytes
    counter_index: int


def share(buffer: Tensor) -> bytes:
    """Let other processes of this host open the storage of a CUDA tensor; call it once for each buffer, the bytes serve all readers.

    Raises:
        WeightSyncError: this machine does not allow it.
    """
    storage: Any = buffer.untyped_storage()
    try:
        _, memory, nbytes, offset, counter, index, _, _ = storage._share_cuda_()
    except (RuntimeError, AttributeError) as error:
        raise WeightSyncError(
            f"cannot share {buffer.nbytes} bytes of {buffer.device} with other processes: {error}",
            hint="set weights.transport = 'shm'; CUDA IPC needs Linux, one kernel for both processes, and no expandable segments",
        ) from error
    return msgspec.msgpack.encode(Handle(memory, nbytes, offset, counter, index))


def open_shared(handle: bytes, device: torch.device) -> Tensor:
    """The bytes that another process shared: [nbytes] uint8, read through `device` (this process's index).

    It stays open for as long as the tensor or a view of it is referenced. A process cannot open what it shared itself.

    Raises:
        WeightSyncError: the bytes are no handle, or the memory is gone.
    """
    try:
        found = msgspec.msgpack.decode(handle, type=Handle)
    except msgspec.DecodeError as error:
        raise WeightSyncError(f"expected a CUDA memory handle, got {len(handle)} other bytes: {error}") from error
    if not torch.cuda.is_available():
        raise WeightSyncError(
            f"expected a CUDA device to open {found.nbytes} shared bytes with, got none in this process",
            hint="set weights.also_on_bus = true for engines without a GPU",
        )
    index = torch.cuda.current_device() if device == torch.device("cuda") else device.index
    torch.cuda.init()
    storage_type: Any = torch.UntypedStorage
    try:
        with torch.cuda.device(index):
            storage = storage_type._new_shared_cuda(
                index, found.memory, found.nbytes, found.offset, found.counter, found.counter_index, b"", False
            )
    except RuntimeError as error:
        raise WeightSyncError(
            f"cannot open {found.nbytes} shared bytes on cuda:{index}: {error}",
            hint="the process that shared them has ended, or the two devices cannot reach each other",
        ) from error
    return torch.empty(0, dtype=torch.uint8, device=f"cuda:{index}").set_(storage)
