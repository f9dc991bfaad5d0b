"""A trainer's end of the process group over which SGLang's `update_weights_from_distributed` takes weights."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

BUCKET_NBYTES = 1 << 30
"""Bytes of tensors that travel together."""
_HOST = "127.0.0.1"
_NCCL_TIMEOUT = timedelta(seconds=600)
"""Longer than a benchmark: a group of NCCL that times out ends its process."""
_GLOO_TIMEOUT = timedelta(seconds=30)
_EQUAL = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""What SGLang sets for its ranks unless the environment says otherwise; ranks that differ in it wait for each other forever."""


class TrainerGroup:
    """Rank 0 of a group whose other ranks are an engine's.

    `torch.distributed` of this process does not know the group: it is made of a backend alone, under the keys at which the others,
    who make theirs by `torch.distributed`, look for it.

    Args:
        device: of the trainer's weights. On a GPU the backend is NCCL, of which no two ranks may be on one GPU; otherwise gloo.
        ranks: of the engine.
        name: of the group.
    """

    def __init__(self, device: torch.device, *, ranks: int, name: str) -> None:
        self.size = 1 + ranks
        self.name = name
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self._device = device
        self._store = TCPStore(_HOST, 0, self.size, is_master=True, timeout=_NCCL_TIMEOUT, wait_for_workers=False)
        self._group: Any = None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port at which the others find this rank."""
        return _HOST, self._store.port

    def join(self) -> None:
        """Make the group. With gloo it blocks until the others are there, with NCCL the first `send` does."""
        self._group = _nccl(self._keys("cuda"), self.size) if self.backend == "nccl" else _gloo(self._keys("cpu"), self.size)

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send the bytes of tensors, one after the other, to all other ranks; blocks until they have them. Not for an event loop."""
        flat = torch.cat([tensor.detach().flatten().view(torch.uint8) for tensor in tensors])
        self._group.broadcast([flat]).wait()
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """Leave in good order; may block until the others leave."""
        self._group.shutdown()

    def abort(self) -> None:
        """Leave at once. A `send` under way ends; with gloo when its 30 s are over."""
        if self._group is not None:
            self._group.abort()

    def _keys(self, kind: str) -> Store:
        """The part of the store that SGLang and torch.distributed give to a group of this name and a device of this kind."""
        return PrefixStore(f"{kind}/", PrefixStore(f"{self.name}/", PrefixStore(self.name, self._store)))


def buckets_of(tensors: Mapping[str, torch.Tensor], nbytes: int = BUCKET_NBYTES) -> Iterator[list[str]]:
    """Names in order, in groups of at most so many bytes; a larger tensor is alone in its group."""
    names: list[str] = []
    total = 0
    for name, tensor in tensors.items():
        if names and total + tensor.nbytes > nbytes:
            yield names
            names, total = [], 0
        names.append(name)
        total += tensor.nbytes
    if names:
        yield names


def _nccl(store: Store, size: int) -> Any:
    # Not in a torch that was built for a CPU.
    from torch.distributed.distributed_c10d import ProcessGroupNCCL

    for name, value in _EQUAL.items():
        os.environ.setdefault(name, value)
    options = ProcessGroupNCCL.Options()
    options._timeout = _NCCL_TIMEOUT
    return ProcessGroupNCCL(store, 0, size, options)


def _gloo(store: Store, size: int) -> Any:
    from torch.distributed.distributed_c10d import ProcessGroupGloo

    return ProcessGroupGloo(store, 0, size, _GLOO_TIMEOUT)
