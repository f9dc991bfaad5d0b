"""The engine's end of `benchmarks.weights.snapshots`: a manifest a line in, milliseconds and digest out.

`python -m benchmarks.weights.snapshot_reader DIRECTORY GPU`
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from streamrl.engines.live_swap.plan import DEVICE_WINDOW_BYTES
from streamrl.engines.live_swap.side import Side
from streamrl.engines.live_swap.sources import DeviceImages
from streamrl.errors import WeightSyncError
from streamrl.schemas.codec import decode
from streamrl.schemas.weights import Manifest
from streamrl.tensors.digest import combine
from streamrl.tensors.digest_torch import tensor_digests
from streamrl.weights.ipc import IpcTransport
from streamrl.weights.protocol import CudaSource
from streamrl.weights.shm import ShmTransport


class Reader:
    """Copies versions into one buffer of its device."""

    def __init__(self, directory: Path, device: torch.device) -> None:
        shm = ShmTransport(run="bench", policy="policy", directory=directory)
        self._transport = IpcTransport(run="bench", policy="policy", directory=directory, fallback=shm)
        self._device = device
        self._images = DeviceImages(device, Side(device, []))
        self._own: Tensor | None = None

    async def read(self, manifest: Manifest) -> tuple[float, str]:
        """Milliseconds from the lease to the end of the copy, and the copy's digest."""
        if self._own is None:
            self._own = torch.empty(manifest.nbytes, dtype=torch.uint8, device=self._device)
        torch.cuda.synchronize(self._device)
        began = time.perf_counter()
        async with self._transport.source(manifest) as source:
            if not isinstance(source, CudaSource):
                raise WeightSyncError(f"expected device memory, got {source}")
            for span in self._images.spans(source):
                for first in range(span.first, span.end, DEVICE_WINDOW_BYTES):
                    end = min(span.end, first + DEVICE_WINDOW_BYTES)
                    span.wait(end)
                    self._own[first:end].copy_(span.data[first - span.first : end - span.first])
            torch.cuda.synchronize(self._device)
        took_ms = 1e3 * (time.perf_counter() - began)
        views = [self._own[t.offset : t.offset + t.nbytes].view(getattr(torch, t.dtype)).view(t.shape) for t in manifest.tensors]
        return took_ms, combine(dict(zip([t.name for t in manifest.tensors], tensor_digests(views), strict=True)))


async def main(directory: Path, device: torch.device) -> None:
    """Answer until the input ends."""
    torch.cuda.set_device(device)
    reader = Reader(directory, device)
    while line := await asyncio.to_thread(sys.stdin.readline):
        took_ms, digest = await reader.read(decode(bytes.fromhex(line), Manifest, where="standard input"))
        sys.stdout.write(f"{took_ms} {digest}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), torch.device("cuda", int(sys.argv[2]))))
