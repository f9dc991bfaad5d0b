"""An engine on a GPU: `python ipc_gpu_reader.py DIRECTORY GPU`; `device|host|hold MANIFEST` in, digests out."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec
import torch

from streamrl.engines.live_swap.side import Side
from streamrl.engines.live_swap.sources import DeviceImages
from streamrl.errors import WeightSyncError
from streamrl.schemas.weights import Manifest
from streamrl.tensors.digest import combine, tensor_digest
from streamrl.tensors.digest_torch import tensor_digests
from streamrl.weights.ipc import IpcTransport
from streamrl.weights.ipc_memory import CudaOpener
from streamrl.weights.manifest import ITEM_BYTES
from streamrl.weights.protocol import CudaSource
from streamrl.weights.shm import ShmTransport
from tests.support.wanted import fetched


class Reader:
    def __init__(self, directory: Path, device: torch.device) -> None:
        shm = ShmTransport(run="r", policy="policy", directory=directory)
        self._transport = IpcTransport(run="r", policy="policy", directory=directory, fallback=shm, opener=CudaOpener)
        self._device = device
        self._images = DeviceImages(device, Side(device, []))

    async def host(self, manifest: Manifest) -> str:
        content = await fetched(self._transport, manifest)
        return combine({t.name: tensor_digest(content[t.offset : t.offset + t.nbytes], ITEM_BYTES[t.dtype]) for t in manifest.tensors})

    async def device(self, manifest: Manifest) -> str:
        async with self._transport.source(manifest) as source:
            assert isinstance(source, CudaSource)
            mine = torch.zeros(manifest.nbytes, dtype=torch.uint8, device=self._device)
            for span in self._images.spans(source):
                assert span.data.device == self._device
                span.wait(span.end)
                mine[span.first : span.end] = span.data
            torch.cuda.synchronize(self._device)
        tensors = [mine[t.offset : t.offset + t.nbytes].view(getattr(torch, t.dtype)).view(t.shape) for t in manifest.tensors]
        return combine(dict(zip([t.name for t in manifest.tensors], tensor_digests(tensors), strict=True)))

    async def hold(self, manifest: Manifest) -> str:
        """Take the lease and never let go."""
        async with self._transport.source(manifest):
            say("held")
            await asyncio.sleep(600)
        return ""


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def main(directory: Path, device: torch.device) -> None:
    torch.cuda.set_device(device)
    reader = Reader(directory, device)
    while line := await asyncio.to_thread(sys.stdin.readline):
        way, body = line.split()
        manifest = msgspec.msgpack.decode(bytes.fromhex(body), type=Manifest)
        try:
            say(await getattr(reader, way)(manifest))
        except WeightSyncError as error:
            say(f"error {error.message}")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), torch.device("cuda", int(sys.argv[2]))))
