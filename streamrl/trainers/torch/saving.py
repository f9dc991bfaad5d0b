"""How a rank's checkpoints are written beside training: copied to the host and to disk by a thread that nobody waits for.

```text
training thread   save ── forward, backward ───────────┬─ optimizer writes the state
                   │                                   │ (`settle` waits for the copies)
writing thread     └─ copy to the host ─ write, sync, read back ─ done
```
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import torch

from streamrl.errors import TrainingError
from streamrl.models.checkpoint import TorchState, write_checkpoint, write_tensors
from streamrl.models.directories import BackgroundWriter, written
from streamrl.models.tensor_files import part_folder
from streamrl.trainers.torch.host_copies import HostCopies, HostMemory
from streamrl.trainers.torch.parallel import Parallel
from streamrl.trainers.torch.snapshot import HostReader


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
                path, partial(parallel.writers.write, begun, part_folder(parallel.mesh, parallel.part), write_own, seen=seen)
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
