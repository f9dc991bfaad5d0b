"""How a rank's checkpoints are written beside training: copied to the host and to disk by a thread that nobody waits for.

```text
training thread   save ── forward, backward ───────────┬─ optimizer writes the state
                   │                                   │ (`settle` waits for the copies)
writing thread     └─ copy to the host ─ write, sync, read back ─ done
```
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from streamrl.errors import TrainingError
from streamrl.models.checkpoint import TorchState, write_checkpoint, write_tensors
from streamrl.models.directories import BackgroundWriter, written
from streamrl.models.tensor_files import host_bytes, part_folder
from streamrl.trainers.torch.parallel import Parallel
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


class Saving:
    """One rank's checkpoints. One thread calls it."""

    def __init__(self, parallel: Parallel, device: torch.device) -> None:
        self._parallel = parallel
        self._device = device
        self._writer = BackgroundWriter()
        self._memory = HostMemory(HostReader(device))
        self._copies: HostCopies | None = None
        """Of the newest checkpoint, while they may still be under way."""
        self._waited_s: float | None = None

    def save(self, path: Path, make: Callable[[], TorchState], extra: bytes, beside: Mapping[str, bytes] | None) -> Future[None]:
        """Write what `make` gives. Of a model that is cut the ranks of its first copy write their parts.

        On other ranks the future is done at once. The state is copied to the host by the thread that writes; whatever writes the state
        waits for that (`settle`).

        Args:
            path: of the checkpoint.
            make: called where this rank has something to write, with every rank of its copy.
            extra: the caller's bytes.
            beside: files that are written with it.
        """
        parallel = self._parallel
        if parallel.copy or (parallel.rank and not parallel.sharded):
            return written()
        self._writer.wait()
        begun, seen = None, True
        if parallel.writers is not None:
            try:
                begun, seen = parallel.writers.meet(path)
            except TrainingError as error:
                return written(error)
        state = make()
        self._copies = copies = HostCopies(self._memory, self._device)

        def write_own(folder: Path) -> None:
            write_tensors(folder, copies.make(state), parallel.mesh, parallel.part)

        def write_all(directory: Path) -> None:
            write_checkpoint(directory, copies.make(state), extra, parallel.mesh)

        if parallel.writers is None or begun is None:
            future = self._writer.submit(path, write_all, beside)
        elif parallel.rank == 0:
            future = self._writer.submit(path, write_all, beside, begun=begun, others=parallel.writers.hear)
        else:
            future = self._writer.start(
                path, partial(parallel.writers.write, begun, part_folder(parallel.part, parallel.mesh.shard), write_own, seen=seen)
            )
        future.add_done_callback(lambda _: copies.end())
        return future

    def settle(self) -> None:
        """Before parameters and moments are written: let copies of them be complete."""
        if self._copies is not None:
            self._waited_s = (self._waited_s or 0.0) + self._copies.settle()
            self._copies = None

    def take_waited_s(self) -> float | None:
        """Seconds that `settle` has waited since this was asked last; None: nothing was being copied."""
        found, self._waited_s = self._waited_s, None
        return found
