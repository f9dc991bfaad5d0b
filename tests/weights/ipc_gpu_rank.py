"""A trainer's rank on a GPU: `python ipc_gpu_rank.py DIRECTORY RANK RANKS GPU`; `publish N` or `step` in, contributions in hex out.

It holds rows of float32 parameters, as FSDP2 does, and publishes them in bfloat16; one parameter stays in float32.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec
import torch

from streamrl.schemas.versions import Version
from streamrl.tensors.mesh import Mesh
from streamrl.trainers.torch.snapshot import Published, SnapshotRing
from streamrl.weights.ipc import IpcTransport
from streamrl.weights.shm import ShmTransport

SHAPES = {f"layers.{layer}.weight": (1001, 5000) for layer in range(11)} | {"layers.0.norm": (3,), "head": (5000, 4000), "scale": (1, 8)}


def held(rank: int, ranks: int, device: torch.device) -> list[Published]:
    """This rank's rows of what all ranks make alike."""
    generator = torch.Generator().manual_seed(0)
    mesh, found = Mesh(shard=ranks), list[Published]()
    for name, shape in SHAPES.items():
        rows = mesh.rows(shape[0], rank)
        own = torch.randn(shape, generator=generator)[rows.start : rows.stop].to(device)
        dtype = torch.float32 if name == "head" else torch.bfloat16
        found.append(Published(name, own, dtype, shape, mesh.slice(shape, rank)[0]))
    return found


async def main(directory: Path, rank: int, ranks: int, device: torch.device) -> None:
    own = held(rank, ranks, device)
    ring = SnapshotRing(own, device, slots=2)
    shm = ShmTransport(run="r", policy="policy", directory=directory, rank=rank)
    transport = IpcTransport(run="r", policy="policy", directory=directory, fallback=shm)
    while line := await asyncio.to_thread(sys.stdin.readline):
        if line.startswith("publish"):
            made = await transport.contribute(Version(0, int(line.split()[1])), ring.shards())
            sys.stdout.write(msgspec.msgpack.encode(made).hex() + "\n")
        else:
            ring.settle()
            for one in own:
                one.held.mul_(-1.0625)
            sys.stdout.write("stepped\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), torch.device("cuda", int(sys.argv[4]))))
